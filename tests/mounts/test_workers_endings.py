"""Every way in which a mount served by several processes can end: as with one process, and no process is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from tests.conftest import PROGRAM, run
from tests.mounts.manyworkers import processes, running, starter, state, stopped, workers
from tests.mounts.mounting import alive, counters_of, daemon_pid, log_of, mount_lines, mounted, until
from zarrfs.config.options import Options
from zarrfs.daemon import workers as daemon_workers
from zarrfs.fuse.shared import Shared
from zarrfs.fuse.workerloop import Front

WORKERS = 3
FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "d").mkdir(parents=True)
    for number in range(20):
        (root / f"d/{number}").write_bytes(b"%d " % number * 1000)
    return root


def everyone(mountpoint: Path) -> list[int]:
    """Return all processes of a mount, the starter of workers among them."""
    until(lambda: len(workers(mountpoint)) == WORKERS - 1)
    return [starter(mountpoint), *processes(mountpoint)]


@contextlib.contextmanager
def ending(
    source: Path, mountpoint: Path, *options: str, program: Sequence[str] = (PROGRAM,)
) -> Iterator[list[int]]:
    """Mount and yield all processes of the mount; wait until neither the mount nor any of them is left."""
    mountpoint.mkdir()
    given = ",".join((f"workers={WORKERS}", "attr_timeout=0,entry_timeout=0", *options))
    done = run("mount", source, mountpoint, "-o", given, program=program)
    assert done.returncode == 0, done.stderr
    try:
        pids = everyone(mountpoint)
        yield pids
        until(lambda: not mount_lines(mountpoint))
        until(lambda: not any(map(alive, pids)))
    finally:
        subprocess.run(["umount", "-l", str(mountpoint)], capture_output=True, check=False)


@pytest.mark.promise("S39")
def test_an_idle_mount_is_unmounted(source: Path, tmp_path: Path) -> None:
    mountpoint, log = tmp_path / "mnt", tmp_path / "log"
    with ending(source, mountpoint, f"log_file={log}") as pids:
        others = [pid for pid in pids if pid not in (daemon_pid(mountpoint), starter(mountpoint))]
        with open(mountpoint / "d/1", "rb") as file:  # open, but not read
            assert run("refresh", "--set", "idle_timeout=1500ms", mountpoint).returncode == 0  # none is stopped
            time.sleep(2.5)
            with stopped(daemon_pid(mountpoint)):
                assert file.read() == b"1 " * 1000
        began = last = time.monotonic()
        longest = 0.0
        while last < began + 2.5:  # only the workers serve requests
            # the mount may be unmounted already: see below
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), stopped(pids[1]):
                os.stat(mountpoint / "d/2")
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            time.sleep(0.1)
        # unless the machine was so busy that the mount was idle for 1.5 s between two calls of stat()
        assert mount_lines(mountpoint) or longest > 0.7
        assert len(others) == WORKERS - 1
    assert "idle" in log.read_text()


# A zarrfs whose workers die after they opened d/7 and before they reply
DYING = """
import os, signal
from zarrfs.fuse import worker
handle = worker.WorkerOperations._handle
def dying(self, table, value):
    number = handle(self, table, value)
    if self.process and value.key == "d/7":
        os.kill(os.getpid(), signal.SIGKILL)
    return number
worker.WorkerOperations._handle = dying
from zarrfs.__main__ import program
program()
"""


def test_a_worker_that_dies_before_it_answers_leaves_nothing_open(source: Path, tmp_path: Path) -> None:
    """Otherwise the mount would never be idle, and a replaced version would stay open until the unmount."""
    mountpoint = tmp_path / "mnt"
    with ending(source, mountpoint, program=(sys.executable, "-c", DYING)):
        with stopped(daemon_pid(mountpoint)):
            assert (mountpoint / "d/6").read_bytes() == b"6 " * 1000
            with pytest.raises(OSError, match=r"abort|not connected"):
                (mountpoint / "d/7").read_bytes()
        until(lambda: running(mountpoint) == WORKERS)
        until(lambda: counters_of(mountpoint)["open_files"] == 0)
        assert run("refresh", "--set", "idle_timeout=1s", mountpoint).returncode == 0


# A zarrfs that waits while it opens d/7, as for a slow store; meanwhile another task waits for the next request
WAITING = """
import trio
from zarrfs.fuse import worker
opened = worker.WorkerOperations._open
async def waiting(self, version, file):
    found = await opened(self, version, file)
    await trio.sleep(0.01 if file.key == "d/7" else 0)
    return found
