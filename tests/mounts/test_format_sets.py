"""Reference sets of GRIB, GeoTIFF and FITS files, read as NetCDF files and as arrays (tests/data/formats)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import netCDF4
import numpy as np
import pytest

from tests.conftest import DATA, run
from tests.mounts.mounting import mounted

EXPECTED = {
    ("grib", "t2m"): 286 + np.linspace(0, 20, 31 * 16).reshape(31, 16),
    ("geotiff", "array"): np.arange(64 * 75, dtype="<u2").reshape(64, 75),
    ("fits", "PRIMARY"): np.arange(100 * 80, dtype=">i2").reshape(100, 80),
}


@pytest.fixture
def formats(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "formats", tmp_path / "formats"))


@pytest.mark.parametrize(("name", "variable"), EXPECTED)
def test_a_set_is_read_as_netcdf_or_as_arrays(name: str, variable: str, formats: Path, tmp_path: Path) -> None:
    """Each format takes seconds to import its codecs, so that each is read in one view."""
    expected, view = EXPECTED[name, variable], "arrays" if name == "geotiff" else "netcdf"
    with mounted(formats / f"{name}.json", tmp_path / "mnt", f"view={view}") as mountpoint:
        if view == "arrays":
            [path] = [one for one in mountpoint.iterdir() if one.name in (f"{variable}.npy", f"{name}.npy")]
            found = np.load(path)
        else:
            with netCDF4.Dataset(mountpoint / f"{name}.nc") as file:
                file.set_auto_mask(False)
                found = np.asarray(file[variable][:])
        assert found.shape == expected.shape
        assert np.allclose(found, expected, rtol=0, atol=2e-4)


def test_a_missing_package_is_named(formats: Path) -> None:
    (formats / "hidden").mkdir()
    (formats / "hidden/sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'imagecodecs' else find(name, *more)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(formats / "hidden")}
    done = run("check", formats / "geotiff.json", "-o", "view=arrays", env=environment)
    assert done.returncode == 1
    assert "imagecodecs_delta: needs the Python package imagecodecs, which is not installed here" in done.stdout
