"""The transcript in docs/info-and-check.md: every command does what is written below it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.conftest import DATA, PROGRAM
from tests.mount.test_writes_page import MARK, transcript

PAGE = Path(__file__).parents[2] / "docs/info-and-check.md"


def test_the_transcript(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zarr/v3_hier", tmp_path / "hier.zarr")
    commands = transcript(PAGE)
    assert len(commands) > 5
    script = "exec 2>&1\n" + "".join(f"{command}echo '{MARK}'\n" for command, _output in commands)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"PATH": f"{os.path.dirname(PROGRAM)}:{os.environ['PATH']}", "LC_ALL": "C"},
    )  # fmt: skip
    outputs = done.stdout.replace(str(tmp_path), "/data").split(f"{MARK}\n")
    assert list(zip([command for command, _output in commands], outputs, strict=False)) == commands
