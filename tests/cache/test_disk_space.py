"""The bound of the disk cache, as du and df see it; full disks, killed writers, locks that are not to be had."""

from __future__ import annotations

import contextlib
import errno
import fcntl
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

from tests.cache.diskblocks import MIB, ONE, TWO, blocks, churn, content, found, ranges, taken, write
from tests.conftest import tmpfs
from zarrfs.cache import disk, diskspace
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskfiles import LAYOUT, Layout
from zarrfs.cache.diskspace import Ages, Space, cost

T = "https://host/data.nc"
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
    """The processes stand still, so that du counts one moment."""
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


def usage(directory: Path) -> int:
    return int((directory / LAYOUT / "usage").read_text().split()[0])


# -- the bound


def test_du_never_exceeds_the_size_while_four_processes_write(tmp_path: Path) -> None:
    directory, size, most = tmp_path / "c", 24 * MIB, 0
    processes = churning(directory, size, 4)
    try:
        for _ in range(60):
            time.sleep(0.05)
            with stopped(processes):
                if directory.exists():
                    now = taken(directory)
                    assert now <= size
                    most = max(most, now)
                    usage_file = directory / LAYOUT / "usage"
                    if usage_file.exists() and usage_file.stat().st_size and not _scanning(usage_file):
                        assert now <= usage(directory)
            assert all(process.is_alive() for process in processes)
    finally:
        end(processes, directory)
    assert most > size // 2


def _scanning(usage_file: Path) -> bool:
    with usage_file.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000, 700_000, 3 * MIB])
def test_small_sizes(size: int, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), size, 0)
    base = taken(tmp_path)
    for target, version, start, stop, run in (next(many) for many in [ranges(1, 400_000)] for _ in range(100)):
        write(cache, target, start, stop, version, run)
        found(cache, target, start, stop, version)
        cache._until = 0
        assert blocks(tmp_path) == [] or taken(tmp_path) <= size
    cache.close()
    assert taken(tmp_path) <= max(size, base + 32_768)
    assert size < 500_000 or blocks(tmp_path)


def test_directories_count(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 64 * MIB, 0)
    for number in range(600):
        write(cache, T, number, number + 1)
    cache.close()
    assert taken(tmp_path) <= usage(tmp_path) <= 1.5 * taken(tmp_path)


