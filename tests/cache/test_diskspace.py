"""The size limit of the disk cache, as du and df measure it; full disks, killed writers, and held locks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.cache.diskblocks import (
    MIB,
    ONE,
    TWO,
    checked_blocks,
    churn,
    content,
    flush,
    found,
    ranges,
    remember,
    rows,
    segments,
    taken,
    write,
)
from tests.conftest import tmpfs
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskfiles import INDEX, LAYOUT

T = "https://host/data.nc"
KILLS = int(os.environ.get("ZARRFS_TEST_KILLS", "10"))
FORK = multiprocessing.get_context("fork")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")


def small_disk(place: Path, size: int, options: str = "") -> AbstractContextManager[Path]:
    return tmpfs(place, f"size={size}{options}")


def free(place: Path) -> int:
    about = os.statvfs(place)
    return about.f_bavail * about.f_frsize


def churning(directory: Path, size: int, count: int, largest: int = MIB) -> list[BaseProcess]:
    started: list[BaseProcess] = []
    for seed in range(count):
        process = FORK.Process(target=churn, args=(str(directory), size, random.randrange(10**9) + seed, largest))
        process.start()
        started.append(process)
    return started


def end(processes: list[BaseProcess], directory: Path) -> None:
    for process in processes:
        process.kill()
        process.join()
    wrong = Path(f"{directory}.WRONG")
    assert not wrong.exists(), wrong.read_text()


@contextlib.contextmanager
def stopped(processes: list[BaseProcess]) -> Iterator[None]:
    """Suspend the processes, so that du sees the directory at one moment."""
    for process in processes:
        os.kill(process.pid or 0, signal.SIGSTOP)
    for process in processes:
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.001)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid or 0, signal.SIGCONT)


# -- the bound


def test_du_never_exceeds_the_size_while_four_processes_write(tmp_path: Path) -> None:
    directory, size, most, looks = tmp_path / "c", 24 * MIB, 0, 0
    processes = churning(directory, size, 4)
    try:
        end_by = time.monotonic() + 60
        while (looks := looks + 1) < 60 or (most <= size // 2 and time.monotonic() < end_by):
            time.sleep(0.05)
            with stopped(processes):
                if directory.exists():
                    now = taken(directory)
                    assert now <= size
                    most = max(most, now)
            assert all(process.is_alive() for process in processes)
    finally:
        end(processes, directory)
    assert most > size // 2


@pytest.mark.parametrize("size", [0, 1, 4096, 700_000, MIB, 3 * MIB])
def test_small_sizes_are_not_exceeded(size: int, tmp_path: Path) -> None:
    """A cache of less than 1 MiB keeps nothing."""
    cache = DiskCache(str(tmp_path), size)
    base = taken(tmp_path)
    for target, version, start, stop, run in (next(many) for many in [ranges(1, 400_000)] for _ in range(100)):
        write(cache, target, start, stop, version, run)
        found(cache, target, start, stop, version)
        cache._until = 0
        assert taken(tmp_path) <= max(size, base)
    cache.close()
    assert bool(rows(tmp_path)) == (size >= MIB)


def test_a_block_larger_than_half_of_the_cache_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 8 * MIB)
    write(cache, T, 0, 5 * MIB)
    assert not found(cache, T, 0, 5 * MIB)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    assert cache.stats()["dropped"] == 1


def test_the_least_recently_used_segments_are_evicted(tmp_path: Path) -> None:
    """A segment has 512 KiB here. Reading one block of a segment keeps all blocks of that segment."""
    size, block = 32 * MIB, 256 << 10
    cache = DiskCache(str(tmp_path), size)
    for number in range(100):
        write(cache, T, number * block, (number + 1) * block)
        os.utime(segments(tmp_path)[-1], (1e9 + number, 1e9 + number))
    assert found(cache, T, 0, block)  # marks its segment as used now
    flush(cache)
    for number in range(100, 140):
        write(cache, T, number * block, (number + 1) * block)
    there = [found(cache, T, number * block, (number + 1) * block) for number in range(140)]
    assert all(there[:2])
    assert all(there[100:])
    gone = there.index(True, 2)
    assert not any(there[2:gone])
    assert all(there[gone:]), "".join("01"[x] for x in there)
    assert 10 < gone < 90
    assert cache.stats()["evicted"] == gone // 2 - 1
    assert cache.stats()["dropped"] == 0


def test_a_cache_over_its_size_shrinks_with_the_next_segment(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 64 * MIB)
    for number in range(50):
        write(cache, T, number * MIB, (number + 1) * MIB)
    assert taken(tmp_path) > 50 * MIB
    cache = DiskCache(str(tmp_path), 16 * MIB)
    write(cache, T, 50 * MIB, 52 * MIB)
    assert taken(tmp_path) <= 16 * MIB
    assert found(cache, T, 50 * MIB, 52 * MIB)


def test_many_processes_share_a_small_cache(tmp_path: Path) -> None:
    size = 32 * MIB
    caches = [DiskCache(str(tmp_path), size) for _ in range(40)]
    for turn in range(3):
        for number, cache in enumerate(caches):
            start = (turn * 40 + number) * MIB
            write(cache, T, start, start + 200_000)
            assert taken(tmp_path) <= size
    assert sum(cache.stats()["dropped"] for cache in caches) <= 12
    assert len(rows(tmp_path)) > 40


def test_the_index_is_bounded_too(tmp_path: Path) -> None:
    """An index at its limit overwrites rows of other blocks, and leads to no wrong bytes."""
    cache = DiskCache(str(tmp_path), 2 * MIB)
    for number in range(4000):
        cache.write(T, ONE, number * 10, content(T, ONE, number * 10, number * 10 + 10))
    flush(cache)
    assert (tmp_path / LAYOUT / INDEX).stat().st_size <= 2 * MIB // 16
    there = [found(cache, T, number * 10, number * 10 + 10) for number in range(4000)]
    assert 500 < sum(there) < 2100
    assert taken(tmp_path) <= 2 * MIB


# -- killed writers


@pytest.mark.timeout(200 + KILLS)
def test_a_killed_writer_leaves_no_damaged_blocks(tmp_path: Path) -> None:
    """After a kill, all blocks have the right bytes, none counts as damaged, and reserved space is usable again."""
    directory, size = tmp_path / "c", 64 * MIB
    seeds = random.Random(4)
    wrote, end_by = 0, time.monotonic() + 100
    for turn in itertools.count():
        if turn >= KILLS and (wrote > KILLS or time.monotonic() > end_by):
            break
        process = FORK.Process(target=churn, args=(str(directory), size, turn % 5, MIB))
        process.start()
        # on a busy machine the first processes may be killed before they write: later ones live longer and longer
        time.sleep(seeds.uniform(0.01, 0.1) * max(1, turn - KILLS))
        end([process], directory)
        assert process.exitcode == -signal.SIGKILL
        mine = DiskCache(str(directory), size)
        many = ranges(turn % 5, MIB)
        for target, version, start, stop, _run in (next(many) for _ in range(40)):
            wrote += found(mine, target, start, stop, version)
            mine.version(target, 0)
        assert mine.stats()["errors"] == 0
        mine.close()
        assert not directory.exists() or checked_blocks(directory)[1] == 0
    assert wrote > KILLS
    assert taken(directory) <= size
    last = DiskCache(str(directory), size)
    write(last, T, 0, MIB)
    assert found(last, T, 0, MIB)


@pytest.mark.timeout(120)
def test_a_killed_writer_does_not_disturb_others(tmp_path: Path) -> None:
    directory, size = tmp_path / "c", 24 * MIB
    processes = churning(directory, size, 2)
    try:
        for _ in range(KILLS):
            victim = churning(directory, size, 1)
            time.sleep(random.uniform(0.01, 0.1))
            end(victim, directory)
        end_by = time.monotonic() + 40
        while checked_blocks(directory)[0] <= 20 and time.monotonic() < end_by:
            time.sleep(0.1)
        assert all(process.is_alive() for process in processes)
    finally:
        end(processes, directory)
    checked, bad = checked_blocks(directory)
    assert bad == 0
    assert checked > 20


# -- disks that are full, or fail


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@needs_root
@pytest.mark.parametrize("options", [",nr_inodes=6", ""], ids=["inodes", "bytes"])
def test_a_full_disk(options: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is one warning and no error. Once the disk has room, blocks are kept again."""
    with small_disk(tmp_path / "small", 4 * MIB, options) as place:
        if options:
            for number in range(3):
                (place / str(number)).touch()
        else:
            (place / "others").write_bytes(bytes(4 * MIB - 40_000))
        cache = DiskCache(str(place / "c"), 1 << 30)
        for number in range(20):
            write(cache, T, number * MIB, number * MIB + 70_000, run=number % 2 == 0)
            remember(cache, f"{T}{number}", ONE)
            assert not found(cache, T, number * MIB, number * MIB + 70_000)
        assert warnings(caplog) == [f"cache_dir={place / 'c'}: no space left on device; nothing is cached for now"]
        for path in place.iterdir():
            if path.is_file():
                path.unlink()
        cache._until = 0  # the back-off has passed
        write(cache, T, 0, 70_000)
        assert found(cache, T, 0, 70_000)
        assert len(warnings(caplog)) == 1
        cache.close()