worker.WorkerOperations._open = waiting
from zarrfs.__main__ import program
program()
"""


def test_a_worker_that_dies_after_it_answers_leaves_its_files_open(source: Path, tmp_path: Path) -> None:
    """Other processes can read even the file of its last reply."""
    mountpoint = tmp_path / "mnt"
    with ending(source, mountpoint, program=(sys.executable, "-c", WAITING)):
        others = workers(mountpoint)
        with stopped(daemon_pid(mountpoint)):
            assert (mountpoint / "d/6").read_bytes() == b"6 " * 1000
            descriptor = os.open(mountpoint / "d/7", os.O_RDONLY)
            until(lambda: all(state(pid) == "S" for pid in others))  # they have replied
            for pid in others:
                os.kill(pid, signal.SIGKILL)
        until(lambda: running(mountpoint) == WORKERS)
        with open(descriptor, "rb") as file:
            assert file.read() == b"7 " * 1000
        assert run("umount", mountpoint).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_first_process_unmounts(number: signal.Signals, source: Path, tmp_path: Path) -> None:
    with ending(source, tmp_path / "mnt"):
        os.kill(daemon_pid(tmp_path / "mnt"), number)


def test_open_files_stay_readable_after_a_lazy_unmount_until_closed(source: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    with ending(source, mountpoint) as pids:
        file = os.open(mountpoint / "d/3", os.O_RDONLY)
        directory = os.open(mountpoint / "d", os.O_RDONLY | os.O_DIRECTORY)
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)
        assert not mount_lines(mountpoint)
        for others in pids[2:], pids[1:2]:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            with stopped(*others):
                assert os.pread(file, 10_000, 0) == b"3 " * 1000
                with os.fdopen(os.open("4", os.O_RDONLY, dir_fd=directory), "rb") as other:
                    assert other.read() == b"4 " * 1000
        os.kill(pids[-1], signal.SIGKILL)  # a dead worker changes nothing
        until(lambda: not alive(pids[-1]))
        assert len(os.listdir(directory)) == 20
        assert all(map(alive, pids[:-1]))
        os.close(directory)
        os.close(file)


@pytest.mark.parametrize("which", [1, 2])
def test_auto_unmount_when_the_first_process_dies_and_not_before(which: int, source: Path, tmp_path: Path) -> None:
    """If `which` is 2, a worker is killed before: it is replaced, and the mount stays."""
    mountpoint = tmp_path / "mnt"
    with ending(source, mountpoint, "auto_unmount") as pids:
        if which == 2:
            os.kill(pids[2], signal.SIGKILL)
            until(lambda: not alive(pids[2]))
            until(lambda: running(mountpoint) == WORKERS)
            assert (mountpoint / "d/5").read_bytes() == b"5 " * 1000
            pids += everyone(mountpoint)
        os.kill(pids[1], signal.SIGKILL)


@pytest.mark.parametrize("end", ["umount", "SIGTERM"])
def test_only_the_first_process_notifies_the_service_manager(end: str, source: Path, tmp_path: Path) -> None:
    mountpoint, place = tmp_path / "mnt", tmp_path / "notify"
    mountpoint.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(place))
        manager.settimeout(60)
        environment = {**os.environ, "NOTIFY_SOCKET": str(place)}
        command = [PROGRAM, "mount", source, mountpoint, "-o", f"foreground,workers={WORKERS}"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as service:
            try:
                assert manager.recv(1000) == b"READY=1"
                pids = everyone(mountpoint)
                assert pids[1] == service.pid
                os.kill(pids[2], signal.SIGKILL)
                pids += everyone(mountpoint)
                if end == "umount":
                    assert run("umount", mountpoint).returncode == 0
                else:
                    service.send_signal(signal.SIGTERM)
                assert service.wait(60) == 0
            finally:
                service.kill()
                subprocess.run(["umount", "-l", mountpoint], capture_output=True, check=False)
        until(lambda: not any(map(alive, pids)))
        manager.setblocking(False)
        said = []
        with contextlib.suppress(BlockingIOError):
            while True:
                said.append(manager.recv(1000).decode())
    assert [line for line in said if not line.startswith("STATUS=")] == ["STOPPING=1"]


@pytest.mark.parametrize("group", [True, False])
def test_ctrl_c_ends_a_mount_in_the_foreground(group: bool, source: Path, tmp_path: Path) -> None:
    """A terminal sends SIGINT to all processes of the group; only the first one reacts to it."""
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    command = [PROGRAM, "mount", source, mountpoint, "-o", f"foreground,workers={WORKERS}"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as service:
        try:
            until(lambda: mount_lines(mountpoint))
            pids = everyone(mountpoint)
            (os.killpg if group else os.kill)(service.pid, signal.SIGINT)
            assert service.stderr is not None
            assert "Traceback" not in service.stderr.read()  # at end of file no worker has it open
            assert service.wait(60) == 0
        finally:
            service.kill()
            subprocess.run(["umount", "-l", mountpoint], capture_output=True, check=False)
    until(lambda: not any(map(alive, pids)))


# -- workers that do not die when they are killed


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a process: like one in uninterruptible sleep (state D), it does not even die of SIGKILL."""
    group = FREEZER / f"zarrfs-test-{pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        until(lambda: (group / "freezer.state").read_text().strip() == "FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


