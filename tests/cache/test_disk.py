"""The cache on disk: damaged and foreign files, the bound that du measures, full disks, killed writers, leases."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.conftest import tmpfs
from zarrfs.cache.block_request import BlockOnDisk
from zarrfs.cache.disk import DiskCache
from zarrfs.metrics.counters import COUNTS
from zarrfs.net.versions import TargetVersion

MIB = 1 << 20
SIZE = 256 * MIB
T = "https://host/data.nc"
ONE, TWO = TargetVersion('"one"', 1 << 40), TargetVersion('"two"', 1 << 40)
KILLS = int(os.environ.get("ZARRFS_TEST_KILLS", "5"))
FORK = multiprocessing.get_context("fork")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, or gives a directory away")


def content(target: str, version: TargetVersion, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a target, which are the same in every process."""
    pattern = random.Random(ascii((target, version))).randbytes(100_003)
    first = start % len(pattern)
    return (pattern * ((first + stop - start) // len(pattern) + 1))[first : first + stop - start]


def write(
    cache: DiskCache, start: int, stop: int, target: str = T, version: TargetVersion = ONE
) -> None:  # fmt: skip
    cache.write(target, start, content(target, version, start, stop), version, time.time())


def found(cache: DiskCache, start: int, stop: int, target: str = T, version: TargetVersion = ONE) -> bool:
    """Return whether the cache has a range, and check the bytes: read at once, in a thread, or left on the disk."""
    expected = content(target, version, start, stop)
    with contextlib.suppress(BlockingIOError):
        now = cache.read(target, start, stop, version, now=True)
        assert now is None or now.block == expected
    large = cache.read(target, start, stop, version, whole=False)
    if large is not None and isinstance(large.block, BlockOnDisk):
        part = cache.piece(large.block, 5, 100)
        assert part is None or bytes(part) == expected[5:105]
    stored = cache.read(target, start, stop, version)
    assert stored is None or (stored.version, stored.block) == (version, expected)
    return stored is not None


def blocks(directory: Path) -> list[Path]:
    """Return the files of blocks and records, the smallest first."""
    return sorted((path for path in directory.glob("zarrfs-*/*")), key=lambda path: path.lstat().st_size)


def taken(directory: Path) -> int:
    """Return the bytes that a directory occupies, as du(1) counts them; files may disappear meanwhile."""
    done = subprocess.run(["du", "-s", "--block-size=1", directory], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- damaged and foreign files


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def to_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent / "elsewhere"))


def to_a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the full path is too long for a socket address
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"flip {place}": lambda path, place=place: flip(path, place) for place in (0, 5, 22, 300, 505, -1)},
    **{f"cut to {length}": lambda path, length=length: os.truncate(path, length) for length in (0, 500)},
    "one shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x") and None,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "directory": replaced(Path.mkdir),
    "fifo": replaced(os.mkfifo),
    "socket": replaced(to_a_socket),
    "dangling link": replaced(lambda path: path.symlink_to("/nowhere")),
    "link to the good one": to_a_link,
}


@pytest.mark.parametrize("length", [10_000, 3 * MIB])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_block_is_a_miss_and_can_be_written_again(how: str, length: int, tmp_path: Path) -> None:
    errors = COUNTS["disk_errors_total"]
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, 0, 10)
    write(cache, 4096, 4096 + length)
    DAMAGES[how](blocks(tmp_path)[-1])
    assert not found(cache, 4096, 4096 + length)
    assert COUNTS["disk_errors_total"] > errors
    assert found(cache, 0, 10)
    again = DiskCache(str(tmp_path), SIZE)
    write(again, 4096, 4096 + length)
    assert found(again, 4096, 4096 + length)


@pytest.mark.parametrize("how", ["flip 5", "flip 300", "cut to 0", "longer", "fifo"])
def test_a_damaged_version_record_is_a_miss_and_can_be_written_again(how: str, tmp_path: Path) -> None:
    cache, version = DiskCache(str(tmp_path), SIZE), TargetVersion("e" * 400, 3)
    cache.record(T, version, time.time())
    assert (cache.reported(T) or [None])[0] == version
    DAMAGES[how](blocks(tmp_path)[-1])
    assert cache.reported(T) is None
    cache.record(T, version, time.time())
    assert (cache.reported(T) or [None])[0] == version


@pytest.mark.parametrize("version", [TargetVersion("e" * 600, 3), TargetVersion('"one"', 1 << 70)])
def test_a_block_of_a_version_that_is_too_long_is_not_kept(version: TargetVersion, tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, 0, 3, version=version)
    cache.record(T, version, time.time())
    assert not found(cache, 0, 3, version=version)
    assert cache.reported(T) is None


