"""The transcript in docs/zarr-views.md: every command does what is written below it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import PROGRAM
from tests.mount.test_writes_page import MARK, transcript
from tests.zarrsamples import ROOT

PAGE = Path(__file__).parents[2] / "docs/zarr-views.md"


def test_the_transcript(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "store/table").mkdir(parents=True)
    about = json.loads((ROOT / "v2_hier/struct/.zarray").read_text())
    mixed = about | {"dtype": [["x", ">i4"], ["y", "<f8"]]}
    (tmp_path / "store/table/.zarray").write_text(json.dumps(mixed))
    shutil.copytree(ROOT / "v0_int32_01", tmp_path / "store/rain")
    commands = transcript(PAGE)
    assert len(commands) > 8
    path = ":".join((os.path.dirname(PROGRAM), os.path.dirname(sys.executable), os.environ["PATH"]))
    script = "exec 2>&1\n" + "".join(f"{command}echo '{MARK}'\n" for command, _output in commands)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=os.environ | {"PATH": path, "LC_ALL": "C"}, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    subprocess.run([PROGRAM, "umount", str(tmp_path / "mnt")], capture_output=True, check=False)  # if that has failed
    outputs = done.stdout.replace(str(tmp_path), "/data").split(f"{MARK}\n")
    assert list(zip([command for command, _output in commands], outputs, strict=False)) == commands
