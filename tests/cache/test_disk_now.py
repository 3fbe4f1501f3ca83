"""Reads of the disk cache without a thread: only for blocks in the page cache of a local file system."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from trio.testing import trio_test, wait_all_tasks_blocked

from tests.cache.diskblocks import (
    MIB,
    ONE,
    TWO,
    content,
    flip,
    flush,
    found,
    read_now,
    remember,
    rows,
    segment_of,
    segments,
    write,
)
from zarrfs.cache import diskfiles
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskadmin import verify
from zarrfs.cache.diskfiles import LAYOUT
from zarrfs.concurrency.tasks import PassLimit
from zarrfs.net.versions import TargetVersion
from zarrfs.system import beneath
from zarrfs.system.beneath import is_local, open_cached

SIZE = 256 * MIB
T = "https://host/data.nc"
FLAGS = os.O_RDONLY | os.O_CLOEXEC


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Return a directory on a local file system; skip the test if tmp_path is on another one."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        if not is_local(descriptor):
            pytest.skip("the directory of tests is on no local file system")
    finally:
        os.close(descriptor)
    return tmp_path


def test_open_cached_opens_a_file_whose_name_is_cached(tmp_path: Path) -> None:
    """A missing file raises FileNotFoundError, or BlockingIOError if the kernel would have to ask the file system."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"text")
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        descriptor = open_cached("d/f", FLAGS, root)
        assert os.read(descriptor, 10) == b"text"
        os.close(descriptor)
        (tmp_path / "d" / "f").unlink()
        with pytest.raises((FileNotFoundError, BlockingIOError)):
            open_cached("d/f", FLAGS, root)
        with pytest.raises(ValueError, match="inherit"):
            open_cached("d/f", os.O_RDONLY, root)
    finally:
        os.close(root)


@pytest.mark.parametrize("link", ["d", "d/f"])
def test_open_cached_follows_no_link(link: str, tmp_path: Path) -> None:
    """Neither in place of the directory nor in place of the file."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "f").write_bytes(b"text")
    if link == "d":
        (tmp_path / "d").symlink_to("other")
    else:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "f").symlink_to("../other/f")
    os.stat(tmp_path / "d" / "f")
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"symbolic links|memory"):
            open_cached("d/f", FLAGS, root)
    finally:
        os.close(root)


def test_is_local_is_false_for_unknown_file_systems() -> None:
    """/proc is not in the list of local file systems; a closed descriptor is not local either."""
    descriptor = os.open("/proc", os.O_RDONLY)
    assert not is_local(descriptor)
    os.close(descriptor)
    assert not is_local(descriptor)


def version_now(cache: DiskCache, newer_than: float) -> TargetVersion | None:
    return cache.version(T, newer_than, now=True)


def test_blocks_in_the_page_cache_are_read_without_a_thread(local: Path) -> None:
    """Only blocks of the given version and exact range are found. Each read is counted as a hit or a miss."""
    first = DiskCache(str(local), SIZE, 0)
    write(first, T, 0, 500_000)
    cache = DiskCache(str(local), SIZE, 0)
    assert read_now(cache, T, 0, 500_000) is None  # the cache does not know the file system yet
    assert found(cache, T, 0, 500_000)
    hits = cache.stats()["hits"]
    assert read_now(cache, T, 0, 500_000) == content(T, ONE, 0, 500_000)
    assert cache.stats()["hits"] == hits + 1
    assert version_now(cache, 0.0) is None  # no record
    remember(first, T, ONE)
    assert version_now(cache, time.time() - 60) == ONE
    assert version_now(cache, time.time() + 60) is None  # too old
    misses = cache.stats()["misses"]
    assert cache.read(T, TWO, 0, 500_000, now=True) is None
    assert cache.read(T, ONE, 0, 400_000, now=True) is None
    assert cache.stats()["misses"] == misses + 2


def test_blocks_of_another_process_are_read_without_a_thread(local: Path) -> None:
    """Also after the other process has grown the index."""
    reader, writer = DiskCache(str(local), SIZE, 0), DiskCache(str(local), SIZE, 0)
    write(writer, T, 0, 1000)
    assert found(reader, T, 0, 1000)
    size = (local / LAYOUT / "index").stat().st_size
    for start in range(10_000, 10_600):
        writer.write(T, ONE, start, content(T, ONE, start, start + 10))
    flush(writer)
    assert (local / LAYOUT / "index").stat().st_size > size
    for start in range(10_000, 10_600):
        assert reader.read(T, ONE, start, start + 10, now=True) == content(T, ONE, start, start + 10)


def test_tiny_values_are_read_from_a_run(local: Path) -> None:
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 1000, 50_000, run=True)
    assert found(cache, T, 1000, 1010)
    again = DiskCache(str(local), SIZE, 0)
    again.read(T, ONE, 0, 1)
    assert read_now(again, T, 2000, 2100) == content(T, ONE, 2000, 2100)


def test_queued_writes_are_read_from_memory(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block, a part of a run and a version are found while they wait; a block that exceeds the queue is dropped."""
    cache, go_on = DiskCache(str(local), SIZE, 0, queue=200_000), threading.Event()
    real = DiskCache._do
    monkeypatch.setattr(DiskCache, "_do", lambda self, batch: (go_on.wait(20), real(self, batch))[1])
    cache.write(T, ONE, 0, content(T, ONE, 0, 100_000))
    cache.write(T, ONE, 200_000, content(T, ONE, 200_000, 250_000), run=True)
    cache.remember(T, ONE)
    began = time.monotonic()
    cache.write(T, ONE, 500_000, content(T, ONE, 500_000, 600_000))  # the queue has no room
    assert time.monotonic() - began < 10
    assert cache.stats()["dropped"] == 1
    assert cache.read(T, ONE, 0, 100_000) == content(T, ONE, 0, 100_000)
    assert cache.read(T, ONE, 210_000, 220_000) == content(T, ONE, 210_000, 220_000)
    assert cache.version(T, time.time() - 60) == ONE
    assert not DiskCache(str(local), SIZE, 0).read(T, ONE, 0, 100_000)
    go_on.set()
    flush(cache)
    assert cache.stats()["queued"] == 0
    assert not cache._waiting
    assert found(DiskCache(str(local), SIZE, 0), T, 0, 100_000)


