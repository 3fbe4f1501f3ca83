"""The basic measures, each a generator of Results: samples of zarrfs and of a peer."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import peers
from data import BIG, PIECE, Data, keys

Sampler = Callable[[], float]
LOAD = """
import sys
import fsspec, fsspec.implementations.reference
fsspec.filesystem("reference", fo=sys.argv[1]).ls("", detail=False)
"""


@dataclasses.dataclass
class Result:
    """Samples of zarrfs and of a peer, with the limit of the ratio of their medians."""

    what: str
    unit: str
    ours: list[float]
    against: str = ""
    theirs: list[float] = dataclasses.field(default_factory=list)
    limit: float | None = None
    at_most: bool = False  # whether the limit is a maximum of the ratio (without a peer: of our figure), not a minimum

    @property
    def figure(self) -> float:
        """Return the ratio of the medians; without a peer, our median; NaN if one of them has no sample."""
        if not self.ours or (self.against and not self.theirs):
            return math.nan
        ours = statistics.median(self.ours)
        return ours / statistics.median(self.theirs) if self.theirs else ours

    @property
    def missed(self) -> bool:
        """Return whether the limit is missed."""
        if self.limit is None:
            return False
        return not (self.figure <= self.limit if self.at_most else self.figure >= self.limit)


def interleaved(rounds: int, samplers: dict[str, Sampler]) -> dict[str, list[float]]:
    """Take `rounds` samples of each, in turns; drop all samples of one that fails."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    running = dict(samplers)
    for _ in range(rounds):
        for name, sampler in list(running.items()):
            try:
                samples[name].append(sampler())
            except Exception as exc:
                print(f"bench: {name} cannot run here: {exc}", file=sys.stderr, flush=True)
                del running[name], samples[name][:]
    return samples


def seconds(command: list[object]) -> float:
    """Run a command; return the seconds that it takes."""
    began = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


# -- time until a mount is ready


def mount_time(data: Data, document: Path, index: Path) -> float:
    """Return the seconds that the mount command takes; it exits when the mount answers."""
    with peers.place(data.directory) as mountpoint:
        took = seconds(peers.zarrfs_command(document, mountpoint, index))
        subprocess.run([peers.ZARRFS, "umount", mountpoint], check=True)
    return took


def measure_mount(data: Data, rounds: int) -> Iterator[Result]:
    """Measure mounting the large set, beside fsspec loading and listing it."""
    load = [sys.executable, "-c", LOAD, data.many]

    kept = data.directory / "kept"
    kept.mkdir()
    mount_time(data, data.many, kept)
    samples = interleaved(
        rounds,
        {
            "cold": lambda: mount_time(data, data.many, peers.new_index(data)),
            "kept": lambda: mount_time(data, data.many, kept),
            "process": lambda: seconds(load),
        },
    )
    what = f"mount of {data.entries:,} references"
    for ours, note, most in (("cold", "no index yet", 1.1), ("kept", "index kept", 0.4)):
        yield Result(f"{what}, {note}", "s", samples[ours], "fsspec load + list, whole process",
                     samples["process"], most, at_most=True)  # fmt: skip


def measure_small(data: Data, rounds: int) -> Iterator[Result]:
    """Measure mounting a small source."""
    samples = interleaved(rounds + 2, {"zarrfs": lambda: mount_time(data, data.small, peers.new_index(data))})
    yield Result("mount of 2 references, no index yet", "s", samples["zarrfs"], limit=0.5, at_most=True)


# -- listing


def measure_ls(data: Data, rounds: int) -> Iterator[Result]:
    """Measure `ls -lR` over a fresh mount."""

    def sampler(peer: str) -> Sampler:
        def sample() -> float:
            with peers.MANY[peer](data) as mountpoint:
                return data.entries / seconds(["env", "LC_ALL=C", "ls", "-lR", mountpoint])

        return sample

    samples = interleaved(rounds, {peer: sampler(peer) for peer in peers.MANY})
    what = f"ls -lR of {data.entries:,}"
    yield Result(what, "entries/s", samples["zarrfs"], "no-op", samples["no-op"], 0.75)


# -- one large file


def read_rate(path: Path) -> float:
    """Read a file sequentially in pieces of 1 MiB; return MB/s."""
    buffer, total = bytearray(1 << 20), 0
    with open(path, "rb", buffering=0) as file:
        began = time.perf_counter()
        while count := file.readinto(buffer):
            total += count
        return total / (time.perf_counter() - began) / 1e6


def measure_read(data: Data, rounds: int) -> Iterator[Result]:
    """Measure the first sequential read of a local target."""

    def sampler(peer: str) -> Sampler:
        def sample() -> float:
            with peers.BIG[peer](data) as mountpoint:
                return read_rate(mountpoint / BIG)

        return sample

    read_rate(data.target)
    samples = interleaved(rounds, {peer: sampler(peer) for peer in peers.BIG})
    what = f"first read of {data.size >> 20} MiB"
    yield Result(what, "MB/s", samples["zarrfs"], "no-op from memory", samples["no-op"], 0.8)


# -- many readers


def key_rate(mountpoint: Path, wanted: list[str], readers: int) -> float:
    """Open, read and close all `wanted` keys with `readers` threads; return keys per second."""

    def read_all(part: list[str]) -> None:
        for key in part:
            descriptor = os.open(f"{mountpoint}/{key}", os.O_RDONLY)
            if len(os.pread(descriptor, 2 * PIECE, 0)) != PIECE:
                raise RuntimeError(f"{key}: a short read")
            os.close(descriptor)

    with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        began = time.perf_counter()
        list(pool.map(read_all, [wanted[first::readers] for first in range(readers)]))
        return len(wanted) / (time.perf_counter() - began)


def measure_readers(data: Data, rounds: int) -> Iterator[Result]:
    """Measure reading random keys of 4 KiB with 1, 16 and 64 readers, each on a fresh mount."""
    everything = ["/".join(key) for key in keys(data.entries)]

    def sampler(peer: str, readers: int) -> Sampler:
        def sample() -> float:
            wanted = random.Random(readers).sample(everything, min(4096, len(everything)))
            with peers.MANY[peer](data) as mountpoint:
                return key_rate(mountpoint, wanted, readers)

        return sample

    for readers in (1, 16, 64):
        samples = interleaved(rounds, {peer: sampler(peer, readers) for peer in peers.MANY})
        what = f"random 4 KiB keys, readers: {readers}"
        yield Result(what, "keys/s", samples["zarrfs"], "no-op", samples["no-op"])


MEASURES: dict[str, Callable[[Data, int], Iterator[Result]]] = {
    "mount": measure_mount,
    "ls": measure_ls,
    "read": measure_read,
    "small": measure_small,
    "readers": measure_readers,
}
