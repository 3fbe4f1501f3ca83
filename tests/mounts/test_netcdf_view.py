"""A mount with view=netcdf, read with programs and libraries for NetCDF and HDF5."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import h5py
import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr

from tests.conftest import run
from tests.mounts.mounting import log_of, mounted

T = np.linspace(230, 310, 6 * 90 * 120).reshape(6, 90, 120)


def write_source(path: Path) -> None:
    """Write a data set with packed data, a missing and a damaged chunk, and an array of a type NetCDF-4 lacks."""
    t = T.copy()
    t[0, :4, :4] = np.nan
    coordinates = {"time": ("time", np.arange(6), {"units": "days since 2000-01-01"}), "level": ((), 2.0)}
    coordinates |= {
        "lat": ("lat", np.linspace(-89, 89, 90), {"units": "degrees_north"}),
        "lon": ("lon", np.linspace(0, 357, 120, dtype="f4"), {"units": "degrees_east"}),
    }
    made = xr.Dataset(
        {
            "t2m": (("time", "lat", "lon"), t, {"units": "K", "long_name": "2 metre température"}),
            "bad": (("time", "x"), np.ones((6, 204_800), "f4")),
            "mask": (("lat", "lon"), np.arange(90 * 120, dtype=">i2").reshape(90, 120)),
            "source": (("time",), np.array(["ship", "buoy 12", "", "Zürich", "東京", "x"], object)),
        },
        coordinates, {"title": "a forecast", "Conventions": "CF-1.8"},
    )  # fmt: skip
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768, "chunks": (1, 45, 60)}
    made.to_zarr(path, zarr_format=2, encoding={"t2m": packed, "bad": {"chunks": (3, 204_800)}})
    (path / "t2m/2.0.1").unlink()
    (path / "bad/1.0").write_bytes(b"damaged")
    quad = json.loads((path / "lat/.zarray").read_text()) | {"dtype": "<f16", "fill_value": None}
    (path / "quad").mkdir()
    (path / "quad/.zarray").write_text(json.dumps(quad))
    group = zarr.open_group(path, mode="r+", use_consolidated=False).create_group("stations")
    group.create_array("name", shape=(2,), chunks=(1,), dtype="S4")[:] = [b"Bonn", b"Ulm"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("netcdf") / "forecast.zarr"
    write_source(path)
    return path


@pytest.fixture(scope="module")
def file(source: Path) -> Iterator[Path]:
    """Mount the source with view=netcdf; yield the path of its NetCDF file."""
    with mounted(source, source.parent / "mnt", "view=netcdf") as mountpoint:
        assert os.listdir(mountpoint) == ["forecast.nc"]
        yield mountpoint / "forecast.nc"


@pytest.fixture(scope="module")
def wanted(source: Path) -> xr.Dataset:
    """Load the Zarr store with xarray, without the damaged array and the one of a type NetCDF-4 lacks."""
    left = ["bad", "quad"]
    return xr.open_zarr(source, consolidated=True, drop_variables=left).load()


def tool(*command: object) -> str:
    """Run a program; return its output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf"])
def test_xarray_reads_the_store(file: Path, wanted: xr.Dataset, engine: Literal["netcdf4", "h5netcdf"]) -> None:
    with xr.open_dataset(file, engine=engine) as found:
        xr.testing.assert_equal(found.drop_vars("bad").load(), wanted)
        assert found.attrs == wanted.attrs
        assert found["t2m"].attrs == wanted["t2m"].attrs
        assert set(found.coords) == {"time", "lat", "lon", "level"}
        assert found["t2m"].isnull()[2, :45, 60:].all()
    with xr.open_datatree(file, engine=engine) as tree:
        assert tree["stations/name"].values.tolist() == [b"Bonn", b"Ulm"]


def test_ncdump_prints_the_metadata_and_values(file: Path) -> None:
    header = tool("ncdump", "-h", file)
    for line in (
        "time = 6 ;", "short t2m(time, lat, lon) ;", "t2m:_FillValue = -32768s ;", "t2m:scale_factor = 0.01 ;",
        't2m:long_name = "2 metre température" ;', 'time:units = "days since 2000-01-01" ;', ':title = "a forecast" ;',
        "char name(phony_dim_2, string4) ;", "char source(time, string7) ;",
    ):  # fmt: skip
        assert line in header
    assert not re.search(r"^\s*string ", header, re.MULTILINE)  # text is NC_CHAR, which every program supports
    assert '"Bonn"' in tool("ncdump", "-v", "/stations/name", file)


def test_a_damaged_chunk_is_an_error_for_its_readers_alone(file: Path) -> None:
    with netCDF4.Dataset(file) as data, h5py.File(file) as other:
        assert (data["bad"][:2] == 1).all()
        with pytest.raises(RuntimeError, match="HDF error"):
            data["bad"][3:]
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            other["bad"][()]
        assert data["mask"][0, 1] == 1
    assert "bad/1.0" in log_of(file.parent)


def test_variables_that_are_left_out_are_reported(file: Path, source: Path) -> None:
    reason = {"quad": "dtype <f16: NetCDF-4 has no such type"}
    for path in (file, file.parent):
        assert json.loads(os.getxattr(path, "user.zarrfs.left_out")) == reason
    assert "user.zarrfs.left_out" in os.listxattr(file)
    assert len([line for line in log_of(file.parent).splitlines() if "left out of view=netcdf" in line]) == 1
    done = run("info", "-q", "-o", "view=netcdf", source)
    assert "quad: dtype <f16: NetCDF-4 has no such type" in done.stdout


def test_copy_writes_a_file_that_is_whole(file: Path, source: Path, tmp_path: Path) -> None:
    """The copy opens without zarrfs. A damaged chunk is reported by `check`, and `copy` does not write the file."""
    sound = tmp_path / "sound.zarr"
    xr.Dataset({"v": ("x", np.arange(50_000.0))}, {"x": np.arange(50_000)}).to_zarr(sound, zarr_format=2)
    done = run("copy", "-o", "view=netcdf", sound, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    with xr.open_dataset(tmp_path / "out/sound.nc") as copy:
        np.testing.assert_array_equal(copy["v"], np.arange(50_000.0))
    done = run("check", "-o", "view=netcdf", source)
    assert done.returncode == 1
    assert "bad/1.0" in done.stdout
    done = run("copy", "-o", "view=netcdf", source, tmp_path / "none")
    assert done.returncode != 0
    assert "bad/1.0" in done.stderr
    assert not list(tmp_path.glob("none/*.nc"))