def test_a_block_in_place_of_another_is_refused(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, 0, 1000)
    write(cache, 1000, 2000)
    one, two = blocks(tmp_path)
    one.replace(two)
    assert [found(cache, start, start + 1000) for start in (0, 1000)] == [False, False]


def test_a_directory_with_content_in_place_of_a_block_is_left_alone(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, 0, 1000)
    [path] = blocks(tmp_path)
    path.unlink()
    path.mkdir()
    (path / "x").touch()
    for _ in range(2):
        assert not found(cache, 0, 1000)
        write(cache, 0, 1000)
    write(cache, 5000, 6000)
    assert found(cache, 5000, 6000)
    assert (path / "x").exists()


def test_foreign_files_and_earlier_layouts_are_left_alone(tmp_path: Path) -> None:
    for name in ("zarrfs-blocks-1/00", "zarrfs-blocks-2", "zarrfs-blocks-3", "blobs"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "mine").write_bytes(bytes(200_000))
    cache = DiskCache(str(tmp_path), 2 * MIB)
    for number in range(60):
        write(cache, number * MIB, number * MIB + 200_000)
    assert found(cache, 59 * MIB, 59 * MIB + 200_000)
    assert len(blocks(tmp_path)) < 40
    assert len(list(tmp_path.rglob("mine"))) == 4


# -- versions and ranges


def test_another_target_version_or_range_is_a_miss(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, 0, 1000)
    assert found(cache, 0, 1000)
    assert not found(cache, 0, 1000, version=TWO)
    assert not found(cache, 0, 1000, version=ONE._replace(size=7000))
    assert not found(cache, 0, 1000, T + "x")
    assert found(cache, 0, 999), "the beginning of a block"
    for start, stop in ((0, 1001), (1, 1000), (999, 1001)):
        assert not found(cache, start, stop)


def test_a_large_block_that_is_replaced_while_it_is_read_is_not_mixed(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), SIZE)
    write(cache, 0, 3 * MIB)
    stored = cache.read(T, 0, 3 * MIB, whole=False)
    assert stored is not None
    assert isinstance(stored.block, BlockOnDisk)
    write(DiskCache(str(tmp_path), SIZE), 0, 3 * MIB, version=TWO)
    assert cache.piece(stored.block, 5, 100) is None


def test_threads_share_one_cache(tmp_path: Path) -> None:
    cache, wrong = DiskCache(str(tmp_path), SIZE), []

    def work(seed: int) -> None:
        try:
            for number in range(30):
                start = (number * 7 + seed) % 20 * 10_000
                found(cache, start, start + 10_000)
                write(cache, start, start + 10_000)
                assert found(cache, start, start + 10_000)
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_lease_that_was_removed_loses_its_block_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On NFS, an open file that is removed keeps a name (.nfs...), as one with another hard link does here."""
    cache, slow = DiskCache(str(tmp_path), SIZE), DiskCache(str(tmp_path), SIZE)
    assert slow.take(T, 0, 60.0)
    assert cache.take(T, 0, 60.0) is False
    [lease] = blocks(tmp_path)
    os.link(lease, tmp_path / ".nfs")
    assert cache.take(T, 0, -1.0)
    cache.release(T, 0)
    write(slow, 0, 100_000)
    assert not found(cache, 0, 100_000)
    assert cache.take(T, 0, 60.0)
    write(slow, 200_000, 300_000)
    assert found(cache, 200_000, 300_000)
    write(cache, 0, 100_000)
    assert found(slow, 0, 100_000)
    assert warnings(caplog) == []


def test_leases_leave_descriptors_for_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each lease is an open file, and thousands of readers may wait for a server that is out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        cache = DiskCache(str(tmp_path), SIZE)
        taken = [cache.take(T, start, 60.0) for start in range(300)]
        os.close(os.open(tmp_path, os.O_RDONLY))
        cache.release(T, 0)
        again = cache.take(T, 0, 60.0)
        cache.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (taken[0], taken[-1], again) == (True, None, True)
    assert warnings(caplog) == []


# -- the directory


def test_reading_creates_no_files_and_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    errors = COUNTS["disk_errors_total"]
    cache = DiskCache(str(tmp_path / "new"), 1 << 40)
    assert not found(cache, 0, 1000)
    assert cache.reported(T) is None
    assert os.listdir(tmp_path) == []
    for _ in range(2):
        write(cache, 0, 1000)
        assert found(cache, 0, 1000)
        shutil.rmtree(tmp_path / "new")
        assert not found(cache, 0, 1000)
    assert COUNTS["disk_errors_total"] == errors


def test_new_parent_directories_are_writable_by_their_owner_alone(tmp_path: Path) -> None:
    """Even with umask 0, as in the daemon of a writable mount: otherwise other users could add their own blocks."""
    umask = os.umask(0)
    try:
        write(DiskCache(str(tmp_path / "a/b/c"), SIZE), 0, 1000)
    finally:
        os.umask(umask)
    made = ["a", "a/b", "a/b/c", "a/b/c/zarrfs-blocks-3"]
    modes = [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in made]
    assert modes == [0o755, 0o755, 0o700, 0o700]


def test_a_link_in_place_of_the_directory_leads_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(DiskCache(str(tmp_path), SIZE), 0, 1000)
    [path] = blocks(tmp_path)
    path.parent.rename(tmp_path / "other")
    path.parent.symlink_to(tmp_path / "other")
    fresh = DiskCache(str(tmp_path), SIZE)
    for _ in range(2):
        assert not found(fresh, 0, 1000)
        write(fresh, 5000, 6000)
    assert len(os.listdir(tmp_path / "other")) == 1
    assert 1 <= len(warnings(caplog)) <= 2


@needs_root
def test_the_directory_of_another_user_is_not_used_even_by_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner could change the blocks in it. A directory that other users may write to is used: they share it."""
    write(DiskCache(str(tmp_path), SIZE), 0, 1000)
    directory = blocks(tmp_path)[0].parent
    os.chown(directory, 65534, 65534)
    cache = DiskCache(str(tmp_path), SIZE)
    for _ in range(3):
        assert not found(cache, 0, 1000)
        write(cache, 0, 1000)
    assert len(warnings(caplog)) == 1
    assert "zarrfs-blocks-3 in it belongs to user 65534 alone" in caplog.text
    directory.chmod(0o770)
    assert found(DiskCache(str(tmp_path), SIZE), 0, 1000)


