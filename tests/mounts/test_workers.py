"""Mounts served by several processes: each of them answers correctly, and none of them outlives the mount.

Tests stop the first process with SIGSTOP to make the workers answer: these poll for requests four times a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.conftest import run
from tests.mounts.manyworkers import (
    children,
    drop_pages,
    processes,
    replace_workers,
    running,
    starter,
    stopped,
    workers,
)
from tests.mounts.mounting import alive, counters_of, daemon_pid, log_of, mount_lines, mounted, until
from tests.mounts.remotevalues import publish
from tests.servers import Nginx, nginx

__all__ = ["nginx"]

HELPER = [sys.executable, "-m", "zarrfs.cli.mount_helper"]
WORKERS = 3
FILES, LARGE = 300, 8 << 20

# Processes read random files, at least one each, and compare every byte, until the time is over or SIGTERM comes;
# the program prints how many reads were right, wrong, and failed.
READERS = """
import os, random, signal, sys, time
root, readers, seconds, files = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
pipe, ends = os.pipe(), time.monotonic() + seconds
def end(*_):
    global ends
    ends = 0
signal.signal(signal.SIGTERM, end)
for seed in range(readers):
    if os.fork() == 0:
        choose, right, wrong, failed = random.Random(seed), 0, 0, 0
        while not right + wrong + failed or time.monotonic() < ends:
            number = choose.randrange(files)
            try:
                with open(f"{root}/d{number % 7}/{number}", "rb", buffering=0) as file:
                    found = file.read(1 << 20)
            except OSError:
                failed += 1
                continue
            right += found == b"%d " % number * 1000
            wrong += found != b"%d " % number * 1000
        os.write(pipe[1], b"%d %d %d\\n" % (right, wrong, failed))
        os._exit(0)
os.close(pipe[1])
print(*(sum(map(int, column)) for column in zip(*(line.split() for line in open(pipe[0])))))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for number in range(FILES):
        (root / f"d{number % 7}").mkdir(parents=True, exist_ok=True)
        (root / f"d{number % 7}/{number}").write_bytes(b"%d " % number * 1000)
    (root / "large").write_bytes(random.Random(0).randbytes(LARGE))
    return root


@pytest.fixture
def mount(source: Path, tmp_path: Path) -> Iterator[Path]:
    with mounted(source, tmp_path / "mnt", f"workers={WORKERS}", "attr_timeout=0", "entry_timeout=0") as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        pids = [starter(mountpoint), *workers(mountpoint)]
        yield mountpoint
    until(lambda: not any(map(alive, pids)))


@pytest.mark.promise("S55")
def test_workers_killed_under_load_fail_only_what_they_held_and_are_replaced(mount: Path) -> None:
    command = [sys.executable, "-I", "-c", READERS, mount, "8", "2", str(FILES)]
    kills = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as readers:
        while readers.poll() is None:
            time.sleep(0.3)
            for pid in workers(mount)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
        assert readers.stdout is not None
        right, wrong, failed = map(int, readers.stdout.read().split())
    assert wrong == 0
    assert kills
    assert right
    assert failed <= 8 * kills  # each reader has one request at a time
    until(lambda: len(workers(mount)) == WORKERS - 1)
    until(lambda: running(mount) == WORKERS)
    assert "has died and is replaced" in log_of(mount)
    assert (mount / "d1/1").read_bytes() == b"1 " * 1000


