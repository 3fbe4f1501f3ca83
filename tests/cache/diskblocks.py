"""Targets whose bytes every process can compute, and helpers that inspect a cache directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from zarrfs.cache.disk import DamagedBlock, DiskCache, load
from zarrfs.cache.diskfiles import INDEX, LAYOUT, Layout, segment_name
from zarrfs.cache.diskindex import Index, IndexRow
from zarrfs.cache.diskspace import LOCKS
from zarrfs.net.versions import TargetVersion

MIB = 1 << 20
ONE, TWO = TargetVersion('"one"', 1 << 40), TargetVersion('"two"', 1 << 40)
_PERIOD = 100_003
_PATTERNS: dict[tuple[str, TargetVersion], bytes] = {}


def content(target: str, version: TargetVersion, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of `target`, which are the same in every process."""
    pattern = _PATTERNS.get((target, version))
    if pattern is None:
        pattern = _PATTERNS[target, version] = random.Random(ascii((target, version))).randbytes(_PERIOD)
    first = start % _PERIOD
    return (pattern * ((first + stop - start) // _PERIOD + 1))[first : first + stop - start]


def write(
    cache: DiskCache, target: str, start: int, stop: int, version: TargetVersion = ONE, run: bool = False
) -> None:
    """Write a range, and wait until it is on the disk."""
    cache.write(target, version, start, content(target, version, start, stop), run)
    flush(cache)


def flush(cache: DiskCache) -> None:
    """Wait until the write queue of a cache is empty and its worker is idle."""
    end = time.monotonic() + 60.0
    while True:
        with cache._lock:
            if not cache._queue and not cache._working:
                return
        assert time.monotonic() < end
        time.sleep(0.001)


def remember(cache: DiskCache, target: str, version: TargetVersion) -> None:
    """Record a version, and wait until it is on the disk."""
    cache.remember(target, version)
    flush(cache)


def read_now(cache: DiskCache, target: str, start: int, stop: int, version: TargetVersion = ONE) -> bytes | None:
    """Read without waiting for the disk; return None on a miss, or if the read would have to wait."""
    try:
        data = cache.read(target, version, start, stop, now=True)
    except BlockingIOError:
        return None
    return None if data is None else bytes(data)


def found(cache: DiskCache, target: str, start: int, stop: int, version: TargetVersion = ONE) -> bool:
    """Return whether the cache has a range, and check the bytes that it returns."""
    at_once = read_now(cache, target, start, stop, version)
    data = cache.read(target, version, start, stop, again=True)
    for one in (data, at_once):
        assert one is None or bytes(one) == content(target, version, start, stop)
    return data is not None


def rows(directory: Path) -> list[IndexRow]:
    """Return the index rows of blocks and version records whose segment exists, sorted by segment and offset."""
    layout = Layout(str(directory))
    segments = {number for number, _ in layout.segments()}
    try:
        index = Index(layout.index())
    except FileNotFoundError:
        return []
    kept = [row for row in index.rows() if isinstance(row, IndexRow) and row.segment in segments]
    return sorted(kept, key=lambda row: (row.segment, row.offset))


def segments(directory: Path) -> list[Path]:
    """Return the paths of the segments, least recently used first."""
    found = [directory / LAYOUT / segment_name(number) for number, _ in Layout(str(directory)).segments()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def segment_of(directory: Path, row: IndexRow) -> Path:
    return directory / LAYOUT / segment_name(row.segment)


def flip(path: Path, place: int) -> None:
    """Flip one bit of the byte at offset `place` of a file."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), place)


def is_fetching(directory: Path) -> bool:
    """Return whether any process holds a lease."""
    with (directory / LAYOUT / INDEX).open("r+b") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, LOCKS + 1, 0, 0)
        kind: int = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_OFD_GETLK, lock))[0]  # type: ignore[attr-defined]
    return kind != fcntl.F_UNLCK


def taken(directory: Path) -> int:
    """Return the bytes that a directory occupies, as du(1) counts them."""
    done = subprocess.run(["du", "-s", "--block-size=1", directory], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def ranges(seed: int, largest: int) -> Iterator[tuple[str, TargetVersion, int, int, bool]]:
    """Yield random (target, version, start, stop, run) without end."""
    dice = random.Random(seed)
    while True:
        start, length = dice.randrange(64) * MIB // 2, dice.randrange(1, largest)
        version = ONE if dice.random() < 0.7 else TWO
        yield f"http://h/{dice.randrange(8)}", version, start, start + length, dice.random() < 0.3


def churn(directory: str, size: int, seed: int, largest: int) -> None:
    """Write and read until killed; on a wrong byte or an exception, create the file DIRECTORY.WRONG and exit."""
    try:
        cache = DiskCache(directory, size)
        for count, (target, version, start, stop, run) in enumerate(ranges(seed, largest)):
            if not found(cache, target, start, stop, version):
                cache.write(target, version, start, content(target, version, start, stop), run)
            if count % 16 == 0:
                cache.remember(target, version)
            if count % 4 == 0:
                flush(cache)
    except BaseException as exc:
        Path(directory + ".WRONG").write_text(repr(exc))
        os._exit(1)


def checked_blocks(directory: Path) -> tuple[int, int]:
    """Read every block in a cache directory; return how many there are, and how many of them are damaged."""
    layout = Layout(str(directory))
    checked = bad = 0
    with contextlib.suppress(FileNotFoundError):
        for row in Index(layout.index()).rows():
            checked += 1
            if isinstance(row, bytes):
                bad += 1
                continue
            try:
                load(layout, row)
            except FileNotFoundError:  # evicted
                checked -= 1
            except DamagedBlock:
                bad += 1
    return checked, bad
