"""Writing: `scripts/bench writes`. Writable mounts of zarrfs, fuse-overlayfs, a pass-through, and no mount at all.

Limits are ratios to fuse-overlayfs for sequential writes, and to the pass-through, the best that pyfuse3 allows, for
all others.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import peers
import remote_peers
from measures import Result
from remote import in_turns, result

MIB = 1 << 20
PAGE = 4096  # bytes of each random write
RECORD = b"x" * 100  # the content of a small file
DBENCH_SECONDS, DBENCH_CLIENTS = 10, 4
PATIENCE = 600.0  # s, timeout of a program

NOTES = """\
Each sample is a fresh mount over a fresh directory of one disk; the plain directory is what the disk itself gives. The
sequential write ends with fsync, random writes with close(): by then the file system has them all, with a writeback
cache, too. What the directory beneath a mount holds is checked afterwards. Before each sample, whoever is measured,
dirty pages are written and 3 GiB of memory touched. Daemons and writers share the machine.
"""


class Writes:
    """The sources of the contenders: a small reference set, a tar archive, and fresh directories."""

    def __init__(self, directory: Path, size: int, files: int) -> None:
        self.directory, self.size, self.files = directory, size, files
        self.index = directory / "index"
        self.index.mkdir()
        data, self.document = directory / "data.bin", directory / "small.json"
        data.write_bytes(os.urandom(PAGE))
        refs = {".zgroup": '{"zarr_format":2}', "a/0": [f"file://{data}", 0, PAGE]}
        self.document.write_text(json.dumps({"version": 1, "refs": refs}))
        self.archive = directory / "tree.tar"
        self.tree = files // 2
        self.tree_size = self._write_archive()

    def _write_archive(self) -> int:
        """Write a hundred files of up to 16 KiB in each directory; return the total of their bytes."""
        sizes, total = random.Random(5), 0
        with tarfile.open(self.archive, "w") as archive:
            for number in range(self.tree):
                if number % 100 == 0:
                    directory = tarfile.TarInfo(f"d{number // 100}")
                    directory.type, directory.mode, directory.mtime = tarfile.DIRTYPE, 0o755, 10**9
                    archive.addfile(directory)
                entry = tarfile.TarInfo(f"d{number // 100}/{number % 100}")
                entry.size, entry.mode, entry.mtime = sizes.randrange(16 << 10), 0o644, 10**9
                archive.addfile(entry, io.BytesIO(sizes.randbytes(entry.size)))
                total += entry.size
        return total

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Path]:
        """Make an empty directory; remove it and its content afterwards."""
        directory = Path(tempfile.mkdtemp(prefix="disk-", dir=self.directory))
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


# -- contenders: each mounts an empty writable directory, and stores what is written there in `kept`

Contender = Callable[[Writes, Path], contextlib.AbstractContextManager[Path]]  # (run, kept) -> mount point


@contextlib.contextmanager
def upper(run: Writes, kept: Path) -> Iterator[Path]:
    """Mount a reference set with zarrfs and upperdir=."""
    with remote_peers.mounted(run, run.document, f"upperdir={kept}") as place:
        yield Path(place.prefix)


@contextlib.contextmanager
def directory(run: Writes, kept: Path) -> Iterator[Path]:
    """Mount a directory with zarrfs, writable."""
    with remote_peers.mounted(run, kept, "rw") as place:
        yield Path(place.prefix)


@contextlib.contextmanager
def overlay(run: Writes, kept: Path) -> Iterator[Path]:
    """Mount fuse-overlayfs over an empty directory."""
    if shutil.which("fuse-overlayfs") is None:
        raise peers.Unavailable("it is not installed")
    with run.fresh() as lower, run.fresh() as work, peers.place(run) as mountpoint:
        layers = f"lowerdir={lower},upperdir={kept},workdir={work}"
        with peers.foreground(["fuse-overlayfs", "-f", "-o", layers, mountpoint], mountpoint):
            yield mountpoint


def passthrough(*flags: str) -> Contender:
    """Return a contender that mounts the pass-through on pyfuse3."""

    @contextlib.contextmanager
    def contender(run: Writes, kept: Path) -> Iterator[Path]:
        with peers.place(run) as mountpoint:
            command: list[str | Path] = [sys.executable, peers.HERE / "passthrough.py", kept, mountpoint, *flags]
            with peers.foreground(command, mountpoint):
                yield mountpoint

    return contender


@contextlib.contextmanager
def plain(run: Writes, kept: Path) -> Iterator[Path]:
    """Yield the directory itself, without a mount."""
    yield kept


OURS: dict[str, Contender] = {"upperdir=": upper, "rw": directory}
THEIRS: dict[str, Contender] = {
    "fuse-overlayfs": overlay,
    "pass-through": passthrough(),
    "pass-through, writeback cache": passthrough("writeback"),
    "plain directory": plain,
}


# -- one measure: all contenders, and a row for each pair


class Work(NamedTuple):
    """A workload."""

    what: str
    unit: str
    run: Callable[[Path], float]  # works in the contender's empty directory; returns the figure
    check: Callable[[Path], bool]  # whether `kept` has what was written
    limits: dict[str, float]  # minimum ratios, by name of the peer


def compared(run: Writes, rounds: int, work: Work) -> Iterator[Result]:
    """Yield rows of both mounts of zarrfs, beside each peer."""
    samples = in_turns(rounds, {name: sampler(run, work, who) for name, who in (OURS | THEIRS).items()})
    for ours in OURS:
        for theirs in THEIRS:
            limit = work.limits.get(theirs)
            yield result(f"{work.what}, {ours}", work.unit, samples[ours], theirs, samples[theirs], limit)


def sampler(run: Writes, work: Work, contender: Contender) -> Callable[[], float]:
    """Return a sampler of one contender, which raises peers.Unavailable if the written data are not in `kept`."""

    def sample() -> float:
        with run.fresh() as kept:
            with contender(run, kept) as place:
                device = os.stat(place).st_dev
                remote_peers.settle()
                figure = work.run(place)
                if os.stat(place).st_dev != device:
                    raise peers.Unavailable("the mount is gone")
            if not work.check(kept):
                raise peers.Unavailable("what was written is not there")
        return figure

    return sample


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Call write(2); raise RuntimeError if it is short."""
    if os.write(descriptor, data) != len(data):
        raise RuntimeError("a short write")