@pytest.mark.promise("S55")
def test_files_and_listings_opened_by_one_process_are_served_by_another(mount: Path, source: Path) -> None:
    content, first = (source / "large").read_bytes(), daemon_pid(mount)
    descriptor = os.open(mount / "large", os.O_RDONLY)
    assert os.pread(descriptor, 100, 0) == content[:100]
    (source / "new").write_bytes(b"x" * LARGE)
    os.replace(source / "new", source / "large")
    with os.scandir(mount / "d1") as listing:
        names = [next(listing).name]
        inode = os.fstat(descriptor).st_ino
        with stopped(first):
            assert os.pread(descriptor, 1000, LARGE - 1000) == content[-1000:]
            assert os.fstat(descriptor).st_ino == inode
            names += [entry.name for entry in listing]
            assert os.pread(descriptor, 1000, LARGE // 2) == content[LARGE // 2 :][:1000]
            os.close(descriptor)
            assert (mount / "large").read_bytes() == b"x" * LARGE
            inodes = {entry.name: entry.inode() for entry in os.scandir(mount / "d2")}
    assert sorted(names) == sorted(os.listdir(source / "d1"))
    assert inodes == {name: (mount / "d2" / name).stat().st_ino for name in os.listdir(source / "d2")}
    until(lambda: counters_of(mount)["open_files"] == 0)


def replies(pid: int) -> int:
    """Return how often a process has written; a daemon writes replies, and little else (proc_pid_io(5))."""
    return int(re.findall(r"syscw: (\d+)", Path(f"/proc/{pid}/io").read_text())[0])


def test_one_reader_keeps_one_process_busy_and_many_several(mount: Path) -> None:
    def shares(readers: int) -> list[float]:
        pids = daemon_pid(mount), *workers(mount)
        before = [replies(pid) for pid in pids]
        command = [sys.executable, "-I", "-c", READERS, mount, str(readers), "2", str(FILES)]
        right, wrong, failed = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
        assert right
        assert not wrong + failed
        made = [replies(pid) - since for pid, since in zip(pids, before, strict=True)]
        return sorted(each / sum(made) for each in made)

    # more than a third each: a process that stays busy keeps its code in the caches of a core
    assert any(shares(1)[-1] > 0.6 for _ in range(3))
    assert any(shares(16)[-2] > 0.1 for _ in range(3))


def test_counters_are_those_of_all_processes(mount: Path) -> None:
    before = counters_of(mount)
    for number in range(20):
        (mount / f"d{number % 7}/{number}").read_bytes()
    with stopped(daemon_pid(mount)):
        for number in range(20, 30):
            (mount / f"d{number % 7}/{number}").read_bytes()
    after = counters_of(mount)
    assert after["open"] - before["open"] == 30
    assert after["bytes"] - before["bytes"] == sum(len(b"%d " % number * 1000) for number in range(30))
    shown = json.loads(run("stats", "--json", mount).stdout)
    assert shown["open"] == after["open"]


def test_open_files_keep_their_version_in_every_process(tmp_path: Path) -> None:
    """The processes include workers started after the refresh."""
    target, document = tmp_path / "target", tmp_path / "set.json"
    target.write_bytes(b"old.new!")
    document.write_text(json.dumps({"a/0": ["target", 0, 4], "a/1": "old"}))
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}") as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        opened = [os.open(mountpoint / "a/0", os.O_RDONLY) for _ in range(2)]
        document.write_text(json.dumps({"a/0": ["target", 4, 4], "a/2": "new"}))
        assert run("refresh", mountpoint).returncode == 0
        with stopped(daemon_pid(mountpoint)):
            assert (mountpoint / "a/0").read_bytes() == b"new!"
            assert sorted(os.listdir(mountpoint / "a")) == ["0", "2"]
            assert os.read(opened[0], 9) == b"old."
        replace_workers(mountpoint)
        with stopped(daemon_pid(mountpoint)):
            assert (mountpoint / "a/0").read_bytes() == b"new!"
            assert os.read(opened[1], 9) == b"old."
        for descriptor in opened:
            os.close(descriptor)


@pytest.mark.promise("S55")
def test_a_target_that_changes_is_an_error_in_every_process_until_a_refresh(tmp_path: Path) -> None:
    """The processes include one that has not read the target before and does not know its former version."""
    target, document = tmp_path / "target", tmp_path / "set.json"
    target.write_bytes(b"old.")
    document.write_text(json.dumps({"a/0": ["target", 0, 4], "a/1": ["target", 0, 3]}))
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}", "attr_timeout=0") as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        with stopped(*workers(mountpoint)):
            assert (mountpoint / "a/0").read_bytes() == b"old."
        target.write_bytes(b"new!")
        for pids in [workers(mountpoint), [daemon_pid(mountpoint)]]:
            drop_pages(mountpoint / "a")
            with stopped(*pids), pytest.raises(OSError, match="Input/output error"):
                (mountpoint / "a/1").read_bytes()
        assert run("refresh", mountpoint).returncode == 0
        for pids in [workers(mountpoint), [daemon_pid(mountpoint)]]:
            with stopped(*pids):
                assert (mountpoint / "a/1").read_bytes() == b"new"