def test_large_damaged_and_network_blocks_are_left_to_a_thread(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 2 * MIB)
    write(cache, T, 5, 1005)
    assert found(cache, T, 0, 2 * MIB)
    assert read_now(cache, T, 0, 2 * MIB) is None
    small = next(row for row in rows(local) if row.length == 1000)
    flip(segment_of(local, small), small.offset + 7)
    assert read_now(cache, T, 5, 1005) is None
    flush(cache)
    assert len(rows(local)) == 1, "what is damaged is forgotten"
    write(cache, T, 5, 1005)
    assert read_now(cache, T, 5, 1005) is not None
    monkeypatch.setattr(diskfiles, "is_local", lambda descriptor: False)
    elsewhere = DiskCache(str(local), SIZE, 0)
    assert found(elsewhere, T, 5, 1005)
    with pytest.raises(BlockingIOError):
        elsewhere.read(T, ONE, 5, 1005, now=True)


def test_without_openat2_only_threads_read(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is too old, or a sandbox forbids the call."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    monkeypatch.setattr(beneath, "_SYS_OPENAT2", 100_000)
    assert read_now(cache, T, 0, 1000) is None
    assert found(cache, T, 0, 1000)


def test_a_cache_directory_that_was_removed(local: Path) -> None:
    """A removed cache directory is not read through descriptors that are still open."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    (local / LAYOUT).rename(local / "gone")
    shutil.rmtree(local / "gone")
    assert not found(cache, T, 0, 1000)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)


def test_a_read_updates_the_time_of_an_old_segment(local: Path) -> None:
    """A thread updates it: on a frozen file system the call would block the event loop."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    [segment] = segments(local)
    for age, touched in ((3600, True), (50, False)):
        then = time.time() - age
        os.utime(segment, (then, then))
        assert read_now(cache, T, 0, 1000)
        flush(cache)
        assert (segment.stat().st_mtime > then + 1) == touched


def test_after_a_slow_open_only_threads_open_files(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virus scanner, for example, may check each file before it is opened."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    monkeypatch.setattr(diskfiles, "_SLOW", 0.0)
    read_now(cache, T, 0, 1000)
    monkeypatch.undo()
    assert read_now(cache, T, 0, 1000) is None
    assert found(cache, T, 0, 1000)


def test_a_row_that_claims_a_huge_block(local: Path) -> None:
    """`zarrfs cache verify` finds the row damaged; its segment is far shorter than the 2 GiB in the row."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    [row] = rows(local)
    cache._put_rows([row._replace(length=1 << 31)])
    assert verify(str(local)).bad == 1
    assert rows(local) == []


@trio_test
async def test_bytes_read_in_one_scheduler_pass_are_bounded() -> None:
    """PassLimit refuses more once its bytes are used up, until other tasks have run."""
    turns = PassLimit(100)
    assert [turns.take(40) for _ in range(4)] == [True, True, True, False]
    await wait_all_tasks_blocked()
    assert [turns.take(200), turns.take(1)] == [True, False]
