"""Many mounts that share a cache_dir, like the nodes of a cluster: the server gets about one request per block."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import run
from tests.faultproxy import FaultProxy, proxy
from tests.mounts.mounting import daemon_pid, log_of, mounted
from tests.mounts.remotevalues import Read, Value, cut, document, publish, read_all, wait_for, whole
from tests.servers import Nginx, nginx

__all__ = ["nginx", "proxy"]

NODES = 4
BLOCK = 200_000  # bytes
# The most requests per block, on average. A second node may fetch a block if the first one is stopped for seconds
SHARED = NODES / 2
SLOW = {"drip": 1.0}  # every response takes 0.4 s, so that the nodes get out of step


@contextlib.contextmanager
def nodes(source: Path, directory: Path, options: str, count: int = NODES) -> Iterator[list[Path]]:
    """Mount `source` `count` times, each time with an index, a memory cache and a daemon of its own."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(mounted(source, directory / f"node{number}", options)) for number in range(count)
        ]


def read_on_all(roots: Sequence[Path], reads: Sequence[Read], threads: int = 8) -> None:
    """Do the same reads on all nodes at the same time, and check every byte."""
    with concurrent.futures.ThreadPoolExecutor(len(roots)) as pool:
        for outcome in pool.map(lambda root: read_all(root, reads, threads), roots):
            assert (outcome.right, outcome.failed) == (len(reads), {})


def is_fetching(directory: Path) -> bool:
    """Return whether any process holds a lease."""
    return any(directory.rglob("*.lease"))


def files(nginx: Nginx, proxy: FaultProxy, name: str, count: int, tmp_path: Path) -> tuple[Path, list[Value]]:
    """Write a set of `count` values, each of which is a whole file behind the proxy; return the set and its values."""
    targets = {}
    for number in range(count):
        data = publish(nginx.plain.root, f"{name}/{number}", BLOCK)
        targets[f"{proxy.url}/{name}/{number}"] = [Value(f"v/{number}", data, 0, BLOCK)]
    return document(tmp_path / "refs.json", targets), [values[0] for values in targets.values()]


def test_each_block_is_fetched_about_once(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    source, values = files(nginx, proxy, "nodes", 30, tmp_path)
    proxy.faults = SLOW
    with nodes(source, tmp_path, f"cache_dir={tmp_path}/blocks") as roots:
        read_on_all(roots, whole(values))
        wait_for(lambda: not is_fetching(tmp_path / "blocks"))  # a lease ends once its block is on the disk
    assert proxy.paths.total() <= SHARED * len(values)


def test_parts_of_large_values_and_tiny_values_are_fetched_about_once(
    nginx: Nginx, proxy: FaultProxy, tmp_path: Path
) -> None:
    """2 parts of 4 MiB, and 500 values of 300 bytes, many of which are fetched with one request."""
    large = cut(publish(nginx.plain.root, "large.bin", 8 << 20), "large", 8 << 20)
    tiny = cut(publish(nginx.plain.root, "tiny.bin", 150_000), "tiny", 300)
    targets = {f"{proxy.url}/large.bin": large, f"{proxy.url}/tiny.bin": tiny}
    source = document(tmp_path / "refs.json", targets)
    reads = [(large[0], at, 128 << 10) for at in range(0, 8 << 20, 128 << 10)]
    options = f"cache_dir={tmp_path}/blocks"
    with nodes(source, tmp_path, options) as roots:
        read_on_all(roots, reads, threads=2)
        read_on_all(roots, whole(tiny))
    assert proxy.paths["/large.bin"] <= SHARED * 2
    assert proxy.paths["/tiny.bin"] <= 500, "one for each value at most, of four nodes that all read all"


def test_another_node_fetches_the_blocks_of_a_killed_one(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    """The daemon is killed while it fetches, and leaves its leases."""
    source, values = files(nginx, proxy, "killed", 4, tmp_path)
    options = f"cache_dir={tmp_path}/blocks,read_timeout=60s,prefetch=0B"
    with nodes(source, tmp_path, options, 2) as roots:
        proxy.hold()
        (victim := tmp_path / "victim").mkdir()
        assert run("mount", source, victim, "-o", options).returncode == 0
        readers = [subprocess.Popen(["cat", victim / value.key], stderr=subprocess.DEVNULL) for value in values]
        wait_for(lambda: proxy.paths.total() == len(values))
        os.kill(daemon_pid(victim), signal.SIGKILL)
        assert all(reader.wait(60) for reader in readers)
        subprocess.run(["umount", "-l", victim], check=True)
        proxy.release()
        read_on_all(roots, whole(values))
        wait_for(lambda: not is_fetching(tmp_path / "blocks"))
    assert proxy.paths.total() <= len(values) * 3, "the killed one's, and those of one other, or two if that is slow"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_on_a_full_disk_there_are_no_leases(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    source, values = files(nginx, proxy, "full", 30, tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
    try:
        (disk / "blocks").mkdir()
        (disk / "others").write_bytes(bytes(180 << 10))
        with nodes(source, tmp_path, f"cache_dir={disk}/blocks,cache_size=1GiB", 2) as roots:
            read_on_all(roots, whole(values[:10]))
            wait_for(lambda: all("WARNING" in log_of(root) for root in roots))
            read_on_all(roots, whole(values[10:]))
            assert [log_of(root).count("WARNING") for root in roots] == [1, 1]
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
