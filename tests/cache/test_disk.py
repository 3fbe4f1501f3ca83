"""The disk cache with files that are damaged in every way, and a directory that is shared, missing or odd."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cache.diskblocks import MIB, ONE, TWO, blocks, content, found, write
from zarrfs.cache import disk
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskadmin import clear
from zarrfs.cache.diskfiles import LAYOUT
from zarrfs.errors import UsageError
from zarrfs.net.versions import Version

SIZE = 256 * MIB
T = "https://host/data.nc"

# -- pieces of a unit


def test_pieces_of_a_unit_that_do_not_touch_are_all_kept(tmp_path: Path) -> None:
    """Ranges that many readers fetch come in any order: none may push out another."""
    pieces = [(100_000 * number, 100_000 * number + 50_000) for number in (3, 0, 5, 1)]
    cache = DiskCache(str(tmp_path), SIZE, 0)
    for start, stop in pieces:
        write(cache, T, start, stop, run=True)
    again = DiskCache(str(tmp_path), SIZE, 0)
    for start, stop in pieces:
        assert found(again, T, start + 10, stop - 10)
    assert again.read(T, ONE, 40_000, 110_000) is None
    write(cache, T, 50_000, 100_000, run=True)
    assert found(DiskCache(str(tmp_path), SIZE, 0), T, 40_000, 90_000)


# -- damaged files


def flip(place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 4
        path.write_bytes(data)

    return damage


def cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def to_a_link(path: Path) -> None:
    good = path.rename(path.parent / "elsewhere")
    path.symlink_to(good)


def to_a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path is too long for an address
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"flip {place}": flip(place) for place in (0, 8, 16, 24, 40, 56, 71, 72, 5000, -1)},
    **{f"cut to {length}": cut(length) for length in (0, 1, 71, 72, 73, 5000)},
    "longer": longer,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "directory": replaced(Path.mkdir),
    "fifo": replaced(os.mkfifo),
    "socket": replaced(to_a_socket),
    "dangling link": replaced(lambda path: path.symlink_to("/nowhere")),
    "link to the good one": to_a_link,
}


@pytest.mark.parametrize("run", [False, True], ids=["block", "run"])
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged(how: str, run: bool, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    write(cache, T, 4096, 14_096, run=run)
    [path] = blocks(tmp_path)
    DAMAGES[how](path)
    assert not found(cache, T, 4096, 14_096)
    assert cache.stats()["errors"] >= 1
    assert not os.path.lexists(path)
    write(cache, T, 4096, 14_096, run=run)
    assert found(cache, T, 4096, 14_096)


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_record(how: str, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    version = Version("e" * 6000, 3)
    cache.remember(T, version)
    [path] = blocks(tmp_path)
    DAMAGES[how](path)
    assert cache.version(T, 0) is None
    cache.remember(T, version)
    assert cache.version(T, 0) == version


def test_a_file_that_was_moved_is_refused(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    for start in (0, 1000):
        write(cache, T, start, start + 1000)
    one, two = blocks(tmp_path)
    os.replace(one, two)
    assert [found(cache, T, start, start + 1000) for start in (0, 1000)] == [False, False]
    cache.remember(T, ONE)
    cache.remember("other", TWO)
    one, two = blocks(tmp_path)
    os.replace(one, two)
    assert [cache.version(name, 0) for name in (T, "other")] == [None, None]


def test_a_directory_with_content_in_place_of_a_block(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    write(cache, T, 0, 1000)
    [path] = blocks(tmp_path)
    path.unlink()
    path.mkdir()
    (path / "x").touch()
    for _ in range(2):
        assert not found(cache, T, 0, 1000)
        write(cache, T, 0, 1000)
    assert (path / "x").exists()
    write(cache, T, 5000, 6000)  # other blocks are kept all the same
    assert found(cache, T, 5000, 6000)


# -- versions and ranges


@pytest.mark.parametrize("run", [False, True], ids=["block", "run"])
def test_versions_and_targets_are_apart(run: bool, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    write(cache, T, 0, 1000, run=run)
    assert cache.read(T, ONE, 0, 1000) is not None
    others = [(T, TWO, 0, 1000), (T, ONE._replace(size=7), 0, 1000), (T + "x", ONE, 0, 1000), (T, ONE, 999, 1001)]
    for target, version, start, stop in others + ([] if run else [(T, ONE, 0, 999), (T, ONE, 1, 1000)]):
        assert cache.read(target, version, start, stop) is None
    assert cache.stats()["hits"] == 1
    assert cache.stats()["misses"] == (4 if run else 6)


def test_ranges_within_a_run(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    write(cache, T, MIB - 5000, 3 * MIB + 5000, run=True)
    assert len(blocks(tmp_path)) == 4
    again = DiskCache(str(tmp_path), SIZE, 0)
    for start, stop in ((MIB - 5000, MIB), (MIB - 1, MIB + 1), (MIB + 7, MIB + 8), (2 * MIB - 500, 3 * MIB - 600)):
        assert found(again, T, start, stop)
    assert not found(again, T, MIB - 5001, MIB)
    assert not found(again, T, 3 * MIB, 3 * MIB + 5001)
    (first,) = [path for path in blocks(tmp_path) if path.stat().st_size == 5000 + 72][:1]
    flip(80)(first)
    assert found(again, T, MIB + 7, MIB + 8)  # the others stay


def test_a_run_from_memory_is_the_run_on_disk(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    for unit in range(disk.UNITS_HELD + 3):
        write(cache, T, unit * MIB, unit * MIB + 9000, run=True)
    for _ in range(2):
        for unit in range(disk.UNITS_HELD + 3):
            assert found(cache, T, unit * MIB + 1, unit * MIB + 100)
    assert len(cache._units) == disk.UNITS_HELD


def test_a_record_is_touched_when_nothing_has_changed(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    cache.remember("https://user:word@host/x?X-Amz-Signature=abc", ONE)
    [path] = blocks(tmp_path)
    text = path.read_bytes()
    assert b"word" not in text
    assert b"abc" not in text
    os.utime(path, (1e9, 1e9))
    assert cache.version("https://user:word@host/x?X-Amz-Signature=abc", 1e9 - 1) == ONE
    number, before = path.stat().st_ino, time.time() - 1
    cache.remember("https://user:word@host/x?X-Amz-Signature=abc", ONE)
    assert path.stat().st_ino == number
    assert cache.version("https://user:word@host/x?X-Amz-Signature=abc", before) == ONE
    os.utime(path, (4e9, 4e9))  # a clock that is wrong
    assert cache.version("https://user:word@host/x?X-Amz-Signature=abc", before) is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_kinds_of_buffers(kind: Callable[[bytes], Any], tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    cache.write(T, ONE, 0, kind(content(T, ONE, 0, 1000)))
    cache.write(T, ONE, 0, kind(b""))
    assert found(cache, T, 0, 1000)
    assert cache.read(T, ONE, 5, 5) is None
    assert len(blocks(tmp_path)) == 1


# -- the directory


def test_opening_and_reading_make_nothing(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path / "new"), 1 << 40, 0)
    assert not found(cache, T, 0, 1000)
    assert cache.version(T, 0) is None
    cache.close()
    assert os.listdir(tmp_path) == []
    assert cache.stats()["errors"] == 0


def test_a_miss_is_two_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    for start in range(0, 2000 * MIB, MIB):  # so that every directory is there, and known
        write(cache, T, start, start + 1)
    calls: list[str] = []
    for name in ("open", "stat", "pread", "fstat", "listdir", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _n=name, _r=real, **k: (calls.append(_n), _r(*a, **k))[1])
    assert not found(cache, T, 7, 5000)
    assert calls == ["open", "open"]
    calls.clear()
    assert not found(cache, T, 0, 8 * MIB)
    assert calls == ["open", "open"]


def test_a_large_range_lies_in_what_came_for_tiny_ones(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    write(cache, T, MIB // 2, 4 * MIB, run=True)
    assert found(cache, T, MIB // 2, 4 * MIB)
    assert found(cache, T, MIB, 3 * MIB + 5)
    assert not found(cache, T, 0, 3 * MIB)
    assert not found(cache, T, MIB, 4 * MIB + 1)


def test_two_caches_share_and_write_once(tmp_path: Path) -> None:
    one, two = DiskCache(str(tmp_path), SIZE, 0), DiskCache(str(tmp_path), SIZE, 0)
    write(one, T, 0, 1000)
    assert found(two, T, 0, 1000)
    write(two, T, 0, 1000)
    assert (one.stats()["writes"], two.stats()["writes"]) == (1, 0)


def test_threads(tmp_path: Path) -> None:
    cache, wrong = DiskCache(str(tmp_path), SIZE, 0), []

    def work(seed: int) -> None:
        try:
            for number in range(60):
                start = (number * 7 + seed) % 40 * 10_000
                found(cache, T, start, start + 10_000)
                write(cache, T, start, start + 10_000, run=number % 3 == 0)
                assert found(cache, T, start, start + 10_000) or number % 3 == 0  # a longer run may be there
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_close_while_threads_go_on(tmp_path: Path) -> None:
    cache, wrong = DiskCache(str(tmp_path), SIZE, 0), []
    write(cache, T, 0, 1000)

    def work() -> None:
        try:
            for number in range(2000):
                found(cache, T, 0, 1000)
                write(cache, T, number * 1000, number * 1000 + 1000)
        except BaseException as exc:
            wrong.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.05)
    cache.close()
    thread.join()
    assert wrong == []
    assert not found(cache, T, 0, 1000)


def test_other_layouts_are_left_alone(tmp_path: Path) -> None:
    for name in ("zarrfs-blocks-0", "zarrfs-blocks-2", "mine"):
        (tmp_path / name / "00").mkdir(parents=True)
        (tmp_path / name / "00" / ("0" * 30)).write_bytes(b"x")
    cache = DiskCache(str(tmp_path), SIZE, 0)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    clear(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["mine", "zarrfs-blocks-0", LAYOUT, "zarrfs-blocks-2"]
    assert len(list(tmp_path.glob(f"*/00/{'0' * 30}"))) == 3


@pytest.mark.parametrize(
    ("directory", "inner", "file"),
    [
        (None, 0o700, 0o600),
        (0o755, 0o700, 0o600),
        (0o770, 0o770, 0o660),
        (0o2775, 0o2770, 0o660),
        (0o1777, 0o777, 0o666),
    ],
)
def test_who_may_write_the_directory_may_write_below_it(
    directory: int | None, inner: int, file: int, tmp_path: Path
) -> None:
    path, umask = tmp_path / "c", os.umask(0o027)
    try:
        if directory is not None:
            path.mkdir()
            path.chmod(directory)
        cache = DiskCache(str(path), SIZE, 0)
        write(cache, T, 0, 1000)
        cache.remember(T, ONE)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == (0o700 if directory is None else directory)
    for made in (path / LAYOUT).rglob("*"):
        assert stat.S_IMODE(made.stat().st_mode) == (inner if made.is_dir() else file), made


@pytest.mark.parametrize("depth", [0, 1])
def test_links_lead_nowhere(depth: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, other = tmp_path / "c", tmp_path / "other"
    other.mkdir()
    write(DiskCache(str(cache), SIZE, 0), T, 0, 1000)
    [block] = blocks(cache)
    linked = (cache / LAYOUT, block.parent)[depth]
    shutil.rmtree(other)
    linked.rename(other)
    linked.symlink_to(other)
    before = sorted(path.name for path in other.rglob("*"))
    fresh = DiskCache(str(cache), SIZE, 0)
    assert not found(fresh, T, 0, 1000)
    write(fresh, T, 0, 1000)
    assert not found(fresh, T, 0, 1000)
    with contextlib.nullcontext() if depth else pytest.raises(UsageError, match="not a directory"):
        clear(str(cache))
    assert sorted(path.name for path in other.rglob("*")) == before
    assert "nothing is kept there for now" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes nobody")
def test_an_unreadable_directory(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    write(DiskCache(str(cache), SIZE, 0), T, 0, 1000)
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            records: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
            disk.log.addHandler(handler)
            mine = DiskCache(str(cache), SIZE, 0)
            for _ in range(3):
                assert not found(mine, T, 0, 1000)
                write(mine, T, 0, 1000)
                mine.remember(T, ONE)
                assert mine.version(T, 0) is None
            mine.close()
            assert len(records) == 1, records
            assert "permission denied" in records[0]
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_disk_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    write(cache, T, 0, 1000)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    for _ in range(3):
        assert not found(cache, T, 0, 1000)
    monkeypatch.undo()
    assert [record.getMessage() for record in caplog.records] == [
        f"cache_dir={tmp_path}: input/output error; cannot be read"
    ]
    assert found(cache, T, 0, 1000)


def test_pieces_of_a_unit_from_many_threads_are_put_together(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE, 0)
    for unit in range(10):
        base, ready = unit * MIB, threading.Barrier(8)

        def work(number: int, base: int = base, ready: threading.Barrier = ready) -> None:
            ready.wait()
            write(cache, T, base + number * 1000, base + 50_000 + number * 1000, run=True)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found(cache, T, base, base + 57_000)