# -- the bound


def test_the_least_recently_used_blocks_are_evicted(tmp_path: Path) -> None:
    cache, block = DiskCache(str(tmp_path), 16 * MIB), 256 << 10
    for number in range(45):
        write(cache, number * block, (number + 1) * block)
        newest = max(blocks(tmp_path), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (1e9 + number, 1e9 + number))
    assert found(cache, 0, block)  # marks it as used now
    for number in range(45, 65):
        write(cache, number * block, (number + 1) * block)
    there = [found(cache, number * block, (number + 1) * block) for number in range(65)]
    gone = there.index(True, 1)
    assert there[0]
    assert not any(there[1:gone])
    assert all(there[gone:])
    assert 5 < gone < 45


@pytest.mark.parametrize("size", [0, 4096, 700_000, 3 * MIB])
def test_small_sizes_are_not_exceeded(size: int, tmp_path: Path) -> None:
    cache, chance = DiskCache(str(tmp_path), size), random.Random(1)
    base = taken(tmp_path)
    for _ in range(30):
        start, length = chance.randrange(64) * MIB, chance.randrange(1, 400_000)
        write(cache, start, start + length)
        cache._resume = 0  # the back-off has passed
        assert taken(tmp_path) <= max(size, base) + 8192  # of the directories
    assert found(cache, start, start + length) or size < MIB


def test_a_cache_over_its_size_shrinks_and_a_block_larger_than_half_of_it_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 64 * MIB)
    for number in range(50):
        write(cache, number * MIB, (number + 1) * MIB)
    assert taken(tmp_path) > 50 * MIB
    cache = DiskCache(str(tmp_path), 7 * MIB)
    write(cache, 50 * MIB, 52 * MIB)
    assert taken(tmp_path) <= 7 * MIB
    assert found(cache, 50 * MIB, 52 * MIB)
    write(cache, 0, 4 * MIB)
    assert not found(cache, 0, 4 * MIB)


def churn(directory: str, size: int, seed: int) -> None:
    """Write and read until killed; on a wrong byte or an exception, create the file DIRECTORY.WRONG and exit."""
    try:
        cache, chance = DiskCache(directory, size), random.Random(seed)
        while True:
            start, length = chance.randrange(64) * MIB, chance.randrange(1, 16) * 40_000
            version = chance.choice([ONE, ONE, TWO])
            if not found(cache, start, start + length, version=version):
                write(cache, start, start + length, version=version)
            cache.record(T, version, time.time())
    except BaseException as exc:
        Path(directory + ".WRONG").write_text(repr(exc))
        os._exit(1)


def churning(directory: Path, size: int, count: int, seed: int = 0) -> list[BaseProcess]:
    started: list[BaseProcess] = [
        FORK.Process(target=churn, args=(str(directory), size, seed + number)) for number in range(count)
    ]
    for process in started:
        process.start()
    return started


