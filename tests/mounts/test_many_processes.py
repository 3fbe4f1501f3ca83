"""Many processes on one mount, like the workers of a job: one daemon, one index, and every byte right."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mounts.mounting import counters_of, daemon_pid, mounted, until
from tests.mounts.remotevalues import publish
from tests.servers import Nginx, nginx

__all__ = ["nginx"]

PROCESSES, READS = 64, 100
KEYS, SIZE = 20_000, 500  # values, and bytes of each

# A program that starts processes; each reads random values and compares them with the bytes in the target
READER = """
import os, random, sys
root, target, processes, reads, keys, size = *sys.argv[1:3], *map(int, sys.argv[3:])
data = open(target, "rb").read()
def read(seed):
    for key in random.Random(seed).choices(range(keys), k=reads):
        descriptor = os.open(f"{root}/v/{key}", os.O_RDONLY)
        found = os.pread(descriptor, size + 1, 0)
        os.close(descriptor)
        if found != data[key * size : (key + 1) * size]:
            raise SystemExit(f"{key}: {len(found)} bytes that are not right")
children = []
for seed in range(processes):
    pid = os.fork()
    if pid == 0:
        try:
            read(seed)
        except BaseException as exc:
            print(repr(exc), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(pid)
sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))
"""


def read_by_many(root: Path, target: Path, processes: int, reads: int) -> None:
    numbers: Sequence[int] = (processes, reads, KEYS, SIZE)
    command = [sys.executable, "-I", "-c", READER, root, target, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def document(path: Path, url: str) -> Path:
    refs = {f"v/{number}": [url, number * SIZE, SIZE] for number in range(KEYS)}
    path.write_text(json.dumps({"version": 1, "refs": refs}))
    return path


def test_64_processes_read_100_random_keys_each(tmp_path: Path) -> None:
    target = tmp_path / "data.bin"
    target.write_bytes(random.Random(1).randbytes(KEYS * SIZE))
    with mounted(document(tmp_path / "refs.json", f"file://{target}"), tmp_path / "mnt") as root:
        read_by_many(root, target, PROCESSES, READS)


def test_64_processes_share_fetched_bytes(nginx: Nginx, tmp_path: Path) -> None:
    """The target is fetched about once, and not once for each process."""
    data = publish(nginx.plain.root, "processes.bin", KEYS * SIZE)
    source = document(tmp_path / "refs.json", f"{nginx.plain.url}/processes.bin")
    with mounted(source, tmp_path / "mnt", "prefetch=0B") as root:
        read_by_many(root, nginx.plain.root / "processes.bin", PROCESSES, READS // 2)
        fetched = counters_of(root)["remote"]["bytes"]
    assert fetched <= 1.5 * len(data)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take a higher priority")
@pytest.mark.parametrize(("option", "nice"), [("", -5), ("nice=3", 3), ("nice=0", 0)])
def test_all_threads_of_a_daemon_have_the_chosen_nice_value(option: str, nice: int, tmp_path: Path) -> None:
    source = tmp_path / "refs.json"
    source.write_text('{"a": "b"}')
    with mounted(source, tmp_path / "mnt", option) as root:
        found = set()
        for thread in os.listdir(f"/proc/{daemon_pid(root)}/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                found.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
        assert found == {nice}
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may tell the kernel")
def test_32_readers_of_a_distant_server_send_about_one_read_per_value(nginx: Nginx, tmp_path: Path) -> None:
    """The kernel requests single pages from a daemon that it considers congested, unless the threshold is raised.

    zarrfs raises it through the fusectl file system, which is mounted on some machines only.
    """
    size, count = 512 << 10, 160
    data = publish(nginx.late.root, "far.bin", count * size)
    refs = {f"v/{number}": [f"{nginx.late.url}/far.bin", number * size, size] for number in range(count)}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", "prefetch=0B,coalesce_gap=0B") as root:
        device = os.stat(root).st_dev
        bdi = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        until(lambda: int(bdi.read_text()) > 128)

        def right(number: int) -> bool:
            with (root / f"v/{number}").open("rb", buffering=0) as file:
                return file.read(size) == data[number * size : (number + 1) * size]

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            assert all(pool.map(right, range(count)))
        assert counters_of(root)["read"] < count * 1.2
