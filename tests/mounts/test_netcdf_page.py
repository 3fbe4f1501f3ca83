"""The transcript in docs/netcdf.md: every command prints the output shown below it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.pages import DOCS, ROOT, check_transcript

PAGE = DOCS / "netcdf.md"


def test_the_transcript(tmp_path: Path) -> None:
    t = np.linspace(250, 310, 4 * 90 * 120).reshape(4, 90, 120)
    forecast = xr.Dataset(
        {"t2m": (("time", "lat", "lon"), t, {"long_name": "2 metre temperature", "units": "K"})},
        {
            "time": ("time", np.arange(4), {"units": "days since 2016-01-01"}),
            "lat": ("lat", np.linspace(-89, 89, 90), {"units": "degrees_north"}),
            "lon": ("lon", np.linspace(0, 357, 120), {"units": "degrees_east"}),
        },
        {"title": "a forecast"},
    )
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768, "chunks": (1, 45, 60)}
    forecast.to_zarr(tmp_path / "forecast.zarr", zarr_format=2, encoding={"t2m": packed})
    check_transcript(tmp_path, PAGE, least=6)


@pytest.mark.timeout(600)
def test_the_map_is_drawn(tmp_path: Path) -> None:
    command = [ROOT / "scripts/draw-map", tmp_path / "map.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    drawn, kept = (path.read_bytes() for path in (tmp_path / "map.png", DOCS / "images/map.png"))
    assert drawn[:24] == kept[:24]  # a PNG of the same size
    assert 0.5 < len(drawn) / len(kept) < 2