def test_a_block_too_large_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 8 * MIB, 0)
    write(cache, T, 0, 5 * MIB)
    assert not found(cache, T, 0, 5 * MIB)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    assert cache.stats()["dropped"] == 1


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    size, block = 32 * MIB, 256 << 10
    cache = DiskCache(str(tmp_path), size, 0)
    for number in range(100):
        write(cache, T, number * block, (number + 1) * block)
        newest = max(blocks(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (1e9 + number, 1e9 + number))
    assert found(cache, T, 0, block)  # and so it is new
    for number in range(100, 140):
        write(cache, T, number * block, (number + 1) * block)
    there = [found(cache, T, number * block, (number + 1) * block) for number in range(140)]
    assert there[0]
    assert all(there[100:])
    gone = there.index(True, 1)
    assert there[1:gone] == [False] * (gone - 1)
    assert all(there[gone:])
    assert 10 < gone < 90
    assert cache.stats()["evicted"] == gone - 1
    assert cache.stats()["dropped"] == 0


def test_a_hit_is_noted_once_a_minute(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 32 * MIB, 0)
    write(cache, T, 0, 1000)
    [path] = blocks(tmp_path)
    for age, touched in ((50, False), (70, True)):
        then = time.time() - age
        os.utime(path, (then, then))
        assert found(cache, T, 0, 1000)
        assert (path.stat().st_mtime > then + 1) == touched


def test_ages_are_counted_coarser_where_there_are_many() -> None:
    ages = Ages(limit=100)
    for number in range(10_000):
        ages.add(1_700_000_000 * 10**9 + number * 10**9, 10)
    assert len(ages.bytes) <= 100
    for excess in (1, 5000, 50_000, 99_000):
        before = ages.before(excess)
        held = sum(10 for number in range(10_000) if 1_700_000_000 * 10**9 + number * 10**9 < before)
        assert excess <= held <= excess + 5000
    assert ages.before(10**6) > 2**80


def test_nothing_is_counted_when_a_cache_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = DiskCache(str(tmp_path), 32 * MIB, 0)
    write(first, T, 0, 1000)
    first.close()
    monkeypatch.setattr(Space, "_scan", lambda *_: pytest.fail("counts"))
    cache = DiskCache(str(tmp_path), 32 * MIB, 0)
    assert found(cache, T, 0, 1000)
    write(cache, T, 1000, 2000)
    assert found(cache, T, 1000, 2000)


@pytest.mark.parametrize("text", [b"", b"x", b"0" * 38, b"00000000000000000001 0000000000000000\n", None])
def test_a_damaged_count_is_made_anew(text: bytes | None, tmp_path: Path) -> None:
    first = DiskCache(str(tmp_path), 32 * MIB, 0)
    write(first, T, 0, 5 * MIB)
    first.close()
    path = tmp_path / LAYOUT / "usage"
    path.unlink() if text is None else path.write_bytes(text)
    second = DiskCache(str(tmp_path), 32 * MIB, 0)
    write(second, T, 5 * MIB, 6 * MIB)
    assert found(second, T, 5 * MIB, 6 * MIB)
    assert usage(tmp_path) >= taken(tmp_path) >= 6 * MIB
    second.close()


def test_close_gives_back_what_was_reserved(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 320 * MIB, 0)
    write(cache, T, 0, MIB)
    assert usage(tmp_path) > 20 * MIB
    assert len(os.listdir(tmp_path / LAYOUT / "leases")) == 1
    cache.close()
    assert taken(tmp_path) <= usage(tmp_path) < 2 * MIB
    assert os.listdir(tmp_path / LAYOUT / "leases") == []


def test_leases_of_the_living_are_counted_and_those_of_the_dead_are_not(tmp_path: Path) -> None:
    size = 32 * MIB
    alive, dead, closed = (DiskCache(str(tmp_path), size, 0) for _ in range(3))
    for number, cache in enumerate((alive, dead, closed)):
        write(cache, T, number * 1000, number * 1000 + 1000)
    closed.close()
    dead._space._lease = None  # as the end of its process would do
    assert Space(Layout(str(tmp_path)), size, 0).recount(1)
    assert len(os.listdir(tmp_path / LAYOUT / "leases")) == 1
    piece = size // 16
    assert piece < usage(tmp_path) < piece + 200_000


def test_many_processes_share_a_small_cache(tmp_path: Path) -> None:
    size = 32 * MIB
    caches = [DiskCache(str(tmp_path), size, 0) for _ in range(40)]
    for turn in range(3):
        for number, cache in enumerate(caches):
            start = (turn * 40 + number) * MIB
            write(cache, T, start, start + 200_000)
            assert taken(tmp_path) <= size
    assert sum(cache.stats()["dropped"] for cache in caches) <= 12
    assert len(blocks(tmp_path)) > 40


def test_old_temporary_files_go(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 32 * MIB, 0)
    write(cache, T, 0, 1000)
    folder = blocks(tmp_path)[0].parent
    for name, age in ((".a1.tmp", 4000), (".b2.tmp", 3000)):
        (folder / name).write_bytes(bytes(100_000))
        os.utime(folder / name, (time.time() - age,) * 2)
    assert Space(Layout(str(tmp_path)), 32 * MIB, 0).recount(1)
    assert [path.name for path in folder.glob(".*.tmp")] == [".b2.tmp"]
    assert found(cache, T, 0, 1000)


# -- killed


def test_killed_a_hundred_times(tmp_path: Path) -> None:
    directory, size = tmp_path / "c", 64 * MIB
    seeds = random.Random(4)
    wrote = 0
    for turn in range(100):
        process = FORK.Process(target=churn, args=(str(directory), size, turn % 5, MIB))
        process.start()
        time.sleep(seeds.uniform(0.005, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        mine = DiskCache(str(directory), size, 0)
        many = ranges(turn % 5, MIB)
        for target, version, start, stop, _run in (next(many) for _ in range(40)):
            wrote += found(mine, target, start, stop, version)
            mine.version(target, 0)
        assert mine.stats()["errors"] == 0
        mine.close()
    assert wrote > 100
    assert taken(directory) <= size
    assert taken(directory) <= usage(directory)
    last = DiskCache(str(directory), size, 0)  # and room is found in spite of a hundred leases
    write(last, T, 0, MIB)
    assert found(last, T, 0, MIB)


# -- disks that are full, or fail


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@needs_root
def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", 64 * MIB, ",nr_inodes=40") as place:
        cache = DiskCache(str(place / "c"), 1 << 30, 0)
        for number in range(40):
            write(cache, T, number * MIB, number * MIB + 7000, run=number % 2 == 0)
            cache.remember(f"{T}{number}", ONE)
        kept = [number for number in range(40) if found(cache, T, number * MIB, number * MIB + 7000)]
        assert kept == list(range(len(kept)))
        assert 5 <= len(kept) <= 20
        assert warnings(caplog) == [f"cache_dir={place / 'c'}: no space left on device; nothing is kept there for now"]
        assert list(place.rglob("*.tmp")) == []
        cache._until = 0  # the back-off has passed
        write(cache, T, 39 * MIB, 40 * MIB)  # what was not used for longest has gone, but directories stay
        cache._until = 0
        write(cache, T, kept[-1] * MIB, kept[-1] * MIB + 7001)
        assert len([number for number in kept if found(cache, T, number * MIB, number * MIB + 7000)]) < len(kept)
        assert len(warnings(caplog)) == 1
        cache.close()


@needs_root
def test_a_disk_smaller_than_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", 16 * MIB) as place:
        cache = DiskCache(str(place / "c"), 1 << 30, 0)
        for number in range(60):
            write(cache, T, number * MIB, number * MIB + 700_000)
        there = [found(cache, T, number * MIB, number * MIB + 700_000) for number in range(60)]
        assert all(there[-15:])
        assert cache.stats()["dropped"] == 0
        assert warnings(caplog) == []
        cache.close()


@needs_root
def test_some_space_stays_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", 64 * MIB) as place:
        least = 40 * MIB
        cache = DiskCache(str(place / "c"), 1 << 30, least)
        for number in range(100):
            write(cache, T, number * MIB, (number + 1) * MIB - 5)
            assert free(place) >= least
        assert found(cache, T, 99 * MIB, 100 * MIB - 5)  # the new ones took the place of the old ones
        assert cache.stats()["dropped"] == 0
        (place / "other").write_bytes(bytes(30 * MIB))
        assert free(place) < least
        write(cache, T, 0, MIB)
        assert blocks(place / "c") == []
        assert len(warnings(caplog)) == 1
        assert "cache_min_free" in warnings(caplog)[0]
        (place / "other").unlink()
        cache._until = 0
        write(cache, T, 0, MIB)
        assert found(cache, T, 0, MIB)
        cache.close()


@needs_root
def test_a_disk_that_becomes_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "small", 64 * MIB) as place:
        first = DiskCache(str(place / "c"), 1 << 30, 0)
        write(first, T, 0, 1000)
        write(first, T, 0, 1000, run=True)
        first.remember(T, ONE)
        for path in blocks(place / "c"):
            os.utime(path, (1e9, 1e9))
        first.close()
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for cache in (first, DiskCache(str(place / "c"), 1 << 30, 0)):
            write(cache, T, 1000, 2000)
            cache.remember(T, TWO)
            cache.remember(T, ONE)
        assert found(cache, T, 0, 1000)
        assert found(cache, T, 10, 20)
        assert cache.version(T, 0) == ONE
        assert [re.sub(".*: (.*);.*", r"\1", text) for text in warnings(caplog)] == ["read-only file system"]
        cache.close()


def test_the_back_off_doubles_and_ends_with_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])
    cache = DiskCache(str(tmp_path / "c"), 64 * MIB, 0)
    (tmp_path / "c").write_text("in the way")
    pauses = []
    for _ in range(7):
        start = now[0]
        before = cache.stats()["errors"]
        while cache.stats()["errors"] == before:
            write(cache, T, 0, 1000)
            now[0] += 1
        pauses.append(now[0] - start)
    assert pauses[1:] == [30, 60, 120, 240, 480, 600]
    assert len(warnings(caplog)) == 1
    (tmp_path / "c").unlink()
    now[0] += 600
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    assert cache._pause == 0


