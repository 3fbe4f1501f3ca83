"""Outages of a server while a mount is read: its readers are delayed, and get no error."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import run
from tests.faultproxy import proxy
from tests.mounts.mounting import counters_of, log_of, mounted
from tests.mounts.remotevalues import Outcome, Value, cut, document, publish, read_all, wait_for, whole
from tests.mounts.test_hard_endings import AT_ONCE, ended
from tests.servers import Faulty, free_port, nginx_at
from tests.servers import faulty as faulty
from tests.servers import nginx as nginx

__all__ = ["proxy"]

AWAY = float(os.environ.get("ZARRFS_OUTAGE", "2.5"))  # seconds; longer in a soak test
ALONE = "prefetch=0B"
BEGINS = r".*WARNING: (\S+) is out: (.+): its requests wait, and one at a time tries again"
ENDS = r".*WARNING: (\S+) answers again: it was out for ([\d.]+) s, and ([\d,]+) requests? waited for it"


def warnings(root: Path) -> list[str]:
    return [line for line in log_of(root).splitlines() if " WARNING: " in line or " ERROR: " in line]


class Logged(NamedTuple):
    """An outage that has ended, as logged."""

    server: str
    reason: str
    waited: int  # number of requests
    seconds: float

    def took(self, least: float, most: float) -> bool:
        """Return whether the outage took between `least` and `most` seconds; the log rounds to tenths."""
        return least - 0.05 <= self.seconds <= most + 0.05


def logged(root: Path) -> list[Logged]:
    """Return the outages in the log. Fail if a warning or error is not one of the two lines of an outage."""
    lines, found = warnings(root), []
    for first, last in zip(lines[::2], lines[1::2], strict=False):
        begins, ends = re.fullmatch(BEGINS, first), re.fullmatch(ENDS, last)
        assert begins is not None, first
        assert ends is not None, last
        assert begins[1] == ends[1]
        found.append(Logged(begins[1], begins[2], int(ends[3]), float(ends[2])))
    return found


def check_log(root: Path, server: str, least: float, most: float) -> tuple[str, int]:
    """Check that the log has exactly one outage, of `server`; return (reason, number of requests that waited)."""
    wait_for(lambda: len(warnings(root)) > 1)
    assert len(warnings(root)) == 2
    [one] = logged(root)
    assert one.server == server
    assert one.took(least, most), one
    return one.reason, one.waited


def values_at(root: Path, url: str, name: str) -> tuple[Path, list[Value]]:
    """Publish 5,000 values of 8 KiB each; return (a reference set of them, the values).

    Read values are in the page cache, and need no server. A loaded machine may take seconds to stop the server.
    """
    values = cut(publish(root, name, 5000 << 13), "v", 8 << 10)
    return document(root.parent / f"{name}.json", {f"{url}/{name}": values}), values


@contextlib.contextmanager
def reading(root: Path, values: Sequence[Value], threads: int) -> Iterator[Outcome]:
    """Read values in `threads` threads, each one value at a time, until the block ends; yield the outcome."""
    outcome, done = Outcome(), threading.Event()

    def go_on(number: int) -> None:
        at = number
        while not done.is_set():
            for code, count in (one := read_all(root, whole([values[at % len(values)]]), 1)).failed.items():
                for _ in range(count):
                    outcome.count(code)
            for _ in range(one.right):
                outcome.count(None)
            at += threads
            time.sleep(0.005)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        going = [pool.submit(go_on, number) for number in range(threads)]
        try:
            yield outcome
        finally:
            done.set()
        for one in going:
            one.result()


class Clock:
    """A stopwatch that starts when it is made. Measured limits include the delays of a loaded machine."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


def outage(root: Path, name: str) -> dict[str, Any]:
    """Return the counters of a server's current outage; empty if it has none."""
    return dict(counters_of(root)["outages"].get(name, {}))


def all_wait(root: Path, name: str, threads: int) -> Clock:
    """Wait until all readers wait for the server; return a clock started at that moment."""
    wait_for(lambda: outage(root, name).get("waiting") == threads)
    return Clock()


# -- servers that do not answer for a while


def test_readers_wait_while_nginx_is_stopped(tmp_path: Path) -> None:
    """No read fails, the log has two lines, few requests are tried; `stats` reports the outage."""
    threads = 16
    (tmp_path / "www").mkdir()
    (tmp_path / "nginx").mkdir()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(restartable(tmp_path))
        source, values = values_at(server.web.root, server.web.url, "stopped.bin")
        root = stack.enter_context(mounted(source, tmp_path / "mnt", f"{ALONE},memory_limit=1MiB"))
        name = server.web.url.removeprefix("http://")
        with reading(root, values, threads) as outcome:
            wait_for(lambda: outcome.right > 50)
            stopped = Clock()
            server.stop()
            at_stop = counters_of(root)["requests_total"]
            waiting = all_wait(root, name, threads)
            time.sleep(AWAY / 2)
            least, out = waiting.seconds, outage(root, name)
            assert out["waiting"] == threads
            assert least <= out["seconds"] <= stopped.seconds
            assert re.search(
                rf"^outage +\d+ s  {name}: out since [\d:]+, {threads} waiting: Connection refused$",
                run("stats", root).stdout, re.MULTILINE,
            )  # fmt: skip
            metrics = run("stats", "--prometheus", root).stdout
            assert re.search(r"^zarrfs_host_outage_seconds\{.*\} \d", metrics, re.MULTILINE)
            time.sleep(AWAY / 2)
            attempts = counters_of(root)["requests_total"] - at_stop
            assert attempts <= threads + 8 + stopped.seconds / 3  # requests in flight, and probes
            least, right = waiting.seconds, outcome.right
            server.start()
            wait_for(lambda: outcome.right > right + 50)
        assert outcome.failed == {}
        reason, waited = check_log(root, name, least, stopped.seconds)
        assert reason == "Connection refused"
        assert waited == threads
        assert not outage(root, name)