@needs_root
def test_a_disk_smaller_than_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", 16 * MIB) as place:
        cache = DiskCache(str(place / "c"), 1 << 30)
        for number in range(60):
            write(cache, T, number * MIB, number * MIB + 700_000)
        there = [found(cache, T, number * MIB, number * MIB + 700_000) for number in range(60)]
        assert all(there[-15:])
        assert cache.stats()["dropped"] == 0
        assert warnings(caplog) == []
        cache.close()


@needs_root
def test_a_disk_that_becomes_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", 64 * MIB) as place:
        first = DiskCache(str(place / "c"), 1 << 30)
        write(first, T, 0, 1000)
        write(first, T, 0, 1000, run=True)
        remember(first, T, ONE)
        first.close()
        for path in segments(place / "c"):
            os.utime(path, (1e9, 1e9))
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for cache in (first, DiskCache(str(place / "c"), 1 << 30)):
            write(cache, T, 1000, 2000)
            remember(cache, T, TWO)
            remember(cache, T, ONE)
        assert found(cache, T, 0, 1000)
        assert found(cache, T, 10, 20)
        assert cache.version(T, 0) == ONE
        assert [re.sub(".*: (.*);.*", r"\1", text) for text in warnings(caplog)] == ["read-only file system"]
        cache.close()


# -- locks
