"""Blocks on disk with -o cache_dir=: killed daemons, shared directories, full disks, changing targets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import caches
from tests.conftest import run
from tests.faultproxy import FaultProxy
from tests.faultproxy import proxy as proxy
from tests.mounts.mounting import all_written, counters_of, daemon_pid, log_of, mount_lines, mounted, on_disk
from tests.mounts.remotevalues import DEAD, Value, cut, document, publish, read_all, wait_for, whole
from tests.servers import Nginx

KILLS = 2


def hits_of(root: Path) -> int:
    """Return how many blocks a mount has read from its cache directory."""
    return int(counters_of(root)["disk_hits_total"])


def usage(directory: Path) -> int:
    """Return the bytes of a directory, as du(1) counts them; files may disappear meanwhile."""
    done = subprocess.run(["du", "-s", "-B1", str(directory)], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0])


def cached(nginx: Nginx, tmp_path: Path, size: int, length: int, options: str) -> tuple[list[Value], Path]:
    """Read all values of a set through a mount, until they are in tmp_path/blocks; return them and the set."""
    values = cut(publish(nginx.plain.root, f"cached{length}.bin", size), "v", length, gap=50_000)
    source = document(tmp_path / "refs.json", {f"{nginx.plain.url}/cached{length}.bin": values})
    with mounted(source, tmp_path / "mnt", options) as root:
        assert read_all(root, whole(values), 8).right == len(values)
        wait_for(lambda: on_disk(tmp_path / "blocks") >= sum(map(len, values)))
    return values, source


def usage_at_once(directory: Path) -> int:
    """Return the bytes of files found by two scans in a row; du(1) may count both a file and its successor."""

    def look() -> dict[tuple[str, int], int]:
        found = {}
        for at, _, names in os.walk(directory):
            for name in (".", *names):
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(at, name))
                    found[os.path.join(at, name), status.st_ino] = status.st_blocks * 512
        return found

    first, second = look(), look()
    return sum(min(size, second[name]) for name, size in first.items() if name in second)


# -- the second mount


def test_blocks_of_one_mount_are_read_from_disk_by_the_next(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    name = "disk.bin"
    values = cut(publish(nginx.plain.root, name, 4 << 20), "v", 10_000, gap=1000)
    large = cut(values[0].data, "large", 4 << 20)
    source = document(tmp_path / "refs.json", {f"{proxy.url}/{name}": [*values, *large]})
    options = f"cache_dir={tmp_path}/blocks"
    with mounted(source, tmp_path / "mnt", options) as root:
        assert read_all(root, whole(values + large), 8).right == len(values) + 1
        wait_for(lambda: all_written(tmp_path / "blocks"))
    assert proxy.counts["GET"] > 0
    proxy.counts.clear()
    with mounted(source, tmp_path / "mnt", options) as root:
        assert read_all(root, whole(values + large), 8).right == len(values) + 1
        assert hits_of(root) > 0
    assert proxy.counts["GET"] == 0, "blocks on disk were fetched again"


# -- disks that fail


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Mount a file system in a file; yield its path and the file: once that is cut off, the disk answers EIO."""
    path, image = tmp_path / "disk", tmp_path / "image"
    path.mkdir()
    image.touch()
    os.truncate(image, 64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    made = subprocess.run(["losetup", "-f", "--show", "--direct-io=on", str(image)], capture_output=True, text=True)
    device = made.stdout.strip()
    if not device:
        pytest.skip(f"no loop device with direct I/O: {made.stderr}")
    try:
        subprocess.run(["mount", device, str(path)], check=True)
        yield path, image
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)
        subprocess.run(["losetup", "-d", device], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="makes and mounts a file system")
def test_a_disk_that_fails_causes_one_warning_and_no_error(
    failing_disk: tuple[Path, Path], nginx: Nginx, tmp_path: Path
) -> None:
    """The names of blocks are in the dentry cache, so they can be opened; reading them fails, and writing others."""
    disk, image = failing_disk
    values = cut(publish(nginx.plain.root, "failing.bin", 8 << 20), "v", 256 << 10, gap=0)
    source = document(tmp_path / "refs.json", {f"{nginx.plain.url}/failing.bin": values})
    options = f"cache_dir={disk}/blocks,prefetch=0B"
    with mounted(source, tmp_path / "mnt", options) as root:
        assert read_all(root, whole(values), 8).right == len(values)
        wait_for(lambda: all_written(disk / "blocks"))
    subprocess.run(["sync", "-f", str(disk)], check=True)
    caches.drop("1")
    os.truncate(image, 0)
    with mounted(source, tmp_path / "mnt", options) as root:
        outcome = read_all(root, whole(values), 8)
        assert (outcome.right, outcome.failed) == (len(values), {})
        wait_for(lambda: "WARNING" in log_of(root))
        assert log_of(root).count("WARNING") == 1
        assert os.strerror(errno.EIO).lower() in log_of(root)


# -- daemons that are killed