@pytest.mark.promise("S55")
def test_a_target_on_a_server_that_changes_is_an_error_in_every_process(nginx: Nginx, tmp_path: Path) -> None:
    publish(nginx.plain.root, "changes.bin", 4096)
    url, document = f"{nginx.plain.url}/changes.bin", tmp_path / "set.json"
    document.write_text(json.dumps({"a/0": [url, 0, 1024], "a/1": [url, 2048, 1024]}))
    options = f"workers={WORKERS},cache_dir={tmp_path / 'cache'}", "prefetch=0B,coalesce_gap=0B,coalesce_size=0B"
    with mounted(document, tmp_path / "mnt", *options) as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        with stopped(*workers(mountpoint)):
            (mountpoint / "a/0").read_bytes()
        until(lambda: counters_of(mountpoint)["remote"]["disk"]["writes"])
        new = publish(nginx.plain.root, "changes.bin", 4096, seed=1)
        for pids in [workers(mountpoint), [daemon_pid(mountpoint)]]:
            with stopped(*pids), pytest.raises(OSError, match="Input/output error"):
                (mountpoint / "a/1").read_bytes()
        assert run("refresh", mountpoint).returncode == 0
        with stopped(daemon_pid(mountpoint)):
            assert (mountpoint / "a/1").read_bytes() == new[2048:][:1024]


# Three processes read a version number and open the file of that number: the number is never lower than one that any
# process has read before, and the file always exists. They exit when the file `end` exists; the program prints how
# many versions each has read.
VERSIONS = """
import mmap, os, sys
root, end = sys.argv[1:]
highest = mmap.mmap(-1, 8)
pipe = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        count = 0
        while not os.path.exists(end):
            least = int.from_bytes(highest[:8], "little")
            with open(f"{root}/a/version") as file:
                found = int(file.read())
            assert found >= least, (found, least)
            open(f"{root}/b/{found}").close()
            if found > int.from_bytes(highest[:8], "little"):
                highest[:8] = found.to_bytes(8, "little")
            count += 1
        os.write(pipe[1], b"%d\\n" % count)
        os._exit(0)
os.close(pipe[1])
print(*open(pipe[0]).read().split())
"""


@pytest.mark.promise("S55")
def test_readers_never_see_an_earlier_version_again(tmp_path: Path) -> None:
    """Once a reader has seen a version, no process of the mount serves content or names of an earlier one."""
    document = tmp_path / "set.json"

    def write(version: int) -> None:
        names = {f"b/{number}": "" for number in range(version + 1)}
        (tmp_path / "new").write_text(json.dumps({"a/version": str(version), **names}))
        os.replace(tmp_path / "new", document)

    write(0)
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}") as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        command = [sys.executable, "-I", "-c", VERSIONS, mountpoint, tmp_path / "end"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as readers:
            for version in range(1, 7):
                write(version)
                assert run("refresh", mountpoint).returncode == 0
            (tmp_path / "end").touch()
            assert readers.stdout is not None
            counts = list(map(int, readers.stdout.read().split()))
        assert len(counts) == 3
        assert "is replaced" not in log_of(mountpoint)


# A zarrfs whose workers notice a new version only at their next request
SLEEPING = """
from zarrfs.fuse import worker
worker._SWEEP = 1000.0
from zarrfs.__main__ import program
program()
"""


def test_workers_catch_up_after_several_refreshes_without_a_request(tmp_path: Path) -> None:
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "0"}))
    program = sys.executable, "-c", SLEEPING
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}", program=program) as mountpoint:
        until(lambda: running(mountpoint) == WORKERS)
        for version in ("1", "2", "3"):
            document.write_text(json.dumps({"a": version}))
            assert run("refresh", mountpoint).returncode == 0
        for process in workers(mountpoint):
            others = [pid for pid in processes(mountpoint) if pid != process]
            with stopped(*others):
                assert (mountpoint / "a").read_text() == "3"
        assert "ends" not in log_of(mountpoint)


