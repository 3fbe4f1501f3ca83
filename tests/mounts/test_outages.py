"""Outages of a server while a mount is read: its readers are delayed, and get no error."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import run
from tests.faultproxy import FaultProxy, proxy
from tests.mounts.mounting import counters_of, log_of, mounted
from tests.mounts.remotevalues import Outcome, Value, cut, document, publish, read, wait_for
from tests.mounts.test_hard_endings import AT_ONCE, ended
from tests.servers import Nginx, free_port
from tests.servers import nginx as nginx

__all__ = ["proxy"]

AWAY = 2.0  # seconds
ALONE = "prefetch=0B"
BEGINS = r".*WARNING: (\S+) is out: (.+): its requests wait, and one at a time tries again"
ENDS = r".*WARNING: (\S+) answers again: it was out for ([\d.]+) s"


def warnings(root: Path) -> list[str]:
    return [line for line in log_of(root).splitlines() if " WARNING: " in line or " ERROR: " in line]


@contextlib.contextmanager
def reading(root: Path, values: Sequence[Value], threads: int) -> Iterator[Outcome]:
    """Read values in `threads` threads, each one value at a time, until the block ends; yield the outcome."""
    outcome, done = Outcome(), threading.Event()

    def go_on(number: int) -> None:
        at = number
        while not done.is_set():
            value = values[at % len(values)]
            read(root, value, 0, len(value), outcome)
            at += threads
            time.sleep(0.03)  # all values together last for ten seconds, also if the server stops slowly

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        going = [pool.submit(go_on, number) for number in range(threads)]
        try:
            yield outcome
        finally:
            done.set()
        for one in going:
            one.result()


def outage(root: Path, name: str) -> dict[str, Any]:
    """Return the counters of a server's current outage; empty if it has none."""
    return dict(counters_of(root)["outages"].get(name, {}))


def test_readers_wait_while_a_server_is_stopped(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    """No read fails, the log has two lines, few requests are tried; `stats` reports the outage."""
    # the pages of read values stay in the page cache, and a busy machine takes seconds to stop the server
    values, threads = cut(publish(nginx.plain.root, "stopped.bin", 5000 << 13), "v", 8 << 10), 16
    source, name = document(tmp_path / "set.json", {f"{proxy.url}/stopped.bin": values}), proxy.url.split("/")[2]
    with mounted(source, tmp_path / "mnt", f"{ALONE},memory_limit=1MiB") as root:
        with reading(root, values, threads) as outcome:
            wait_for(lambda: outcome.right > 50)
            stopped = time.monotonic()
            proxy.stop()
            at_stop = counters_of(root)["requests_total"]
            wait_for(lambda: outage(root, name).get("waiting") == threads)
            time.sleep(AWAY)
            out = outage(root, name)
            assert out["waiting"] == threads
            assert AWAY - 0.1 <= out["seconds"] <= time.monotonic() - stopped + 5  # it begins with a failed request
            says = rf"^outage +\d+ s  {name}: out since [\d:]+, {threads} waiting: "
            assert re.search(says, run("stats", root).stdout, re.MULTILINE)
            attempts = counters_of(root)["requests_total"] - at_stop
            # requests in flight, each sent again if its connection was a kept one, and probes
            assert attempts <= 2 * threads + 8 + (time.monotonic() - stopped) / 3
            right = outcome.right
            proxy.start()
            wait_for(lambda: outcome.right > right + 50)
        assert outcome.failed == {}
        wait_for(lambda: len(warnings(root)) > 1)
        first, last = warnings(root)
        began, ended = re.fullmatch(BEGINS, first), re.fullmatch(ENDS, last)
        assert began is not None, first
        assert ended is not None, last
        assert began[1] == ended[1] == name
        assert AWAY - 0.1 <= float(ended[2]) <= time.monotonic() - stopped + 5
        assert not outage(root, name)


# -- kills, timeouts and other kinds of source


def test_a_reader_that_waits_for_a_server_can_be_killed_immediately(tmp_path: Path) -> None:
    name = f"127.0.0.1:{free_port()}"
    [value] = cut(bytes(8 << 10), "v", 8 << 10)
    source = document(tmp_path / "refs.json", {f"http://{name}/f": [value]})
    with mounted(source, tmp_path / "mnt", ALONE) as root:
        command, waits = ["cat", root / value.key], lambda: bool(outage(root, name).get("waiting"))
        status, seconds = ended(command, signal.SIGKILL, waits)
        assert (status, seconds < AT_ONCE) == (-signal.SIGKILL, True), seconds
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


def test_mounting_a_document_fails_soon_if_its_server_is_down(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    name = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    done = run("mount", f"http://{name}/set.json", tmp_path / "mnt")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert name in done.stderr
    assert time.monotonic() - began < 60
