"""One mount, many processes: `scripts/bench workers`. Rates with 1, 2, 4 and 8 processes that answer one mount.

For `files` and `chunks`, a cgroup limits each process to 12 % of a core, so the cores of this machine do not matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import peers
from data import Data
from measures import Result

SHARE = 0.12  # of a core, for each process
FILES, SIZE = 100_000, 4096
COUNTS = (1, 2, 4, 8)
GOALS = {2: 1.8, 4: 3.5, 8: 6.0}
READERS, SECONDS = 16, 4.0
ARRAY, CHUNK = (2048, 2048), 64  # f4: chunks of 16 KiB
CHUNK_OPTIONS = "view=arrays", "arrays=raw", "array_cache=0B"
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")

NOTES = f"""\
Open, read and close of random files of {SIZE >> 10} KiB, each process of the mount held to {SHARE:.0%} of a core by a
cgroup, {READERS} readers for {SECONDS:g} s; chunks: random reads of decoded zstd chunks with view=arrays.
"""


class Group:
    """A cgroup, of version 1 or 2, that is limited to `share` of a core, or not limited if that is None."""

    def __init__(self, name: str, share: float | None) -> None:
        try:
            if (V1 / "cpu.shares").exists():
                self.path = V1 / f"zarrfs-bench-{os.getpid()}-{name}"
                self.path.mkdir()
                self._put("cpu.shares", 262_144)  # precedence over other work on this machine
                if share is not None:
                    self._put("cpu.cfs_period_us", 10_000)
                    self._put("cpu.cfs_quota_us", int(share * 10_000))
            else:
                with open(V2 / "cgroup.subtree_control", "w") as file:
                    file.write("+cpu")
                self.path = V2 / f"zarrfs-bench-{os.getpid()}-{name}"
                self.path.mkdir()
                self._put("cpu.weight", 10_000)
                if share is not None:
                    self._put("cpu.max", f"{int(share * 10_000)} 10000")
        except OSError as exc:
            raise peers.Unavailable(f"no cgroup with a quota of CPU: {exc}") from None

    def _put(self, name: str, value: object) -> None:
        (self.path / name).write_text(f"{value}\n")

    def enter(self, pid: int) -> None:
        """Move a process with all its threads into the group."""
        self._put("cgroup.procs", pid)

    def remove(self) -> None:
        """Remove the group once it is empty."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.05)


def processes(mountpoint: Path) -> list[int]:
    """Return the pids of the processes that answer a mount."""
    first = int(json.loads(os.getxattr(mountpoint, "user.zarrfs.mount"))["pid"])

    def children(pid: int) -> list[int]:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    return [first, *(worker for starter in children(first) for worker in children(starter))]


@contextlib.contextmanager
def mounted(data: Data, source: Path, count: int, share: float | None, *options: str) -> Iterator[Path]:
    """Mount with `count` processes; with `share`, limit each to that much of a core."""
    groups: list[Group] = []
    index = data.directory / "index"
    index.mkdir(exist_ok=True)
    with peers.place(data) as mountpoint, contextlib.ExitStack() as cleanup:
        command = peers.zarrfs_command(source, mountpoint, index)
        command[-1] += "".join(f",{option}" for option in (f"workers={count}", *options))
        subprocess.run(command, check=True)
        cleanup.callback(lambda: [group.remove() for group in groups])
        cleanup.callback(subprocess.run, [peers.ZARRFS, "umount", mountpoint], check=True)
        deadline = time.monotonic() + 30
        while len(processes(mountpoint)) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        if share is not None:
            for number, pid in enumerate(processes(mountpoint)):
                groups.append(Group(str(number), share))
                groups[-1].enter(pid)
        yield mountpoint


def rate(readers: int, read: Callable[[random.Random], None]) -> float:
    """Return the calls of `read` per second by all of `readers` processes."""
    arrived, out = os.pipe(), os.pipe()
    group = Group("readers", None)
    children = []
    try:
        for _ in range(readers):
            pid = os.fork()
            if pid == 0:
                try:
                    group.enter(os.getpid())
                    choose, count = random.Random(os.getpid()), 0
                    os.read(arrived[0], 1)
                    ends = time.monotonic() + SECONDS
                    while time.monotonic() < ends:
                        read(choose)
                        count += 1
                    os.write(out[1], struct.pack("I", count))
                    os._exit(0)
                except BaseException as exc:
                    print(repr(exc), file=sys.stderr)
                    os.write(out[1], struct.pack("I", 0))
                    os._exit(1)
            children.append(pid)
        os.write(arrived[1], b"g" * readers)
        total = sum(struct.unpack("I", os.read(out[0], 4))[0] for _ in range(readers))
        statuses = [os.waitpid(pid, 0)[1] for pid in children]
        if any(statuses):
            raise peers.Unavailable("a reader failed")
        return float(total / SECONDS)
    finally:
        for end in (*arrived, *out):
            os.close(end)
        group.remove()


def references(data: Data) -> Path:
    """Return a set of many small values of one local target."""
    document, target = data.directory / "small.json", data.directory / "small.bin"
    if not document.exists():
        target.write_bytes(os.urandom(64 << 20))
        places = (64 << 20) // SIZE
        refs = {f"v/{number}": [str(target), number % places * SIZE, SIZE] for number in range(FILES)}
        document.write_text(json.dumps({"version": 1, "refs": refs}))
        time.sleep(2.5)  # only a document this old is recognised by its timestamps
    target.read_bytes()  # into the page cache
    return document