def end(processes: list[BaseProcess], directory: Path) -> None:
    for process in processes:
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    wrong = Path(f"{directory}.WRONG")
    assert not wrong.exists(), wrong.read_text()


def test_killed_writers_disturb_nobody_and_du_never_exceeds_the_size(tmp_path: Path) -> None:
    """Four processes write; others are started and killed meanwhile. All that is left is right."""
    directory, size, most = tmp_path / "c", 12 * MIB, 0
    processes = churning(directory, size, 4, 100)
    try:
        end_by = time.monotonic() + 60
        for turn in range(1000):
            victim = churning(directory, size, 1, turn)
            time.sleep(random.Random(turn).uniform(0.01, 0.15))
            end(victim, directory)
            if directory.exists():
                for process in processes:
                    os.kill(process.pid or 0, signal.SIGSTOP)
                now = taken(directory)
                for process in processes:
                    os.kill(process.pid or 0, signal.SIGCONT)
                assert now <= size
                most = max(most, now)
            if turn >= KILLS and (most > size // 2 or time.monotonic() > end_by):
                break
    finally:
        end(processes, directory)
    assert most > size // 2
    mine = DiskCache(str(directory), size)
    starts = [at * MIB for at in range(64)]
    errors = COUNTS["disk_errors_total"]
    hits = sum(found(mine, at, at + n * 40_000, version=v) for at in starts for n in range(1, 16) for v in (ONE, TWO))
    assert hits > 10
    assert COUNTS["disk_errors_total"] == errors


# -- disks that are full, or fail


@needs_root
@pytest.mark.parametrize("options", [",nr_inodes=6", ""], ids=["inodes", "bytes"])
def test_a_full_disk_causes_one_warning_and_no_error(
    options: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the disk has room, blocks are kept again."""
    with tmpfs(tmp_path / "small", f"size={4 * MIB}{options}") as place:
        for number in range(3 if options else 1):
            (place / str(number)).write_bytes(bytes(0 if options else 4 * MIB - 40_000))
        cache = DiskCache(str(place / "c"), 1 << 30)
        for number in range(20):
            write(cache, number * MIB, number * MIB + 70_000)
            cache.record(f"{T}{number}", ONE, time.time())
            assert not found(cache, number * MIB, number * MIB + 70_000)
        assert warnings(caplog) == [f"cache_dir={place / 'c'}: no space left on device; nothing is cached for now"]
        for path in place.iterdir():
            if path.is_file():
                path.unlink()
        cache._resume = 0  # the back-off has passed
        write(cache, 0, 70_000)
        assert found(cache, 0, 70_000)
        assert len(warnings(caplog)) == 1
        cache.close()


@needs_root
def test_without_free_inodes_older_blocks_are_evicted(tmp_path: Path) -> None:
    """A quota of files is often used up long before cache_size=."""
    with tmpfs(tmp_path / "small", f"size={16 * MIB},nr_inodes=8") as place:
        cache = DiskCache(str(place / "c"), 1 << 30)
        for number in range(20):
            cache.take(T, number * MIB, 60.0)
            write(cache, number * MIB, number * MIB + 70_000)
            cache.release(T, number * MIB)
            assert found(cache, number * MIB, number * MIB + 70_000)
        cache.close()


@needs_root
def test_a_disk_smaller_than_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tmpfs(tmp_path / "small", f"size={16 * MIB}") as place:
        cache = DiskCache(str(place / "c"), 1 << 30)
        for number in range(60):
            write(cache, number * MIB, number * MIB + 700_000)
        there = [found(cache, number * MIB, number * MIB + 700_000) for number in range(60)]
        assert all(there[-5:])
        assert warnings(caplog) == []
        cache.close()


@needs_root
def test_a_disk_that_becomes_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tmpfs(tmp_path / "small", f"size={64 * MIB}") as place:
        first = DiskCache(str(place / "c"), 1 << 30)
        write(first, 0, 1000)
        first.record(T, ONE, time.time())
        first.close()
        for path in blocks(place / "c"):
            os.utime(path, (1e9, 1e9))
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        cache = DiskCache(str(place / "c"), 1 << 30)
        assert cache.take(T, 0, 60.0) is None
        write(cache, 1000, 2000)
        cache.record(T, TWO, time.time())
        assert found(cache, 0, 1000)
        assert (cache.reported(T) or [None])[0] == ONE
        assert len(warnings(caplog)) == 1
        assert "read-only file system" in warnings(caplog)[0]
        cache.close()
