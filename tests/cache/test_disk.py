"""The disk cache: pieces and runs, damaged segments, and a directory that is shared, missing or not usable."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cache.diskblocks import (
    MIB,
    ONE,
    TWO,
    flip,
    flush,
    found,
    remember,
    rows,
    segment_of,
    segments,
    write,
)
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskfiles import INDEX, LAYOUT
from zarrfs.cache.diskindex import IndexRow
from zarrfs.net.versions import TargetVersion

SIZE = 256 * MIB
T = "https://host/data.nc"

# -- pieces of a unit


# -- damaged files


def replaced(make: Callable[[Path], object]) -> Callable[[Path, IndexRow], None]:
    def damage(path: Path, row: IndexRow) -> None:
        path.unlink()
        make(path)

    return damage


def to_a_link(path: Path, row: IndexRow) -> None:
    good = path.rename(path.parent / "elsewhere")
    path.symlink_to(good)


def to_a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the full path is too long for a socket address
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


DAMAGES: dict[str, Callable[[Path, IndexRow], None]] = {
    **{f"flip {place}": lambda path, row, place=place: flip(path, row.offset + place % row.length)
       for place in (0, 72, 5000, -1)},
    **{f"cut to {length}": lambda path, row, length=length: os.truncate(path, row.offset + length)
       for length in (0, 1, 5000)},
    "emptied": lambda path, row: os.truncate(path, 0),
    "zeros": lambda path, row: path.write_bytes(bytes(path.stat().st_size)) and None,
    "directory": replaced(Path.mkdir),
    "fifo": replaced(os.mkfifo),
    "socket": replaced(to_a_socket),
    "dangling link": replaced(lambda path: path.symlink_to("/nowhere")),
    "link to the good one": to_a_link,
}  # fmt: skip


@pytest.mark.parametrize("run", [False, True], ids=["block", "run"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_block_is_a_miss_and_can_be_written_again(how: str, run: bool, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, T, 0, 10)
    write(cache, T, 4096, 14_096, run=run)
    row = next(row for row in rows(tmp_path) if row.length == 10_000)
    DAMAGES[how](segment_of(tmp_path, row), row)
    assert not found(cache, T, 4096, 14_096)
    assert cache.stats()["errors"] >= 1
    flush(cache)
    assert not [row for row in rows(tmp_path) if row.length == 10_000]
    again = DiskCache(str(tmp_path), SIZE)
    write(again, T, 4096, 14_096, run=run)
    assert found(again, T, 4096, 14_096)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_version_record_is_a_miss_and_can_be_written_again(how: str, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    version = TargetVersion("e" * 6000, 3)
    remember(cache, T, version)
    [row] = rows(tmp_path)
    DAMAGES[how](segment_of(tmp_path, row), row)
    assert cache.version(T, 0) is None
    again = DiskCache(str(tmp_path), SIZE)
    remember(again, T, version)
    assert again.version(T, 0) == version


@pytest.mark.parametrize("place", [0, 10, 16, 24, 32, 40, 44, 48, 63])
def test_a_damaged_index_row_is_a_miss(place: int, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, T, 0, 1000)
    index = tmp_path / LAYOUT / INDEX
    at = next(at for at in range(0, index.stat().st_size, 64) if any(index.read_bytes()[at : at + 16]))
    flip(index, at + place)
    assert not found(cache, T, 0, 1000)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)


@pytest.mark.parametrize("size", [0, 1, 4095, 5000])
def test_a_truncated_index_can_be_written_to_again(size: int, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, T, 0, 1000)
    os.truncate(tmp_path / LAYOUT / INDEX, size)
    for one in (cache, DiskCache(str(tmp_path), SIZE)):
        found(one, T, 0, 1000)
        write(one, T, 0, 1000)
        assert found(one, T, 0, 1000)


def test_a_segment_in_place_of_another_is_refused(tmp_path: Path) -> None:
    caches = [DiskCache(str(tmp_path), SIZE) for _ in range(2)]
    for number, cache in enumerate(caches):  # each cache has a segment of its own
        write(cache, T, number * 1000, number * 1000 + 1000)
    one, two = segments(tmp_path)
    os.replace(one, two)
    assert [found(caches[0], T, start, start + 1000) for start in (0, 1000)].count(True) == 0


def test_a_directory_with_content_in_place_of_a_segment(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, T, 0, 1000)
    [path] = segments(tmp_path)
    path.unlink()
    path.mkdir()
    (path / "x").touch()
    for _ in range(2):
        assert not found(cache, T, 0, 1000)
        flush(cache)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    assert (path / "x").exists()


# -- versions and ranges


@pytest.mark.parametrize("run", [False, True], ids=["block", "run"])
def test_another_target_version_or_range_is_a_miss(run: bool, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, T, 0, 1000, run=run)
    assert cache.read(T, ONE, 0, 1000) is not None
    others = [(T, TWO, 0, 1000), (T, ONE._replace(size=7), 0, 1000), (T + "x", ONE, 0, 1000), (T, ONE, 999, 1001)]
    for target, version, start, stop in others + ([] if run else [(T, ONE, 0, 999), (T, ONE, 1, 1000)]):
        assert cache.read(target, version, start, stop) is None
    assert cache.stats()["hits"] == 1
    assert cache.stats()["misses"] == (4 if run else 6)


def test_any_range_within_a_run_is_found(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, T, MIB - 5000, 3 * MIB + 5000, run=True)
    assert len(rows(tmp_path)) == 4
    again = DiskCache(str(tmp_path), SIZE)
    for start, stop in ((MIB - 5000, MIB), (MIB - 1, MIB + 1), (MIB + 7, MIB + 8), (2 * MIB - 500, 3 * MIB - 600)):
        assert found(again, T, start, stop)
    assert not found(again, T, MIB - 5001, MIB)
    assert not found(again, T, 3 * MIB, 3 * MIB + 5001)
    first = next(row for row in rows(tmp_path) if row.length == 5000)
    flip(segment_of(tmp_path, first), first.offset + 8)
    assert found(again, T, MIB + 7, MIB + 8)  # the other pieces remain


# -- the directory


def test_opening_and_reading_create_no_files(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path / "new"), 1 << 40)
    assert not found(cache, T, 0, 1000)
    assert cache.version(T, 0) is None
    cache.close()
    assert os.listdir(tmp_path) == []
    assert cache.stats()["errors"] == 0


def test_a_large_range_is_found_within_a_run(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, T, MIB // 2, 4 * MIB, run=True)
    assert found(cache, T, MIB // 2, 4 * MIB)
    assert found(cache, T, MIB, 3 * MIB + 5)
    assert not found(cache, T, 0, 3 * MIB)
    assert not found(cache, T, MIB, 4 * MIB + 1)


def test_two_caches_share_a_directory_and_write_a_block_once(tmp_path: Path) -> None:
    one, two = DiskCache(str(tmp_path), SIZE), DiskCache(str(tmp_path), SIZE)
    write(one, T, 0, 1000)
    assert found(two, T, 0, 1000)
    write(two, T, 0, 1000)
    assert (one.stats()["writes"], two.stats()["writes"]) == (1, 0)


def test_threads_share_one_cache(tmp_path: Path) -> None:
    cache, wrong = DiskCache(str(tmp_path), SIZE), []

    def work(seed: int) -> None:
        try:
            for number in range(60):
                start = (number * 7 + seed) % 40 * 10_000
                found(cache, T, start, start + 10_000)
                write(cache, T, start, start + 10_000, run=number % 3 == 0)
                assert found(cache, T, start, start + 10_000) or number % 3 == 0  # a longer run may replace it
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_other_layouts_are_left_alone(tmp_path: Path) -> None:
    for name in ("zarrfs-blocks-0", "zarrfs-blocks-3", "mine"):
        (tmp_path / name / "00").mkdir(parents=True)
        (tmp_path / name / "00" / ("0" * 30)).write_bytes(b"x")
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, T, 0, 1000)
    assert found(cache, T, 0, 1000)
    assert sorted(os.listdir(tmp_path)) == ["mine", "zarrfs-blocks-0", LAYOUT, "zarrfs-blocks-3"]
    assert len(list(tmp_path.glob(f"*/00/{'0' * 30}"))) == 3


def test_new_parent_directories_are_writable_by_their_owner_alone(tmp_path: Path) -> None:
    """Even with umask 0, as in the daemon of a writable mount: otherwise other users could add their own blocks."""
    umask = os.umask(0)
    try:
        write(DiskCache(str(tmp_path / "a/b/c"), SIZE), T, 0, 1000)
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o755, 0o700]


@pytest.mark.parametrize("which", ["directory", "index", "segment"])
def test_links_lead_nowhere(which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The cache never follows a symbolic link in place of its directory, its index or a segment."""
    cache, other = tmp_path / "c", tmp_path / "other"
    write(DiskCache(str(cache), SIZE), T, 0, 1000)
    linked = {"directory": cache / LAYOUT, "index": cache / LAYOUT / INDEX, "segment": segments(cache)[0]}[which]
    linked.rename(other)
    linked.symlink_to(other)
    before = {path: path.stat().st_mtime_ns for path in (other, *other.rglob("*"))}
    fresh = DiskCache(str(cache), SIZE)
    assert not found(fresh, T, 0, 1000)
    write(fresh, T, 0, 1000)
    assert found(fresh, T, 0, 1000) == (which == "segment")
    assert {path: path.stat().st_mtime_ns for path in (other, *other.rglob("*"))} == before
    assert ("nothing is cached for now" in caplog.text or "cannot be read" in caplog.text) == (which != "segment")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")
def test_the_directory_of_another_user_is_not_used_even_by_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner could change the blocks in it. A directory that other users may write to is used: they share it."""
    write(DiskCache(str(tmp_path), SIZE), T, 0, 1000)
    os.chown(tmp_path / LAYOUT, 65534, 65534)
    cache = DiskCache(str(tmp_path), SIZE)
    for _ in range(3):
        assert not found(cache, T, 0, 1000)
        write(cache, T, 0, 1000)
    assert len(caplog.messages) == 1
    assert "zarrfs-blocks-2 in it belongs to user 65534 alone" in caplog.text
    (tmp_path / LAYOUT).chmod(0o770)
    assert found(DiskCache(str(tmp_path), SIZE), T, 0, 1000)
