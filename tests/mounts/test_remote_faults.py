"""Mounts of data behind a failing network: every read returns the right bytes or EIO, and none hangs."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import DATA
from tests.faultproxy import FAULTS, FaultProxy
from tests.faultproxy import proxy as proxy
from tests.mounts.mounting import alive, counters_of, mounted
from tests.mounts.remotevalues import Outcome, cut, document, holdings, publish, read_all, wait_for, whole
from tests.mounts.test_semantics import error_of
from tests.servers import Nginx

STALLS = "read_timeout=10s,retries=6"  # for tests in which responses stall
READERS = Path(__file__).with_name("concurrent_readers.py")
LARGE = 32 << 20
SETTLED = 40  # allows for idle threads and connections (at most host_requests=32); hundreds of responses fail


def settled(root: Path) -> bool:
    """Return whether no request is in flight."""
    found = counters_of(root)
    return not (found["requests_in_flight"] or found["requests_waiting"])


# -- one response in ten is spoilt


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("memory_limit=16MiB,prefetch=256KiB", id="ahead"),
        pytest.param("memory_limit=8MiB,prefetch=0B", id="not ahead", marks=pytest.mark.nightly),
    ],
)
def test_thousands_of_reads_with_faults(options: str, nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    """Reads are right or EIO, few are EIO, no failure is remembered, and descriptors and threads do not leak."""
    small = cut(publish(nginx.plain.root, "small.bin", 9_000_000), "small", 2000, gap=1000)
    large = cut(publish(nginx.plain.root, "large.bin", LARGE), "large", LARGE)
    chance = random.Random(5)
    reads = whole(small[:500]) + whole(chance.sample(small[500:], 250))
    reads += [(large[0], chance.randrange(LARGE), chance.randrange(1, 20_000)) for _ in range(450)]
    source = document(tmp_path / "refs.json", {f"{proxy.url}/small.bin": small, f"{proxy.url}/large.bin": large})
    more = f"{STALLS},{options}"
    with mounted(source, tmp_path / "mnt", more) as root:
        first = read_all(root, [(small[-1], 0, 10), (large[0], 0, 10)], 1)
        assert first.right == 2  # the versions of both targets are known before a response is spoilt
        proxy.faults = dict.fromkeys(FAULTS, 0.1 / len(FAULTS))
        outcomes = [read_all(root, reads[:500], 16)]
        descriptors, threads = holdings(root)
        chance.shuffle(reads)
        outcomes.append(read_all(root, reads[500:], 16))
        proxy.faults = {}

        faults = sum(proxy.counts[fault] for fault in FAULTS)
        assert {fault for fault in FAULTS if not proxy.counts[fault]} == set(), proxy.counts
        assert faults > proxy.counts["GET"] / 20, proxy.counts
        check_outcomes(outcomes, 1200)
        wait_for(lambda: settled(root))
        assert holdings(root)[0] <= descriptors + SETTLED
        assert holdings(root)[1] <= threads + SETTLED
        again = read_all(root, whole(small[:500]), 16)
        assert (again.right, again.failed) == (500, {})  # no failure is remembered


def check_outcomes(outcomes: list[Outcome], reads: int) -> None:
    """Check that all reads were right or EIO, and few were EIO: most requests succeed when they are repeated."""
    assert set().union(*(outcome.failed for outcome in outcomes)) <= {errno.EIO}
    failed = sum(outcome.failed.get(errno.EIO, 0) for outcome in outcomes)
    assert sum(outcome.right for outcome in outcomes) + failed == reads
    assert failed <= reads / 10


# -- a server that stops and comes back


def test_reads_fail_if_the_server_is_down_for_read_timeout(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    values = cut(publish(nginx.plain.root, "away.bin", 1 << 20), "v", 64 << 10, gap=0)
    source = document(tmp_path / "refs.json", {f"{proxy.url}/away.bin": values})
    with mounted(source, tmp_path / "mnt", "read_timeout=3s,retries=2,prefetch=0B") as root:
        assert read_all(root, whole(values[:1]), 1).right == 1
        proxy.stop()
        gone = read_all(root, whole(values[4:12]), 8)
        assert (gone.right, gone.failed) == (0, {errno.EIO: 8})
        assert read_all(root, whole(values[:1]), 1).right == 1  # cached values can still be read
        proxy.start()
        back = read_all(root, whole(values), 8)
        assert (back.right, back.failed) == (16, {})
        wait_for(lambda: settled(root))


# -- one block, many readers


def start_readers(path: Path, count: int, length: int, direct: bool) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """Start `count` reader processes, wait until each is about to read; return (their parent, {number: pid})."""
    command = [sys.executable, str(READERS), str(path), str(count), str(length), *(["direct"] if direct else [])]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = [parent.stdout.readline().split() for _ in range(count)]
    return parent, {int(number): int(pid) for number, pid in lines}


def joined(root: Path) -> int:
    """Return the number of reads that joined a block in flight."""
    return int(counters_of(root)["memory_hits_total"])


@pytest.mark.parametrize(("direct", "number"), [(False, signal.SIGINT), (True, signal.SIGKILL)])
def test_killing_a_reader_fails_no_other_reader(
    direct: bool, number: int, nginx: Nginx, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Kill the first reader, for which the block is being fetched, and one that waits for the same block."""
    [value] = cut(publish(nginx.plain.root, "killed.bin", 512 << 10), "v", 512 << 10)
    source = document(tmp_path / "refs.json", {f"{proxy.url}/killed.bin": [value]})
    with mounted(source, tmp_path / "mnt") as root:
        proxy.hold()
        first, [one] = (found := start_readers(root / value.key, 1, len(value), direct))[0], found[1].values()
        assert proxy.held.wait(60)
        others, processes = start_readers(root / value.key, 4, len(value), direct)
        if direct:
            wait_for(lambda: joined(root) >= 4)
        os.kill(one, number)
        os.kill(processes.pop(3), number)
        time.sleep(0.1)  # the kernel must first send the interrupt to the daemon
        proxy.release()
        answers = dict(line.split(maxsplit=1) for line in others.communicate(timeout=100)[0].splitlines())
        first.communicate(timeout=100)
        digest = hashlib.sha256(value.data).hexdigest()
        assert {answers[str(other)] for other in processes} == {digest}
        assert proxy.paths["/killed.bin"] == 1
        assert not alive(one)
        wait_for(lambda: settled(root))