def test_a_worker_that_cannot_open_the_new_version_is_replaced(tmp_path: Path) -> None:
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "old"}))
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}") as mountpoint:
        until(lambda: running(mountpoint) == WORKERS)
        old = workers(mountpoint)
        no_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(old[0], resource.RLIMIT_NOFILE, (3, no_files))
        document.write_text(json.dumps({"a": "new", "b": ""}))
        assert run("refresh", mountpoint).returncode == 0
        until(lambda: len(workers(mountpoint)) == WORKERS - 1 and old[0] not in workers(mountpoint))
        assert "is replaced" in log_of(mountpoint)
        with stopped(daemon_pid(mountpoint)):
            assert (mountpoint / "a").read_text() == "new"


def test_a_worker_that_starts_later_has_the_current_log_level(tmp_path: Path) -> None:
    (document := tmp_path / "set.json").write_text(json.dumps({"a": ["missing", 0, 4]}))
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}") as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        assert run("refresh", "--set", "log_level=debug", mountpoint).returncode == 0
        replace_workers(mountpoint)
        before = log_of(mountpoint).count("where it came from")
        with stopped(daemon_pid(mountpoint)), pytest.raises(OSError, match="Input/output error"):
            (mountpoint / "a").read_bytes()
        until(lambda: log_of(mountpoint).count("where it came from") > before)


def test_reopening_a_file_keeps_its_pages_in_the_page_cache(tmp_path: Path) -> None:
    target, document = tmp_path / "target", tmp_path / "set.json"
    target.write_bytes(bytes(range(256)) * 64)
    document.write_text(json.dumps({"a/0": ["target", 0, 1 << 14]}))
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}") as mountpoint:
        assert (mountpoint / "a/0").read_bytes() == target.read_bytes()
        before = counters_of(mountpoint)["read"]
        for _ in range(20):
            assert (mountpoint / "a/0").read_bytes() == target.read_bytes()
        assert counters_of(mountpoint)["read"] - before <= 10  # the kernel may drop a page at any time


def test_a_block_from_a_server_is_fetched_once_for_all_processes(nginx: Nginx, tmp_path: Path) -> None:
    size, count = 64 << 10, 40
    data = publish(nginx.plain.root, "workers.bin", count * size)
    refs = {f"a/{number}": [f"{nginx.plain.url}/workers.bin", number * size, size] for number in range(count)}
    document = tmp_path / "set.json"
    document.write_text(json.dumps(refs))
    right = [data[number * size :][:size] for number in range(count)]
    options = f"workers={WORKERS},cache_dir={tmp_path / 'cache'}", "prefetch=0B,coalesce_gap=0B,coalesce_size=0B"
    with mounted(document, tmp_path / "mnt", *options) as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        assert [(mountpoint / f"a/{number}").read_bytes() for number in range(count)] == right
        until(lambda: counters_of(mountpoint)["remote"]["disk"]["bytes_written"] >= len(data))
        drop_pages(mountpoint / "a")
        with stopped(daemon_pid(mountpoint)):
            assert [(mountpoint / f"a/{number}").read_bytes() for number in range(count)] == right
        found = counters_of(mountpoint)["remote"]
    assert found["bytes"] == len(data)
    assert found["disk"]["hits"]  # not for all blocks: the kernel may have kept most pages


def test_arrays_are_decoded_by_any_process(tmp_path: Path) -> None:
    values = np.arange(64 * 64, dtype="<i4").reshape(64, 64)
    array = zarr.create_array(tmp_path / "store", name="a", shape=values.shape, chunks=(16, 16), dtype=values.dtype)
    array[:] = values
    options = f"workers={WORKERS}", "view=arrays", "arrays=raw"
    with mounted(tmp_path / "store", tmp_path / "mnt", *options) as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        with open(mountpoint / "a.bin", "rb", buffering=0) as file:
            with stopped(daemon_pid(mountpoint)):
                assert file.read() == values.tobytes()
            drop_pages(mountpoint)
            with stopped(*workers(mountpoint)):
                assert os.pread(file.fileno(), values.nbytes, 0) == values.tobytes()