# A zarrfs that gives a worker 5 s instead of a minute to obey, which is enough for healthy workers
HASTY = "from zarrfs.daemon import workers; workers._OBEYING, workers._ENDING = 5.0, 0.5; "
HASTY += "from zarrfs.__main__ import program; program()"


@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="no freezer of cgroup v1")
def test_a_worker_that_cannot_be_killed_does_not_block_a_refresh(tmp_path: Path) -> None:
    (document := tmp_path / "set.json").write_text('{"a": "old"}')
    program = sys.executable, "-c", HASTY
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}", program=program) as mountpoint:
        until(lambda: len(workers(mountpoint)) == WORKERS - 1)
        stuck = workers(mountpoint)[0]
        with frozen(stuck):
            document.write_text('{"a": "new", "b": ""}')
            done = run("refresh", mountpoint)
            assert done.returncode == 0, done.stderr
            assert alive(stuck)
            assert (mountpoint / "a").read_text() == "new"
            assert run("refresh", "--set", "log_level=debug", mountpoint).returncode == 0
            assert "no answer for 5 s" in log_of(mountpoint)
        until(lambda: not alive(stuck))
        until(lambda: running(mountpoint) == WORKERS)
        with stopped(daemon_pid(mountpoint)):
            assert (mountpoint / "a").read_text() == "new"


def test_a_starter_that_cannot_begin_logs_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(_options: Options) -> None:
        raise ImportError("libopenblas.so.0: cannot open shared object file")

    monkeypatch.setattr(daemon_workers, "_import_for_workers", broken)
    log, device = tmp_path / "log", os.open(os.devnull, os.O_RDWR)
    session = daemon_workers.Session(
        Front(), device, None, "/mnt", {"source": "set.json"}, Options(log_file=str(log)), Shared(2), False
    )
    begun = daemon_workers.start(session)
    os.close(device)
    assert os.waitstatus_to_exitcode(os.waitpid(begun.pid, 0)[1]) == 1
    assert "the process that starts workers ends: ImportError('libopenblas.so.0: cannot open" in log.read_text()


def test_a_worker_counts_as_running_before_it_takes_requests() -> None:
    """Otherwise the first process could block in read(2), waiting for a request that the worker has taken."""
    shared, counted = Shared(2), []

    class Starter:
        pid = 0

        def fork(self, _order: object) -> socket.socket:
            counted.append(shared.others_run(0))
            raise OSError("gone")

    session = daemon_workers.Session(Front(), -1, None, "/mnt", {}, Options(), shared, False)
    team = daemon_workers.Team(cast(Any, Starter()), session, cast(Any, None), Options(), 2)
    team._operations = cast(Any, SimpleNamespace(inodes=SimpleNamespace(generation=1)))
    trio.run(team._keep, 1)
    assert (counted, shared.others_run(0)) == ([True], False)
