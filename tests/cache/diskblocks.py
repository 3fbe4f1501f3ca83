"""Targets whose bytes are known everywhere, and what the tests of the disk cache ask about its directory."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskfiles import LAYOUT, Layout
from zarrfs.net.versions import Version

MIB = 1 << 20
ONE, TWO = Version('"one"', 1 << 40), Version('"two"', 1 << 40)
_PERIOD = 100_003
_PATTERNS: dict[tuple[str, Version], bytes] = {}


def content(target: str, version: Version, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of `target`, the same in every process."""
    pattern = _PATTERNS.get((target, version))
    if pattern is None:
        pattern = _PATTERNS[target, version] = random.Random(ascii((target, version))).randbytes(_PERIOD)
    first = start % _PERIOD
    return (pattern * ((first + stop - start) // _PERIOD + 1))[first : first + stop - start]


def write(cache: DiskCache, target: str, start: int, stop: int, version: Version = ONE, run: bool = False) -> None:
    cache.write(target, version, start, content(target, version, start, stop), run)


def found(cache: DiskCache, target: str, start: int, stop: int, version: Version = ONE) -> bool:
    """Whether the cache has a range; what it has must be right."""
    at_once = cache.read_now(target, version, 0.0, start, stop)
    data = cache.read(target, version, start, stop)
    for one in (data, at_once and at_once[1]):
        assert one is None or bytes(one) == content(target, version, start, stop)
    return data is not None


def blocks(directory: Path) -> list[Path]:
    """The files of blocks and records."""
    return sorted(directory / LAYOUT / name[:2] / name[2:] for name, _ in Layout(str(directory)).kept())


def taken(directory: Path) -> int:
    """What du says, in bytes."""
    done = subprocess.run(["du", "-s", "--block-size=1", directory], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def ranges(seed: int, largest: int) -> Iterator[tuple[str, Version, int, int, bool]]:
    """(target, version, start, stop, run) without end."""
    dice = random.Random(seed)
    while True:
        start, length = dice.randrange(64) * MIB // 2, dice.randrange(1, largest)
        version = ONE if dice.random() < 0.7 else TWO
        yield f"http://h/{dice.randrange(8)}", version, start, start + length, dice.random() < 0.3


def churn(directory: str, size: int, seed: int, largest: int) -> None:
    """Write and read until killed; a wrong byte or an exception leaves a file WRONG beside the directory."""
    try:
        cache = DiskCache(directory, size, 0)
        for count, (target, version, start, stop, run) in enumerate(ranges(seed, largest)):
            if not found(cache, target, start, stop, version):
                write(cache, target, start, stop, version, run)
            if count % 16 == 0:
                cache.remember(target, version)
    except BaseException as exc:
        Path(directory + ".WRONG").write_text(repr(exc))
        os._exit(1)
