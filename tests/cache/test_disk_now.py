"""Blocks of the disk cache that the kernel has in memory: read without a thread, or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio
from trio.testing import trio_test

from tests.cache.diskblocks import MIB, ONE, TWO, blocks, content, found, write
from zarrfs.cache import diskfiles
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskfiles import LAYOUT, Damaged, Layout
from zarrfs.concurrency.tasks import Round
from zarrfs.system import beneath
from zarrfs.system.beneath import is_local, open_cached

SIZE = 256 * MIB
T = "https://host/data.nc"
FLAGS = os.O_RDONLY | os.O_CLOEXEC


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A directory on a file system without a server, and with reads that do not wait."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        if not is_local(descriptor):
            pytest.skip("the directory of tests is on no local file system")
    finally:
        os.close(descriptor)
    return tmp_path


def test_open_cached(tmp_path: Path) -> None:
    """A file whose name is known opens; one that is not there is told as open(2) does."""
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
    """Neither as a directory nor as the file."""
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


def test_no_server_is_waited_for() -> None:
    """What /proc is, is not in the list of local file systems; nor is what is closed."""
    descriptor = os.open("/proc", os.O_RDONLY)
    assert not is_local(descriptor)
    os.close(descriptor)
    assert not is_local(descriptor)


def test_what_is_in_memory_is_read_at_once(local: Path) -> None:
    """With the version given, or with that of the record; counted as a hit."""
    write(DiskCache(str(local), SIZE, 0), T, 0, 500_000)
    cache = DiskCache(str(local), SIZE, 0)
    assert cache.read_now(T, ONE, 0.0, 0, 500_000) is None  # nobody has looked what file system it is
    assert found(cache, T, 0, 500_000)
    hits = cache.stats()["hits"]
    version, data, due = cache.read_now(T, ONE, 0.0, 0, 500_000) or pytest.fail("not read")
    assert (version, bytes(data), due) == (ONE, content(T, ONE, 0, 500_000), "")
    assert cache.stats()["hits"] == hits + 1
    assert cache.read_now(T, None, 0.0, 0, 500_000) is None  # no record
    cache.remember(T, ONE)
    assert (cache.read_now(T, None, time.time() - 60, 0, 500_000) or pytest.fail("not read"))[0] == ONE
    assert cache.read_now(T, None, time.time() + 60, 0, 500_000) is None  # too old
    assert cache.read_now(T, TWO, 0.0, 0, 500_000) is None
    assert cache.read_now(T, ONE, 0.0, 0, 400_000) is None


def test_what_is_large_damaged_or_on_a_server_is_for_a_thread(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which removes what is damaged."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 2 * MIB)
    write(cache, T, 5, 1005)
    assert found(cache, T, 0, 2 * MIB)
    assert cache.read_now(T, ONE, 0.0, 0, 2 * MIB) is None
    [small] = [path for path in blocks(local) if path.stat().st_size < MIB]
    data = bytearray(small.read_bytes())
    data[-1] ^= 1
    small.write_bytes(data)
    assert cache.read_now(T, ONE, 0.0, 5, 1005) is None
    assert small.exists()
    assert not found(cache, T, 5, 1005)
    assert not small.exists()
    write(cache, T, 5, 1005)
    assert cache.read_now(T, ONE, 0.0, 5, 1005) is not None
    monkeypatch.setattr(diskfiles, "is_local", lambda descriptor: False)
    elsewhere = DiskCache(str(local), SIZE, 0)
    assert found(elsewhere, T, 5, 1005)
    assert elsewhere.read_now(T, ONE, 0.0, 5, 1005) is None


def test_a_kernel_without_openat2(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a sandbox that forbids it: threads read, as everywhere."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    monkeypatch.setattr(beneath, "_SYS_OPENAT2", 100_000)
    assert cache.read_now(T, ONE, 0.0, 0, 1000) is None
    assert found(cache, T, 0, 1000)


def test_a_directory_that_goes_away(local: Path) -> None:
    """What was removed is not read from descriptors that are still open."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    (local / LAYOUT).rename(local / "gone")
    cache.look_again()
    assert cache.read_now(T, ONE, 0.0, 0, 1000) is None


def test_what_was_not_used_for_a_while_is_to_be_marked(local: Path) -> None:
    """By a thread: a file system that is frozen would stop the loop."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    [block] = blocks(local)
    long_ago = time.time() - 3600
    os.utime(block, (long_ago, long_ago))
    _version, _data, due = cache.read_now(T, ONE, 0.0, 0, 1000) or pytest.fail("not read")
    assert due
    assert block.stat().st_mtime == pytest.approx(long_ago)
    cache.touch(due)
    assert block.stat().st_mtime > long_ago + 3000
    _version, _data, due = cache.read_now(T, ONE, 0.0, 0, 1000) or pytest.fail("not read")
    assert not due


def test_a_file_that_takes_long_to_open(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a scanner is asked first: threads open the others."""
    cache = DiskCache(str(local), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    monkeypatch.setattr(diskfiles, "_SLOW", 0.0)
    cache.read_now(T, ONE, 0.0, 0, 1000)
    monkeypatch.undo()
    assert cache.read_now(T, ONE, 0.0, 0, 1000) is None
    assert found(cache, T, 0, 1000)


def test_a_block_that_says_it_is_huge(local: Path) -> None:
    """`zarrfs cache verify` takes no memory for what a header contradicts."""
    write(DiskCache(str(local), SIZE, 0), T, 0, 1000)
    [block] = blocks(local)
    os.truncate(block, 1 << 42)
    with pytest.raises(Damaged, match="too long"):
        Layout(str(local)).load(block.parent.name + block.name)


@trio_test
async def test_not_all_is_read_in_one_round_of_the_loop() -> None:
    """Others have their turn after so much; then it goes on."""
    turns = Round(100)
    assert [turns.take(40) for _ in range(4)] == [True, True, True, False]
    await trio.sleep(0.001)
    assert [turns.take(200), turns.take(1)] == [True, False]