def mount_and_kill(source: Path, mountpoint: Path, options: str, values: list[Value], chance: random.Random) -> int:
    """Read until a timer kills the daemon; return the number of blocks that its first reads found on disk."""
    done = run("mount", source, mountpoint, "-o", f"log_file={mountpoint}.log,{options}")
    assert done.returncode == 0, done.stderr
    pid, killed = daemon_pid(mountpoint), threading.Event()
    order = chance.sample(values, len(values))
    after, hits = chance.uniform(0, 0.1), 0

    def kill() -> None:
        killed.set()
        os.kill(pid, signal.SIGKILL)

    try:
        assert read_all(mountpoint, whole(order[:4]), 4).right == 4
        hits = hits_of(mountpoint)
        timer = threading.Timer(after, kill)
        timer.start()
        outcome = read_all(mountpoint, whole(order), 4, until=killed.is_set)
        timer.join()
        assert set(outcome.failed) <= set(DEAD)
    finally:
        if not killed.is_set():
            os.kill(pid, signal.SIGKILL)
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)
    assert not mount_lines(mountpoint)
    return hits


@pytest.mark.timeout(400)
def test_daemons_killed_while_they_write_blocks_leave_whole_blocks(nginx: Nginx, tmp_path: Path) -> None:
    """Kill daemons in turn: each finds the blocks of those before complete or not at all."""
    values = cut(publish(nginx.plain.root, "kills.bin", 24 << 20), "v", 100_000, gap=50_000)
    source = document(tmp_path / "refs.json", {f"{nginx.plain.url}/kills.bin": values})
    (tmp_path / "mnt").mkdir()
    blocks, bound = tmp_path / "blocks", 8 << 20  # about half of all values, so that there are always blocks to write
    options = f"cache_dir={blocks},cache_size={bound}B"
    chance, hits = random.Random(9), 0
    with mounted(source, tmp_path / "mnt", options) as root:  # leave blocks to find, however slow the machine is
        assert read_all(root, whole(values), 4).right == len(values)
        wait_for(lambda: on_disk(blocks) > bound / 2)
    for _ in range(KILLS):
        hits += mount_and_kill(source, tmp_path / "mnt", options, values, chance)
    assert hits > 0, "hardly any block was found on disk: nothing was tested"
    with mounted(source, tmp_path / "mnt", options) as root:
        outcome = read_all(root, whole(values), 4)
        assert (outcome.right, outcome.failed) == (len(values), {})
    assert usage(blocks) <= bound


@pytest.mark.parametrize("age", [4.0, -3600.0], ids=["before a restart", "before a clock was set back"])
def test_leases_of_a_killed_daemon_delay_its_successor_once(age: float, nginx: Nginx, tmp_path: Path) -> None:
    options = f"cache_dir={tmp_path}/blocks,prefetch=0B"
    values, source = cached(nginx, tmp_path, 2 << 20, 100_000, options)
    with mounted(source, tmp_path / "mnt", options) as root:
        for path in [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]:
            path.rename(f"{path}.lease")
            os.utime(f"{path}.lease", (time.time() - age,) * 2)
        began = time.monotonic()
        assert read_all(root, whole(values), 1).right == len(values)
        # a live holder would be waited for at least 5 s each time
        assert time.monotonic() - began < 5 * len(values) / 2


# -- shared and damaged directories


def test_two_daemons_share_a_directory_under_load(nginx: Nginx, tmp_path: Path) -> None:
    values = cut(publish(nginx.plain.root, "shared.bin", 24 << 20), "v", 200_000, gap=0)
    large = cut(values[0].data, "large", 24 << 20)
    source = document(tmp_path / "refs.json", {f"{nginx.plain.url}/shared.bin": [*values, *large]})
    blocks, bound = tmp_path / "blocks", 10 << 20
    more = f"cache_dir={blocks},cache_size={bound}B,memory_limit=8MiB"
    chance, usages, over = random.Random(3), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            usages.append(usage_at_once(blocks))

    with (
        mounted(source, tmp_path / "one", more) as one,
        mounted(source, tmp_path / "two", more) as two,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        watching = pool.submit(watch)
        try:
            reads = [(large[0], chance.randrange(24 << 20), 30_000) for _ in range(100)]
            jobs = [
                pool.submit(read_all, root, [*whole(chance.choices(values, k=200)), *reads], 8)
                for root in (one, two)
            ]
            outcomes = [job.result() for job in jobs]
        finally:
            over.set()
        watching.result()
        assert [(outcome.right, outcome.failed) for outcome in outcomes] == [(300, {})] * 2
        assert hits_of(one) > 0
        assert hits_of(two) > 0
    assert 0 < max(usages) <= bound


def test_a_damaged_block_on_disk_is_not_served(nginx: Nginx, tmp_path: Path) -> None:
    """Every block file is changed in its middle, cut in half or emptied."""
    options = f"cache_dir={tmp_path}/blocks"
    values, source = cached(nginx, tmp_path, 4 << 20, 50_000, options)
    files = [path for path in (tmp_path / "blocks").rglob("*") if path.is_file() and path.stat().st_size > 10_000]
    assert files
    for number, path in enumerate(files):
        data = path.read_bytes()
        middle = len(data) // 2
        spoilt = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes([spoilt, data[:middle], b""][number % 3])
    with mounted(source, tmp_path / "mnt", options) as root:
        outcome = read_all(root, whole(values), 8)
        assert (outcome.right, outcome.failed) == (len(values), {})
        assert errno.EIO not in outcome.failed