class Restartable:
    """An nginx server that can be stopped, and started again on the same ports."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        made = stack.enter_context(nginx_at(directory / "nginx", directory / "www"))
        self.web = made.plain
        self._directory, self._stack = directory / "nginx", stack
        pid = directory / "nginx/pid"
        wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"))  # nginx listens before it writes its pid
        self._pid = int(pid.read_text())

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        port = int(self.web.url.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()

    def start(self) -> None:
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        config = self._directory / "nginx.conf"
        process = subprocess.Popen(["nginx", "-c", str(config)], env={**os.environ, "PATH": path})
        self._pid = process.pid
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)


@contextlib.contextmanager
def restartable(directory: Path) -> Iterator[Restartable]:
    with contextlib.ExitStack() as stack:
        yield Restartable(directory, stack)


# -- kills, timeouts and other kinds of source


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_reader_that_waits_for_a_server_can_be_killed_immediately(number: signal.Signals, tmp_path: Path) -> None:
    name = f"127.0.0.1:{free_port()}"
    [value] = cut(bytes(8 << 10), "v", 8 << 10)
    source = document(tmp_path / "refs.json", {f"http://{name}/f": [value]})
    with mounted(source, tmp_path / "mnt", ALONE) as root:
        status, seconds = ended(["cat", root / value.key], number, lambda: bool(outage(root, name).get("waiting")))
        assert (status, seconds < AT_ONCE) == (-number, True), seconds
        assert "ERROR" not in log_of(root)


READERS = """
import os, sys, threading
def read(number):
    file = os.open(f"{sys.argv[1]}/v{number}", os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(file, 4096, 0)
for number in range(300):
    threading.Thread(target=read, args=[number], daemon=True).start()
print("started", flush=True)
threading.Event().wait()
"""


def test_many_reads_that_wait_for_a_server_do_not_block_other_requests(tmp_path: Path) -> None:
    """If each of them occupied a task of the session loop, no task would be left to read other requests."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        refs: dict[str, Any] = {f"v{number}": [f"{url}/{number}", 0, 4096] for number in range(300)}
        (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs | {"local": "here"}}))
        # a killed reader whose page the kernel reads synchronously waits until read_timeout=
        options = "memory_limit=1GiB,read_timeout=60s,prefetch=0B"
        with mounted(tmp_path / "refs.json", tmp_path / "mnt", options) as root:
            readers = subprocess.Popen([sys.executable, "-c", READERS, root], stdout=subprocess.PIPE)
            try:
                assert readers.stdout is not None
                assert readers.stdout.readline() == b"started\n"
                began = time.monotonic()
                wait_for(lambda: counters_of(root)["opens_total"] >= 300)
                assert (root / "local").read_text() == "here"
                assert time.monotonic() - began < 35
            finally:
                readers.kill()
                readers.wait()


@pytest.mark.parametrize(("how", "patience"), [("refused", 3), ("silent", 5)])
def test_a_read_fails_after_read_timeout_and_logs_why(how: str, patience: int, faulty: Faulty, tmp_path: Path) -> None:
    """One line names the server, the reason and the duration of the outage, which begins before the read fails."""
    [value] = cut(bytes(8 << 10), "v", 8 << 10)
    url = f"http://127.0.0.1:{free_port()}/f" if how == "refused" else faulty.put("/f", bytes(10), forever="slow")
    source = document(tmp_path / "refs.json", {url: [value]})
    name = url.split("/")[2]
    with mounted(source, tmp_path / "mnt", f"{ALONE},read_timeout={patience}s") as root:
        began = Clock()
        descriptor = os.open(root / value.key, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        with pytest.raises(OSError, match="Input/output") as caught:
            os.pread(descriptor, 10, 0)
        os.close(descriptor)
        assert caught.value.errno == errno.EIO
        # the kernel requests a page twice; a second wait would log a line too
        assert patience - 0.1 <= began.seconds <= 60
        reason = "Connection refused" if how == "refused" else "no answer within 1 s"
        [line] = [line for line in warnings(root) if " ERROR: " in line]
        says = rf"not read within {patience} s \(-o read_timeout=\): {name} has been out for ([\d.]+) s: {reason} "
        says += r"\[EIO\]"
        found = re.search(says, line)
        assert found is not None, line
        assert 0 < float(found[1]) <= began.seconds + 0.05, line  # the outage begins with the first failure
    faulty.release()


def test_mounting_a_document_fails_soon_if_its_server_is_down(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    name = f"127.0.0.1:{free_port()}"
    began = Clock()
    done = run("mount", f"http://{name}/set.json", tmp_path / "mnt")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert name in done.stderr
    assert began.seconds < 60
