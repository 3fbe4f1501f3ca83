"""Views: `scripts/bench views`. view=arrays and view=netcdf beside zarr-python 3 and xarray on the same store."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peers
import zarr
from measures import Result, interleaved, read_rate
from zarr.codecs import ZstdCodec

COLUMNS = 16_384  # f4
CHUNK = (1024, 1024)  # 4 MiB
RANDOM = 1000  # number of random reads
VARIABLES = 205

NOTES = """\
An array of 4-byte floats in zstd chunks of 4 MiB. zarr-python and xarray run in processes of their own, imports and
opening not counted. All is in the page cache, but for that of fresh mounts.
"""

READ_ALL = """
import sys, time, zarr
array = zarr.open_array(sys.argv[1], mode="r")
began = time.perf_counter()
items = array[:]
print(items.nbytes / (time.perf_counter() - began) / 1e6)
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


class Stores:
    """The stores of one run."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self.store = directory / "zstd.zarr"
        rows = max(CHUNK[0], size // (COLUMNS * 4) // CHUNK[0] * CHUNK[0])
        array = zarr.open_group(self.store, mode="w").create_array(
            "x", shape=(rows, COLUMNS), chunks=CHUNK, dtype="f4", compressors=ZstdCodec(level=0),
            dimension_names=["row", "column"],
        )  # fmt: skip
        rng, wave = np.random.default_rng(0), 10 * np.sin(np.linspace(0, 60, COLUMNS))
        for row in range(0, rows, CHUNK[0]):
            noise = np.cumsum(rng.normal(size=(CHUNK[0], COLUMNS)), axis=1) * 0.05
            array[row : row + CHUNK[0]] = np.round(280 + wave + noise, 2).astype("f4")

    def documents(self) -> Path:
        """Return a store of the metadata of many arrays."""
        root = self.directory / "many.zarr"
        group = zarr.open_group(root, mode="w", zarr_format=2)
        array = group.create_array("t", shape=(1000, 1801, 3600), chunks=(1, 1801, 3600), dtype="f4", fill_value=0)
        array.attrs.update({"_ARRAY_DIMENSIONS": ["time", "lat", "lon"], "units": "K"})
        for number in range(1, VARIABLES):
            (root / f"t{number}").mkdir()
            for document in (".zarray", ".zattrs"):
                (root / f"t{number}" / document).write_bytes((root / "t" / document).read_bytes())
        return root


@contextlib.contextmanager
def mounted(run: Stores, store: Path, *options: str) -> Iterator[Path]:
    """Mount a store, with a view in `options`; its files are in the page cache."""
    for file in store.rglob("*"):
        if file.is_file():
            file.read_bytes()
    more = ",".join((f"log_file={run.directory}/log", *options))
    with peers.place(run) as mountpoint:
        subprocess.run([peers.ZARRFS, "mount", store, mountpoint, "-o", more], check=True)
        try:
            yield mountpoint
        finally:
            subprocess.run([peers.ZARRFS, "umount", mountpoint], check=True)


def in_process(script: str, *arguments: object) -> float:
    """Run a script; return the number that it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_scan(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure reads of a whole array in C order."""

    def of(view: str, name: str) -> float:
        with mounted(run, run.store, f"view={view}") as mountpoint:
            os.stat(mountpoint / name)
            return read_rate(mountpoint / name)

    samples = interleaved(rounds, {
        "arrays": lambda: of("arrays", "x.npy"), "netcdf": lambda: of("netcdf", "zstd.nc"),
        "zarr": lambda: in_process(READ_ALL, run.store / "x"),
    })  # fmt: skip
    what = f"full read of {run.size >> 20} MiB, zstd, view="
    yield Result(f"{what}arrays", "MB/s", samples["arrays"], "zarr-python 3 into memory", samples["zarr"], 0.7)
    yield Result(f"{what}netcdf", "MB/s", samples["netcdf"], "view=arrays", samples["arrays"], 0.9)


def measure_random(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure random reads of 4 KiB, each within one chunk."""

    def sample() -> float:
        with mounted(run, run.store, "view=arrays") as mountpoint:
            path = mountpoint / "x.npy"
            pages = path.stat().st_size // 4096
            descriptor = os.open(path, os.O_RDONLY)
            chosen = random.Random(0).sample(range(pages), min(RANDOM, pages))
            began = time.perf_counter()
            for page in chosen:
                if len(os.pread(descriptor, 4096, page * 4096)) != 4096:
                    raise RuntimeError("a short read")
            took = time.perf_counter() - began
            os.close(descriptor)
        return len(chosen) / took

    yield Result("random reads of 4 KiB, view=arrays", "reads/s", [sample() for _ in range(rounds)])


def measure_mean(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure xarray's mean over all of an array."""

    def of(engine: str) -> float:
        with mounted(run, run.store, "view=netcdf") as mountpoint:
            return in_process(MEAN, mountpoint / "zstd.nc", engine)

    samples = interleaved(rounds, {
        "netcdf4": lambda: of("netcdf4"), "h5netcdf": lambda: of("h5netcdf"),
        "zarr": lambda: in_process(MEAN, run.store, "zarr"),
    })  # fmt: skip
    for engine in ("netcdf4", "h5netcdf"):
        yield Result(f"mean, engine {engine}", "MB/s", samples[engine], "xarray.open_zarr", samples["zarr"], 0.6)


def measure_header(run: Stores, rounds: int) -> Iterator[Result]:
    """Measure making the header of a file of many variables."""
    store, samples = run.documents(), []
    for _ in range(rounds):
        with mounted(run, store, "view=netcdf") as mountpoint:
            began = time.perf_counter()
            os.stat(mountpoint / "many.nc")
            samples.append(time.perf_counter() - began)
    yield Result(f"header of {VARIABLES} variables", "s", samples, limit=2.0, at_most=True)


MEASURES = {"scan": measure_scan, "random": measure_random, "mean": measure_mean, "header": measure_header}