def read_files(mountpoint: Path) -> Callable[[random.Random], None]:
    """Return a function that opens, reads and closes one file."""

    def read(choose: random.Random) -> None:
        descriptor = os.open(f"{mountpoint}/v/{choose.randrange(FILES)}", os.O_RDONLY)
        assert len(os.read(descriptor, SIZE + 1)) == SIZE
        os.close(descriptor)

    return read


def scaled(data: Data, rounds: int, what: str, sample: Callable[[int], float]) -> Iterator[Result]:
    """Yield the rates with several processes beside those with one."""
    samples: dict[int, list[float]] = {count: [] for count in COUNTS}
    for _ in range(rounds):
        for count in COUNTS:
            samples[count].append(sample(count))
    for count, goal in GOALS.items():
        yield Result(f"{what}, {count} processes", "/s", samples[count], "1 process", samples[1], goal)


def measure_files(data: Data, rounds: int) -> Iterator[Result]:
    """Measure small files, with each process limited to a part of a core."""

    def sample(count: int) -> float:
        with mounted(data, references(data), count, SHARE) as mountpoint:
            return rate(READERS, read_files(mountpoint))

    yield from scaled(data, rounds, "files", sample)


def chunk_store(data: Data) -> Path:
    """Return a store of one array in chunks of zstd."""
    import zarr
    from zarr.codecs import ZstdCodec

    store = data.directory / "chunks.zarr"
    if not store.exists():
        values = np.random.default_rng(0).normal(size=ARRAY).astype("f4").round(1)
        array = zarr.create_array(
            store, name="a", shape=ARRAY, chunks=(CHUNK, CHUNK), dtype="f4", compressors=ZstdCodec(), overwrite=True
        )
        array[:] = values
    return store


def read_rows(mountpoint: Path) -> Callable[[random.Random], None]:
    """Return a function that reads 4 KiB of the array, not from the page cache."""
    row, size = ARRAY[1] * 4, os.stat(f"{mountpoint}/a.bin").st_size

    def read(choose: random.Random) -> None:
        descriptor = os.open(f"{mountpoint}/a.bin", os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        at = choose.randrange(size // row) * row + choose.randrange(row // 4096) * 4096
        os.posix_fadvise(descriptor, at, 4096, os.POSIX_FADV_DONTNEED)
        assert len(os.pread(descriptor, 4096, at)) == 4096
        os.close(descriptor)

    return read


def measure_chunks(data: Data, rounds: int) -> Iterator[Result]:
    """Measure decoded chunks with view=arrays, with each process limited to a part of a core."""
    store = chunk_store(data)

    def sample(count: int) -> float:
        with mounted(data, store, count, SHARE, *CHUNK_OPTIONS) as mountpoint:
            return rate(READERS, read_rows(mountpoint))

    yield from scaled(data, rounds, "zstd chunks", sample)


def measure_cores(data: Data, rounds: int) -> Iterator[Result]:
    """Measure eight readers with two processes, and one reader with four, without a CPU limit."""
    for what, readers, count, goal in ("eight readers", 8, 2, 1.5), ("one reader", 1, 4, 0.95):
        samples: dict[int, list[float]] = {1: [], count: []}
        for _ in range(rounds):
            for processes_now in samples:
                with mounted(data, references(data), processes_now, None) as mountpoint:
                    samples[processes_now].append(rate(readers, read_files(mountpoint)))
        yield Result(f"{what}, {count} processes", "/s", samples[count], "1 process", samples[1], goal)


def own_memory(pid: int) -> float:
    """Return the memory that a process shares with no other, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


@contextlib.contextmanager
def alone(pid: int, pids: list[int]) -> Iterator[None]:
    """Stop all other processes of a mount, so that only `pid` answers."""
    others = [other for other in pids if other != pid]
    try:
        for other in others:
            os.kill(other, signal.SIGSTOP)
        while any(" T " not in Path(f"/proc/{other}/stat").read_text() for other in others):
            time.sleep(0.01)  # one that still runs could take a request and then be stopped
        yield
    finally:
        for other in others:
            os.kill(other, signal.SIGCONT)


def measure_memory(data: Data, rounds: int) -> Iterator[Result]:
    """Measure the private memory of 1 to 4 workers, after each has answered reads alone; the largest one counts."""
    for what, source, options, read in (
        ("files", references(data), (), read_files), ("zstd chunks", chunk_store(data), CHUNK_OPTIONS, read_rows),
    ):  # fmt: skip
        for count in (1, 2, 3, 4):
            samples = []
            for _ in range(rounds):
                with mounted(data, source, count + 1, None, *options) as mountpoint:
                    pids, choose, read_one = processes(mountpoint), random.Random(0), read(mountpoint)
                    for pid in pids:
                        with alone(pid, pids):
                            for _ in range(2000):
                                read_one(choose)
                    samples.append(max(map(own_memory, pids[1:])))
            yield Result(f"memory of a worker's own, {what}, workers: {count}", "MB", samples, limit=25, at_most=True)


MEASURES = {"files": measure_files, "chunks": measure_chunks, "cores": measure_cores, "memory": measure_memory}
