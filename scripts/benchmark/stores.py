"""Zarr stores at a URL: `scripts/bench stores`. A store of 300 chunks, 30 ms away, is read, walked and copied.

The server lists directories. Each sample is a fresh mount that has kept nothing of an earlier one (`cache=none`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import peers
import remote_peers
from measures import Result
from remote import in_turns, result
from remote_data import LATE, Tree

MB = 1e6
SHAPE = (300, 361, 720)  # float32, a chunk a time step
SIZE = SHAPE[0] * SHAPE[1] * SHAPE[2] * 4
_READ = """
import sys, time, zarr
where, at_once = sys.argv[1:]
zarr.config.set({"async.concurrency": int(at_once)})
begun = time.perf_counter()
zarr.open_group(where, mode="r")["x"][:].sum()
print(time.perf_counter() - begun)
"""
WALKS = {"find": ["find", "."], "du -s": ["du", "-s", "."], "ls -lR": ["ls", "-lR", "."]}
WALK_LIMIT = 3.0  # seconds

NOTES = f"""\
One float32 array {SHAPE} in chunks of a time step, zstd, Zarr v3, from nginx that answers after {LATE} ms. Readers are
new processes of zarr-python, with 10 and 64 chunks at a time; MB/s are of decoded bytes. "fsspec" reads in process.
"""


class Stores(Tree):
    """A server with a store, whose directories are listed."""

    def __init__(self, directory: Path, size: int) -> None:
        super().__init__(directory, size)
        import numpy as np
        import zarr

        group = zarr.open_group(str(self.www / "x.zarr"), mode="w", zarr_format=3)
        array = group.create_array("x", shape=SHAPE, chunks=(1, *SHAPE[1:]), dtype="f4")
        rng = np.random.default_rng(1)
        yy, xx = np.mgrid[0 : SHAPE[1], 0 : SHAPE[2]]
        for step in range(SHAPE[0]):
            field = 280 + 20 * np.sin(yy / 60 + step / 9) + 5 * np.cos(xx / 40) + rng.normal(0, 0.2, SHAPE[1:])
            array[step] = field.astype("f4").round(2)

    @property
    def store(self) -> str:
        """The URL of the store, 30 ms away."""
        return f"{self.urls[LATE]}/x.zarr"


def _read(where: str, at_once: int) -> float:
    """MB/s of a new process that reads the array."""
    remote_peers.settle()
    command = [sys.executable, "-c", _READ, where, str(at_once)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise peers.Unavailable((done.stderr.strip().splitlines() or ["the reader failed"])[-1])
    return SIZE / float(done.stdout) / MB


def measure_read(run: Stores, rounds: int) -> Iterator[Result]:
    """Reading all of the array."""
    for at_once, limit in ((10, 1.1), (64, 0.9)):

        def ours(at_once: int = at_once) -> float:
            with remote_peers.mounted(run, run.store, "cache=none") as place:
                return _read(place.prefix, at_once)

        samples = in_turns(rounds, {"ours": ours, "fsspec": lambda at_once=at_once: _read(run.store, at_once)})
        yield result(f"all chunks, {at_once} at a time", "MB/s", samples["ours"], "fsspec", samples["fsspec"], limit)


def measure_walks(run: Stores, rounds: int) -> Iterator[Result]:
    """Going through all names."""

    def walk(command: list[str]) -> float:
        with remote_peers.mounted(run, run.store, "cache=none") as place:
            begun = time.perf_counter()
            subprocess.run(command, cwd=place.prefix, stdout=subprocess.DEVNULL, timeout=300, check=True)
            return time.perf_counter() - begun

    samples = in_turns(rounds, {name: lambda command=command: walk(command) for name, command in WALKS.items()})
    for name in WALKS:
        yield Result(name, "s", samples[name], limit=WALK_LIMIT, at_most=True)


def measure_copy(run: Stores, rounds: int) -> Iterator[Result]:
    """`cp -r` of a mount, and `zarrfs stage --copy`, beside each other."""

    def copied() -> float:
        with tempfile.TemporaryDirectory(dir=run.directory) as place, remote_peers.mounted(
            run, run.store, "cache=none"
        ) as mount:
            begun = time.perf_counter()
            subprocess.run(["cp", "-r", mount.prefix, f"{place}/copy"], timeout=300, check=True)
            return time.perf_counter() - begun

    def staged() -> float:
        place = tempfile.mkdtemp(dir=run.directory)
        try:
            begun = time.perf_counter()
            command = [peers.ZARRFS, "stage", "--copy", run.store, f"{place}/copy", "-o", "cache=none"]
            subprocess.run(command, stdout=subprocess.DEVNULL, timeout=300, check=True)
            return time.perf_counter() - begun
        finally:
            shutil.rmtree(place)

    samples = in_turns(rounds, {"cp": copied, "stage": staged})
    yield Result("cp -r", "s", samples["cp"])
    yield result("stage --copy", "s", samples["stage"], "cp -r", samples["cp"])


MEASURES = {"read": measure_read, "walks": measure_walks, "copy": measure_copy}
