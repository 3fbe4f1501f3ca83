"""The transcript in docs/writes.md: each command prints the output shown below it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zarr

from tests.pages import DOCS, check_transcript
from zarrfs.cli import main


def test_the_transcript(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "data.zarr"), mode="w", zarr_format=2)
    array = group.create_array("air", shape=(4, 1000), chunks=(1, 1000), dtype="f4", compressors=None, fill_value=0)
    array[:] = np.arange(4000).reshape(4, 1000)
    array.attrs["units"] = "C"
    main(["refs", "from-store", f"{tmp_path}/data.zarr", "-O", f"{tmp_path}/refs.json"], standalone_mode=False)
    check_transcript(tmp_path, DOCS / "writes.md", least=9)
