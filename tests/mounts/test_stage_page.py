"""The transcript in docs/stage-in.md: each command prints the output shown below it."""

from __future__ import annotations

import numpy as np
import zarr

from tests.mounts.staging import Node
from tests.mounts.staging import node as node
from tests.pages import DOCS, check_transcript
from zarrfs.cli import main

PAGE = DOCS / "stage-in.md"


def test_the_transcript(node: Node) -> None:
    data = node.path / "data"
    data.mkdir()
    group = zarr.open_group(str(data / "data.zarr"), mode="w", zarr_format=2)
    group.create_array("air", shape=(4, 1000), chunks=(1, 1000), dtype="f4", compressors=None)[:] = np.ones((4, 1000))
    (data / "data.zarr/air/.zattrs").write_text('{"units": "C"}\n')
    main(["refs", "from-store", f"{data}/data.zarr", "-O", f"{data}/refs.json"], standalone_mode=False)
    check_transcript(data, PAGE, least=16)
    assert node.clean()
