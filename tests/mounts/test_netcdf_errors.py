"""view=netcdf after a read has failed: programs and libraries get an error or the right values, never zeros."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr

from tests.mounts.mounting import mounted

BAD, COUNT = 7, 12
Read = Callable[[int, slice], Any]  # (chunk, columns of its first row)


@contextlib.contextmanager
def by_h5py(path: Path) -> Iterator[Read]:
    with h5py.File(path) as file:
        yield lambda chunk, part: file["v"][chunk, 0, part]


@contextlib.contextmanager
def by_netcdf4(path: Path) -> Iterator[Read]:
    with netCDF4.Dataset(path) as file:
        yield lambda chunk, part: file["v"][chunk, 0, part]


def by_xarray(**options: Any) -> Any:
    @contextlib.contextmanager
    def opened(path: Path) -> Iterator[Read]:
        with xr.open_dataset(path, cache=False, **options) as data:
            yield lambda chunk, part: data["v"][chunk, 0, part].values

    return opened


READERS = {
    "h5py": by_h5py, "netCDF4": by_netcdf4, "xarray netcdf4": by_xarray(engine="netcdf4"),
    "dask": by_xarray(engine="h5netcdf", chunks={}),
}  # fmt: skip


def outcome(read: Read, chunk: int, part: slice) -> list[float] | None:
    """Return the values that a read returns; None for an error."""
    try:
        return np.asarray(read(chunk, part)).tolist()
    except (OSError, RuntimeError):
        return None


@pytest.fixture(params=[32])  # 4 KiB; 300 are 352 KiB
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a store whose chunk 7 is a directory: reading it fails."""
    side = request.param
    root = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    v = root.create_array("v", shape=(COUNT, side, side), chunks=(1, side, side), dtype="f4", compressors=None)
    v[:] = values(side)
    v.attrs["_ARRAY_DIMENSIONS"] = ["t", "y", "x"]
    spoil(tmp_path / "x.zarr")
    return tmp_path / "x.zarr"


def values(side: int) -> np.ndarray[Any, Any]:
    return np.arange(1, COUNT * side * side + 1, dtype="f4").reshape(COUNT, side, side)


def spoil(store: Path) -> None:
    chunk = store / f"v/{BAD}.0.0"
    chunk.rename(store / "good")
    chunk.mkdir()


def repair(store: Path) -> None:
    chunk = store / f"v/{BAD}.0.0"
    chunk.rmdir()
    (store / "good").rename(chunk)


@pytest.mark.parametrize(("reader", "source"), [*zip(READERS, (32, 300, 32, 300), strict=True)], indirect=["source"])
def test_an_open_file_reads_errors_or_right_values(source: Path, reader: str, tmp_path: Path) -> None:
    """Read the bad chunk several times, as dask does that tries again, its neighbours, others; then repair it."""
    side = zarr.open_array(source / "v", mode="r").shape[1]
    right, some, one = values(side), slice(0, 3), slice(side - 1, side)
    order = [(BAD, some), (BAD, some), (BAD, one), (BAD - 1, some), (BAD - 1, one), (BAD, one), (BAD + 1, some),
             (0, some), (COUNT - 1, one), *[(BAD, some)] * 3, (BAD + 1, one)]  # fmt: skip
    with mounted(source, tmp_path / "mnt", "view=netcdf") as mountpoint, READERS[reader](mountpoint / "x.nc") as read:
        for chunk, part in order:
            found, wanted = outcome(read, chunk, part), right[chunk, 0, part].tolist()
            shares_a_page = side == 300 and abs(chunk - BAD) == 1
            assert found is None if chunk == BAD else found == wanted or (shares_a_page and found is None), chunk
        repair(source)
        for chunk, part in order:
            assert outcome(read, chunk, part) == right[chunk, 0, part].tolist()


def test_programs_fail_and_then_print_right_values(source: Path, tmp_path: Path) -> None:
    side = zarr.open_array(source / "v", mode="r").shape[1]
    with mounted(source, tmp_path / "mnt", "view=netcdf") as mountpoint:
        file = mountpoint / "x.nc"
        tools = {
            "ncdump": ["ncdump", "-v", "v", file], "cdo": ["cdo", "-s", "infon", file],
            "ncks": ["ncks", "-O", "-v", "v", file, tmp_path / "copy.nc"],
        }  # fmt: skip
        for command in tools.values():
            for _ in range(2):
                done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
                assert done.returncode != 0, done.stdout
        assert subprocess.run(["ncdump", "-h", file], stdout=subprocess.DEVNULL, check=False).returncode == 0
        repair(source)
        shown = {name: subprocess.check_output([*map(str, command)], text=True) for name, command in tools.items()}
        numbers = shown["ncdump"].partition("data:")[2].partition("=")[2].rstrip("} ;\n").split(",")
        assert [float(number) for number in numbers] == pytest.approx(values(side).ravel().tolist())
        table = [line.split() for line in shown["cdo"].splitlines()[1:]]
        assert [float(line[8]) for line in table] == pytest.approx(values(side).min((1, 2)).tolist(), rel=1e-4)
        with netCDF4.Dataset(tmp_path / "copy.nc") as copy:
            assert (copy["v"][:] == values(side)).all()