# -- locks


def test_a_lock_that_another_process_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(DiskCache(str(tmp_path), 32 * MIB, 0), T, 0, 1000)
    cache = DiskCache(str(tmp_path), 32 * MIB, 0)
    with (tmp_path / LAYOUT / "usage").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for start in range(1000, 9000, 1000):
            write(cache, T, start, start + 1000)
        assert found(cache, T, 0, 1000)
        assert not found(cache, T, 1000, 2000)
        assert cache.stats()["dropped"] == 8
    time.sleep(1.2 * diskspace.PATIENCE)
    write(cache, T, 1000, 2000)
    assert found(cache, T, 1000, 2000)
    assert warnings(caplog) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(DiskCache(str(tmp_path), 32 * MIB, 0), T, 0, 1000)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)  # no file system here refuses it
    cache = DiskCache(str(tmp_path), 32 * MIB, 0)
    for start in range(0, 4000, 1000):
        write(cache, T, start, start + 1000)
        cache._until = 0
    assert found(cache, T, 0, 1000)
    assert not found(cache, T, 1000, 2000)
    assert len(warnings(caplog)) == 1
    cache.close()


def test_cost_is_not_less_than_what_a_file_takes(tmp_path: Path) -> None:
    for size in (0, 1, 72, 4096, 4097, 100_000, MIB + 72, 4 * MIB + 72):
        path = tmp_path / str(size)
        path.write_bytes(content(T, ONE, 0, size))
        assert path.stat().st_blocks * 512 <= cost(size)
