"""NetCDF-4 files of Zarr stores: `scripts/bench netcdf`. view=netcdf beside xarray on Zarr, and beside view=arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zarr
from arrays import Arrays, by_zarr, mounted, warm
from measures import Result, interleaved, read_rate

VARIABLES = 205
LARGE = (100_000, 1801, 3600)  # of f4: 2.6 TB
GRID = (1801, 3600)

NOTES = """\
The store of `scripts/bench arrays` with zstd, and stores of documents alone. xarray runs in a process of its own,
imports and opening not counted. All is in the page cache, but for that of fresh mounts.
"""

MEAN = """
import sys, time, xarray
if sys.argv[2] == "zarr":
    data = xarray.open_zarr(sys.argv[1], consolidated=False, chunks=None)["x"]
else:
    data = xarray.open_dataset(sys.argv[1], engine=sys.argv[2])["x"]
began = time.perf_counter()
float(data.mean())
print(data.nbytes / (time.perf_counter() - began) / 1e6)
"""
FIELD = """
import sys, netCDF4
import time
began = time.perf_counter()
with netCDF4.Dataset(sys.argv[1]) as file:
    file.set_auto_mask(False)
    field = file["t"][0]
print((time.perf_counter() - began) * 1e3)
assert field.shape == (1801, 3600)
"""


def documents(root: Path, shape: tuple[int, ...], variables: int) -> Path:
    """Make a store of metadata only: coordinates, and `variables` arrays in chunks of a field, without any chunk."""
    if root.exists():
        return root
    group = zarr.open_group(root, mode="w", zarr_format=2)
    for name, extent in zip(("time", "lat", "lon"), shape, strict=True):
        group.create_array(name, shape=(extent,), chunks=(extent,), dtype="f8").attrs["_ARRAY_DIMENSIONS"] = [name]
    array = group.create_array("t", shape=shape, chunks=(1, *shape[1:]), dtype="f4", fill_value=0)
    array.attrs.update({"_ARRAY_DIMENSIONS": ["time", "lat", "lon"], "units": "K", "long_name": "temperature"})
    for number in range(1, variables):
        copy = root / f"t{number}"
        copy.mkdir()
        for document in (".zarray", ".zattrs"):
            (copy / document).write_bytes((root / "t" / document).read_bytes())
    return root


def measure_mean(run: Arrays, rounds: int) -> Iterator[Result]:
    """Measure xarray's mean over all of a compressed array."""
    store = run.store("zstd")
    document = store / "x/zarr.json"
    about = json.loads(document.read_text()) | {"dimension_names": ["row", "column"]}  # xarray needs them
    document.write_text(json.dumps(about))

    def of(engine: str) -> float:
        warm(store)
        with mounted(run, store, "view=netcdf") as mountpoint:
            return by_zarr(MEAN, mountpoint / "zstd.nc", engine)

    def theirs() -> float:
        warm(store)
        return by_zarr(MEAN, store, "zarr")

    samples = interleaved(
        rounds, {"netcdf4": lambda: of("netcdf4"), "h5netcdf": lambda: of("h5netcdf"), "zarr": theirs}
    )
    for engine in ("netcdf4", "h5netcdf"):
        what = f"mean over {run.size >> 20} MiB, zstd, engine {engine}"
        yield Result(what, "MB/s", samples[engine], "xarray.open_zarr", samples["zarr"], 0.6)


def measure_cat(run: Arrays, rounds: int) -> Iterator[Result]:
    """Measure a sequential read of the NetCDF file, beside that of the array's .npy file."""
    store = run.store("zstd")

    def of(view: str, name: str) -> float:
        warm(store)
        with mounted(run, store, f"view={view}") as mountpoint:
            os.stat(mountpoint / name)
            return read_rate(mountpoint / name)

    samples = interleaved(
        rounds, {"netcdf": lambda: of("netcdf", "zstd.nc"), "arrays": lambda: of("arrays", "x.npy")}
    )
    what = f"contiguous read of {run.size >> 20} MiB, zstd"
    yield Result(what, "MB/s", samples["netcdf"], "view=arrays", samples["arrays"], 0.9)


def measure_header(run: Arrays, rounds: int) -> Iterator[Result]:
    """Measure making the header of a file of many variables, in a first and a second mount, and opening it again."""
    store = documents(run.directory / "many.zarr", (1000, *GRID), VARIABLES - 3)
    first: list[float] = []
    after: list[float] = []
    again: list[float] = []
    for number in range(rounds):
        index = f"index_dir={run.directory}/index{number}"
        for found in (first, after):
            with mounted(run, store, "view=netcdf", index) as mountpoint:
                began = time.perf_counter()
                os.stat(mountpoint / "many.nc")
                found.append(time.perf_counter() - began)
                time.sleep(1.1)  # then the view checks its store again
                began = time.perf_counter()
                (mountpoint / "many.nc").open("rb").close()
                again.append((time.perf_counter() - began) * 1e3)
    yield Result(f"header of {VARIABLES} variables", "s", first, limit=2.0, at_most=True)
    yield Result("in another mount, numpy to import", "ms", [one * 1e3 for one in after])
    yield Result("opened again", "ms", again, limit=50.0, at_most=True)


def measure_large(run: Arrays, rounds: int) -> Iterator[Result]:
    """Measure reading the first field of an array of 2.6 TB."""
    store = documents(run.directory / "large.zarr", LARGE, 1)
    zarr.open_array(store / "t", mode="r+")[0] = 280.0

    def sample() -> float:
        with mounted(run, store, "view=netcdf", f"index_dir={run.directory}/index") as mountpoint:
            command = [sys.executable, "-c", FIELD, str(mountpoint / "large.nc")]
            took = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            assert json.loads(os.getxattr(mountpoint, "user.zarrfs.stats"))["arrays"]["decoded"] <= 8
            return took

    sample()
    samples = [sample() for _ in range(rounds)]
    yield Result("first field of 2.6 TB, by netCDF4", "ms", samples, limit=100.0, at_most=True)


MEASURES = {"mean": measure_mean, "cat": measure_cat, "header": measure_header, "large": measure_large}
