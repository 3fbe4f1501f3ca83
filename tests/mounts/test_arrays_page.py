"""The transcript in docs/array-views.md: every command prints the output shown below it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zarr

from tests.pages import DOCS, check_transcript

PAGE = DOCS / "array-views.md"


def test_the_transcript_shows_the_real_output(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "forecast.zarr", mode="w", zarr_format=3)
    root.attrs["title"] = "a forecast"
    array = root.create_group("model").create_array("t2m", shape=(4, 300, 300), chunks=(1, 100, 100), dtype="f4")
    array[:] = np.arange(360_000).reshape(4, 300, 300)
    array.attrs["units"] = "K"
    check_transcript(tmp_path, PAGE, least=9)
