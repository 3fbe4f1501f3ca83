"""The transcript in docs/stage-in.md: every command does what is written below it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import zarr

from tests.conftest import PROGRAM
from tests.mount.staging import Node
from tests.mount.staging import node as node
from tests.mount.test_writes_page import MARK, transcript
from zarrfs.cli import main

PAGE = Path(__file__).parents[2] / "docs/stage-in.md"


def test_the_transcript(node: Node) -> None:
    data = node.path / "data"
    data.mkdir()
    group = zarr.open_group(str(data / "data.zarr"), mode="w", zarr_format=2)
    group.create_array("air", shape=(4, 1000), chunks=(1, 1000), dtype="f4", compressors=None)[:] = np.ones((4, 1000))
    (data / "data.zarr/air/.zattrs").write_text('{"units": "C"}\n')
    main(["refs", "from-store", f"{data}/data.zarr", "-o", f"{data}/refs.json"], standalone_mode=False)
    commands = transcript(PAGE)
    assert len(commands) > 15
    path = ":".join((os.path.dirname(PROGRAM), os.path.dirname(sys.executable), os.environ["PATH"]))
    script = "exec 2>&1\n" + "".join(f"{command}echo '{MARK}'\n" for command, _output in commands)
    done = subprocess.run(
        ["bash", "-c", script], cwd=data, env=os.environ | {"PATH": path, "LC_ALL": "C"}, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    outputs = done.stdout.replace(str(data), "/data").split(f"{MARK}\n")
    assert list(zip([command for command, _output in commands], outputs, strict=False)) == commands
    assert node.clean()