# -- targets that are replaced or deleted


def test_a_target_that_is_replaced_or_deleted_while_it_is_mounted(nginx: Nginx, tmp_path: Path) -> None:
    old, gone = (
        cut(publish(nginx.plain.root, f"{name}.bin", 100_000), name, 10_000, gap=0) for name in ("replaced", "deleted")
    )
    urls = {f"{nginx.plain.url}/replaced.bin": old, f"{nginx.plain.url}/deleted.bin": gone}
    source = document(tmp_path / "refs.json", urls)
    with mounted(source, tmp_path / "mnt", "prefetch=0B") as root:
        assert read_all(root, whole([old[0], gone[0]]), 1).right == 2
        new = cut(publish(nginx.plain.root, "replaced.bin", 100_000, seed=1), "replaced", 10_000, gap=0)
        (nginx.plain.root / "deleted.bin").unlink()
        failed = read_all(root, whole([*new[5:7], *gone[5:]]), 1)
        assert (failed.right, failed.failed) == (0, {errno.EIO: 7})
    with mounted(source, tmp_path / "mnt") as root:
        assert read_all(root, whole(new), 1).right == 10


def test_403_means_absent_only_with_missing_status(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    """S3 answers 403 for an absent key if the client may read the bucket but not list it."""
    shutil.copytree(DATA / "zarr/v3_hier", nginx.plain.root / "v3_403", dirs_exist_ok=True)
    with mounted(f"{proxy.url}/v3_403", tmp_path / "mnt") as root:
        proxy.absent = 403
        assert error_of(os.stat, root / "nothing") == errno.EACCES
    with mounted(f"{proxy.url}/v3_403", tmp_path / "mnt", r"missing_status=404\,403") as root:
        assert error_of(os.stat, root / "nothing") == errno.ENOENT
        assert (root / "zarr.json").read_bytes() == (DATA / "zarr/v3_hier/zarr.json").read_bytes()