def measure_sequential(run: Writes, rounds: int) -> Iterator[Result]:
    """Measure writing a large file in pieces of 1 MiB, with fsync."""
    count = run.size // MIB
    blocks = [os.urandom(MIB) for _ in range(4)]

    def write(place: Path) -> float:
        descriptor = os.open(place / "large", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            began = time.perf_counter()
            for number in range(count):
                write_all(descriptor, blocks[number % len(blocks)])
            os.fsync(descriptor)
            return count * MIB / (time.perf_counter() - began) / 1e6
        finally:
            os.close(descriptor)

    def check(kept: Path) -> bool:
        with open(kept / "large", "rb") as file:
            return all(file.read(MIB) == blocks[number % len(blocks)] for number in range(count)) and not file.read(1)

    what = f"sequential write of {count:,} MiB"
    yield from compared(run, rounds, Work(what, "MB/s", write, check, {"fuse-overlayfs": 0.7}))


def measure_random(run: Writes, rounds: int) -> Iterator[Result]:
    """Measure overwriting a quarter of the pages of a file in random order."""
    size = run.size // 4
    pages = random.Random(4).sample(range(size // PAGE), size // PAGE // 4)
    before, after = bytes(MIB), os.urandom(PAGE)

    def write(place: Path) -> float:
        descriptor = os.open(place / "pages", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        for _ in range(size // MIB):
            write_all(descriptor, before)
        os.fsync(descriptor)
        began = time.perf_counter()
        for page in pages:
            if os.pwrite(descriptor, after, page * PAGE) != PAGE:
                raise RuntimeError("a short write")
        os.close(descriptor)
        return len(pages) / (time.perf_counter() - began)

    def check(kept: Path) -> bool:
        written, zeros = set(pages), bytes(PAGE)
        with open(kept / "pages", "rb") as file:
            return all(file.read(PAGE) == (after if n in written else zeros) for n in range(size // PAGE))

    what = f"4 KiB random writes in {size // MIB} MiB"
    yield from compared(run, rounds, Work(what, "writes/s", write, check, {"pass-through": 0.9}))


def measure_create(run: Writes, rounds: int) -> Iterator[Result]:
    """Measure creating small files in one directory: open, write, close."""

    def write(place: Path) -> float:
        os.mkdir(place / "small")
        names = [f"{place}/small/{number}" for number in range(run.files)]
        began = time.perf_counter()
        for name in names:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            write_all(descriptor, RECORD)
            os.close(descriptor)
        return run.files / (time.perf_counter() - began)

    def check(kept: Path) -> bool:
        return all((kept / "small" / str(number)).read_bytes() == RECORD for number in range(run.files))

    what = f"{run.files:,} small files created"
    yield from compared(run, rounds, Work(what, "files/s", write, check, {"pass-through": 0.9}))


def measure_tar(run: Writes, rounds: int) -> Iterator[Result]:
    """Measure tar x."""

    def write(place: Path) -> float:
        began = time.perf_counter()
        output(["tar", "-xf", run.archive, "-C", place])
        return run.tree / (time.perf_counter() - began)

    def check(kept: Path) -> bool:
        files = [path.lstat() for path in kept.glob("d*/[0-9]*")]  # not whiteouts
        complete = len(files) == run.tree and sum(status.st_size for status in files) == run.tree_size
        return complete and all(status.st_mtime == 10**9 and status.st_mode & 0o777 == 0o644 for status in files)

    what = f"tar x of {run.tree:,} files"
    yield from compared(run, rounds, Work(what, "files/s", write, check, {"pass-through": 0.9}))


def measure_dbench(run: Writes, rounds: int) -> Iterator[Result]:
    """Measure dbench, the load of a file server."""

    def write(place: Path) -> float:
        if shutil.which("dbench") is None:
            raise peers.Unavailable("dbench is not installed")
        said = output(["dbench", "-D", place, "-t", str(DBENCH_SECONDS), str(DBENCH_CLIENTS)])
        found = re.search(r"^Throughput ([\d.]+) MB/sec", said, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"dbench: {said.strip().splitlines()[-1:]}")
        return float(found[1])

    def check(kept: Path) -> bool:
        return True  # dbench removes what it made

    what = f"dbench, {DBENCH_CLIENTS} clients, {DBENCH_SECONDS} s"
    yield from compared(run, rounds, Work(what, "MB/s", write, check, {"pass-through": 0.9}))


def output(command: list[str | Path]) -> str:
    """Run a command; return its output. RuntimeError if it fails, with its first error line."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()[-1:] or ["it failed"]
        raise RuntimeError(f"{command[0]}: {said[0]}")
    return done.stdout


MEASURES: dict[str, Callable[[Writes, int], Iterator[Result]]] = {
    "sequential": measure_sequential,
    "random": measure_random,
    "create": measure_create,
    "tar": measure_tar,
    "dbench": measure_dbench,
}
