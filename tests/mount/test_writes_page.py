"""The transcript in docs/writes.md: every command does what is written below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import zarr

from tests.conftest import PROGRAM
from zarrfs.cli import main

PAGE = Path(__file__).parents[2] / "docs/writes.md"
MARK = "-- the end of a command --"


def transcript(page: Path = PAGE) -> list[tuple[str, str]]:
    """(command, what it writes) of the block that begins with "$"."""
    block = re.search(r"```\n(\$ .*?)```", page.read_text(), re.DOTALL)
    assert block is not None
    found: list[tuple[str, str]] = []
    here = False
    for line in block[1].splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:], ""))
            here = "<<'EOF'" in line
        elif here:
            found[-1] = found[-1][0] + line, ""
            here = line != "EOF\n"
        else:
            found[-1] = found[-1][0], found[-1][1] + line
    return found


def check_transcript(tmp_path: Path, page: Path = PAGE) -> None:
    """Run the commands of a page in `tmp_path`, which it calls /data; what they write is what it says."""
    commands = transcript(page)
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


def test_the_transcript(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "data.zarr"), mode="w", zarr_format=2)
    array = group.create_array("air", shape=(4, 1000), chunks=(1, 1000), dtype="f4", compressors=None, fill_value=0)
    array[:] = np.arange(4000).reshape(4, 1000)
    array.attrs["units"] = "C"
    main(["refs", "from-store", f"{tmp_path}/data.zarr", "-o", f"{tmp_path}/refs.json"], standalone_mode=False)
    check_transcript(tmp_path)
