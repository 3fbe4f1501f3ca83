"""Arrays as plain files: `scripts/bench arrays`. view=arrays beside zarr-python 3 and a no-op file system."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peers
import zarr
from data import BIG
from measures import Result, interleaved, read_rate
from zarr.codecs import BloscCodec, ZstdCodec

COLUMNS = 16_384  # f4
CHUNK = (1024, 1024)  # 4 MiB
RANDOM = 1000  # number of random reads
ARRAYS = 10_000  # number of arrays in the hierarchy
COMPRESSORS = {"zstd": ZstdCodec(level=0), "lz4": BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")}

NOTES = """\
Arrays of 4-byte floats in chunks of 4 MiB, measured values with a little noise. zarr-python reads into memory in a
process of its own, imports and opening not counted. All is in the page cache, but for that of fresh mounts.
"""

READ_ALL = """
import sys, time, zarr
array = zarr.open_array(sys.argv[1], mode="r")
began = time.perf_counter()
items = array[:]
print(items.nbytes / (time.perf_counter() - began) / 1e6)
"""
OPEN_ALL = """
import sys, time, zarr
began = time.perf_counter()
group = zarr.open_group(sys.argv[1], mode="r")
print(time.perf_counter() - began)
assert sum(1 for _ in group.array_keys()) == int(sys.argv[2])
"""


class Arrays:
    """The stores of one run, each made when it is first used."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self.entries = 0
        self.target = directory / "raw.npy"

    def store(self, name: str) -> Path:
        """Return a store with the array `x`: "zstd" or "lz4"; or "raw", of half the size, with raw.npy beside it."""
        root = self.directory / f"{name}.zarr"
        if root.exists():
            return root
        raw = name == "raw"
        rows = max(CHUNK[0], (self.size >> raw) // (COLUMNS * 4) // CHUNK[0] * CHUNK[0])
        chunks = (CHUNK[0] * CHUNK[1] // COLUMNS, COLUMNS) if raw else CHUNK
        array = zarr.open_group(root, mode="w").create_array(
            "x", shape=(rows, COLUMNS), chunks=chunks, dtype="f4", compressors=COMPRESSORS.get(name)
        )
        rng, wave = np.random.default_rng(0), 10 * np.sin(np.linspace(0, 60, COLUMNS))
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(self.target, "wb")) if raw else None
            for row in range(0, rows, CHUNK[0]):
                noise = np.cumsum(rng.normal(size=(CHUNK[0], COLUMNS)), axis=1) * 0.05
                block = np.round(280 + wave + noise, 2).astype("f4")
                array[row : row + CHUNK[0]] = block
                if file is not None:
                    file.write(block.tobytes())
        return root

    def many(self) -> Path:
        """Return a hierarchy of many small arrays with consolidated metadata."""
        root = self.directory / "many.zarr"
        if not root.exists():
            group = zarr.open_group(root, mode="w", zarr_format=2)
            group.create_array("a0", shape=(4,), chunks=(4,), dtype="f4")[:] = 1
            for number in range(1, ARRAYS):
                shutil.copytree(root / "a0", root / f"a{number}")
            zarr.consolidate_metadata(root, zarr_format=2)
        return root


@contextlib.contextmanager
def mounted(run: Arrays, store: Path, *options: str) -> Iterator[Path]:
    """Mount a store, with a view in `options`."""
    more = ",".join((f"read_ahead={peers.READ_AHEAD}B", f"log_file={run.directory}/log", *options))
    with peers.place(run) as mountpoint:
        subprocess.run([peers.ZARRFS, "mount", store, mountpoint, "-o", more], check=True)
        try:
            yield mountpoint
        finally:
            subprocess.run([peers.ZARRFS, "umount", mountpoint], check=True)


def stats(mountpoint: Path) -> dict[str, Any]:
    """Return the counters of a mount."""
    return dict(json.loads(os.getxattr(mountpoint, "user.zarrfs.stats")))


def warm(path: Path) -> None:
    """Read a tree or a file into the page cache."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb", buffering=0) as opened:
                while opened.read(1 << 22):
                    pass


def by_zarr(script: str, *arguments: object) -> float:
    """Run a script that uses zarr-python; return the number that it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_scan(run: Arrays, rounds: int) -> Iterator[Result]:
    """Measure a full read of compressed arrays in C order."""
    for name in COMPRESSORS:
        store = run.store(name)
        again: list[float] = []
        chunks: list[float] = []
        asked: list[float] = []

        def ours(
            store: Path = store, again: list[float] = again, chunks: list[float] = chunks,
            asked: list[float] = asked,
        ) -> float:  # fmt: skip
            warm(store)
            with mounted(run, store, "view=arrays") as mountpoint:
                first = read_rate(mountpoint / "x.npy")
                chunks.append(stats(mountpoint)["arrays"]["decoded"])
                before = stats(mountpoint)["bytes"]
                again.append(read_rate(mountpoint / "x.npy"))
                asked.append((stats(mountpoint)["bytes"] - before) / run.size)
            return first

        def theirs(store: Path = store) -> float:
            warm(store)
            return by_zarr(READ_ALL, store / "x")

        samples = interleaved(rounds, {"zarrfs": ours, "zarr-python": theirs})
        what = f"full read of {run.size >> 20} MiB, {name}"
        yield Result(what, "MB/s", samples["zarrfs"], "zarr-python 3 into memory", samples["zarr-python"], 0.7)
        yield Result(f"second read, {name}", "MB/s", again, "the first", samples["zarrfs"])
        count = run.size // (4 * CHUNK[0] * CHUNK[1])
        yield Result("chunks decoded by the first", "", chunks, limit=float(count), at_most=True)
        # not 0: kswapd reclaims a few pages of any file now and then
        yield Result("part of its bytes that the second asked for", "", asked, limit=0.1, at_most=True)


def measure_raw(run: Arrays, rounds: int) -> Iterator[Result]:
    """Measure a full read of an uncompressed array."""
    store = run.store("raw")

    def ours() -> float:
        warm(store)
        with mounted(run, store, "view=arrays") as mountpoint:
            return read_rate(mountpoint / "x.npy")

    def theirs() -> float:
        with peers.noop(["big"], run) as mountpoint:
            return read_rate(mountpoint / BIG)

    samples = interleaved(rounds, {"zarrfs": ours, "no-op": theirs})
    what = f"full read of {run.size >> 21} MiB, raw"
    yield Result(what, "MB/s", samples["zarrfs"], "no-op from memory", samples["no-op"], 0.6)


def measure_random(run: Arrays, rounds: int) -> Iterator[Result]:
    """Measure random reads of 4 KiB, each within one chunk."""
    store = run.store("zstd")
    chunks: list[float] = []

    def sample() -> float:
        warm(store)
        with mounted(run, store, "view=arrays", "arrays=raw") as mountpoint:
            path = mountpoint / "x.bin"
            pages = path.stat().st_size // 4096
            descriptor = os.open(path, os.O_RDONLY)
            chosen = random.Random(0).sample(range(pages), min(RANDOM, pages))
            began = time.perf_counter()
            for page in chosen:
                if len(os.pread(descriptor, 4096, page * 4096)) != 4096:
                    raise RuntimeError("a short read")
            took = time.perf_counter() - began
            os.close(descriptor)
            chunks.append(stats(mountpoint)["arrays"]["decoded"])
        return len(chosen) / took

    yield Result("random reads of 4 KiB", "reads/s", [sample() for _ in range(rounds)])
    yield Result(f"chunks decoded by {RANDOM} of them", "", chunks, limit=float(RANDOM), at_most=True)


def measure_many(run: Arrays, rounds: int) -> Iterator[Result]:
    """Measure mounting a view of many arrays and reading its consolidated metadata, and zarr-python's open_group."""
    store, plain = run.many(), run.directory / "many-v3"
    plain.mkdir(exist_ok=True)
    opened: list[float] = []

    def view() -> float:
        began = time.perf_counter()
        with mounted(run, store, "view=v3") as mountpoint:
            document = (mountpoint / "zarr.json").read_bytes()
            took = time.perf_counter() - began
            (plain / "zarr.json").write_bytes(document)
            opened.append(by_zarr(OPEN_ALL, mountpoint, ARRAYS))
            return took

    def theirs() -> float:
        return by_zarr(OPEN_ALL, plain, ARRAYS)

    yield Result(f"view=v3 of {ARRAYS:,} arrays, mounted and read", "s", [view()], limit=1.0, at_most=True)
    samples = interleaved(rounds, {"view": view, "plain": theirs})
    yield Result("the same, again", "s", samples["view"], limit=1.0, at_most=True)
    yield Result("open_group of it", "s", opened, "of the same document in a directory", samples["plain"])


MEASURES = {"scan": measure_scan, "raw": measure_raw, "random": measure_random, "many": measure_many}