@pytest.mark.parametrize(
    ("refs", "options", "why"),
    [
        ({"a": ["http://127.0.0.1:1/x", 0, 4]}, "workers=2", "targets behind URLs need a cache_dir="),
        ({"a": ["target"]}, "workers=2", "the sizes of some files are known to their servers alone"),
        ({"a": ["target"]}, "workers=auto,view=v3", "the sizes of some files are known to their servers alone"),
    ],
)
def test_a_source_that_workers_cannot_serve_has_one_process(
    refs: dict[str, object], options: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "set.json").write_text(json.dumps(refs))
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    done = run("mount", tmp_path / "set.json", mountpoint, "-o", options)
    assert done.returncode == 0, done.stderr
    try:
        assert why in done.stderr
        assert "one process answers the mount" in done.stderr
        assert not children(daemon_pid(mountpoint))
        for line, status in ((options, 0), ("workers=3", 1)):  # the options of the mount, and others
            remount = [*HELPER, str(tmp_path / "set.json"), str(mountpoint), "-o", f"remount,{line}"]
            done = subprocess.run(remount, capture_output=True, text=True, check=False)
            said = "cannot change while mounted" in done.stderr
            assert (done.returncode, said) == (status, bool(status)), done.stderr
    finally:
        assert run("umount", mountpoint).returncode == 0


# A zarrfs that ends idle workers after 2 s instead of 60 s, and believes that the machine has {} processors
HASTY = """
from zarrfs.daemon import workers
from zarrfs.__main__ import program
workers._IDLE_FOR, workers.usable = 2.0, lambda: {}
program()
"""


def test_auto_starts_another_process_under_load_and_ends_it_when_idle(source: Path, tmp_path: Path) -> None:
    program = sys.executable, "-c", HASTY.format(4)
    options = "workers=auto", "attr_timeout=0", "entry_timeout=0"
    with mounted(source, tmp_path / "mnt", *options, program=program) as mountpoint:
        assert not workers(mountpoint)
        command = [sys.executable, "-I", "-c", READERS, mountpoint, "12", "60", str(FILES)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as readers:
            try:
                until(lambda: workers(mountpoint))
            finally:
                os.killpg(readers.pid, signal.SIGTERM)
            assert readers.stdout is not None
            right, wrong, failed = map(int, readers.stdout.read().split())
        until(lambda: not workers(mountpoint))
        assert (mountpoint / "d1/1").read_bytes() == b"1 " * 1000
        assert "has died" not in log_of(mountpoint)
    assert (wrong, failed) == (0, 0)
    assert right


def test_auto_starts_no_workers_on_a_machine_with_three_processors(source: Path, tmp_path: Path) -> None:
    program = sys.executable, "-c", HASTY.format(3)
    with mounted(source, tmp_path / "mnt", "workers=auto", program=program) as mountpoint:
        assert children(daemon_pid(mountpoint)) == []


def test_killing_the_first_process_ends_all_processes(source: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    assert run("mount", source, mountpoint, "-o", f"workers={WORKERS}").returncode == 0
    until(lambda: len(workers(mountpoint)) == WORKERS - 1)
    pids = [daemon_pid(mountpoint), starter(mountpoint), *workers(mountpoint)]
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))
    with pytest.raises(OSError, match=r"abort|not connected"):
        os.listdir(mountpoint)
    assert run("umount", mountpoint).returncode == 0
    assert not mount_lines(mountpoint)


def test_the_first_process_continues_when_all_others_are_killed(mount: Path) -> None:
    os.kill(starter(mount), signal.SIGKILL)
    until(lambda: running(mount) == 1)
    assert (mount / "d1/1").read_bytes() == b"1 " * 1000
    until(lambda: "has died, and workers are started no more" in log_of(mount))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ("workers=0", "expected a whole number from 1 to 256, or auto"),
        ("workers=257", "expected a whole number from 1 to 256, or auto"),
        ("workers=2,rw", "rw: a mount with it is answered by one process"),
        ("workers=2,upperdir=.", "upperdir: a mount with it is answered by one process"),
    ],
)
def test_bad_options_mount_nothing(options: str, rule: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    done = run("mount", source, tmp_path / "mnt", "-o", options)
    assert done.returncode != 0
    assert rule in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not mount_lines(tmp_path / "mnt")
