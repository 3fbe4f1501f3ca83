"""The log of a mount: one line for a failure, few lines for many failures, and no reader that waits for the log."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROGRAM, run, tmpfs
from tests.faultproxy import FaultProxy
from tests.faultproxy import proxy as proxy
from tests.machine import Machine
from tests.mounts.mounting import alive, counters_of, daemon_pid, log_of, mount_lines, mounted
from tests.mounts.remotevalues import cut, document, publish, wait_for
from tests.mounts.test_semantics import error_of
from tests.servers import Nginx
from zarrfs.failures import LINES, PERIOD

JOURNALD = "/lib/systemd/systemd-journald"


def references(path: Path, **refs: Any) -> Path:
    path.write_text(json.dumps({"version": 1, "refs": refs}))
    return path


def missing(tmp_path: Path, number: int) -> Path:
    """Write a set of `number` keys whose target does not exist."""
    refs = {f"k/{name}": [str(tmp_path / "none.bin"), 0, 10] for name in range(number)}
    return references(tmp_path / "refs.json", **refs)


def errors(root: Path) -> dict[str, int]:
    """Return the numbers of failures so far by errno, without zeros."""
    return {name: number for name, number in counters_of(root)["errors"].items() if number}


def read(path: Path) -> int | None:
    return error_of(path.read_bytes)


# -- one line with all facts


def test_a_failure_is_one_line_with_its_facts(nginx: Nginx, proxy: FaultProxy, tmp_path: Path) -> None:
    values = cut(publish(nginx.plain.root, "logged.bin", 100_000), "a", 8000, gap=0)
    url = f"{proxy.url}/logged.bin"
    source = document(tmp_path / "refs.json", {f"{url}?X-Amz-Signature=hunter2": values})
    proxy.faults = {"truncate": 1}
    with mounted(source, tmp_path / "mnt", "log_level=debug,retries=2,prefetch=0B") as root:
        before = counters_of(root)
        assert errors(root) == {}
        assert read(root / values[2].key) == errno.EIO
        assert errors(root)["EIO"] >= 1
        assert before["log_lines_lost_total"] == 0
    found = log_of(root).splitlines()
    [line] = {one.partition(" ERROR: ")[2] for one in found if " ERROR: read a/2: " in one}
    says = r": (the answer was cut off|Response payload is not completed.*) \(3 attempts\) \[EIO\]"
    assert re.fullmatch(rf"read a/2: {re.escape(url)} \[16000, \+8000\]{says}", line)
    attempts = [one for one in found if re.search(r"attempt 1: .*(cut off|not completed).*: to be repeated in ", one)]
    assert url in attempts[0]
    assert "hunter2" not in log_of(root)


# -- many failures, few lines


def test_hundreds_of_failures_stay_few_lines(tmp_path: Path) -> None:
    """Many chunks fail, and one chunk fails many times; the numbers in the log include every failure."""
    began = time.monotonic()
    with mounted(missing(tmp_path, 300), tmp_path / "mnt") as root:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = set(pool.map(lambda number: read(root / f"k/{number}"), range(300)))
            found |= set(pool.map(lambda _: read(root / "k/0"), range(100)))
        assert found == {errno.EIO}
        counted = errors(root)
    lines = [line for line in log_of(root).splitlines() if " ERROR: " in line]
    periods = 1 + (time.monotonic() - began) // PERIOD
    assert len(lines) <= (LINES + 1) * periods
    assert 1 <= sum("read k/0: " in line for line in lines) <= periods
    own = [line for line in lines if " read k/" in line]
    more = [re.search(r": further failures, not logged one by one: ([\d,]+) read EIO$", line) for line in lines]
    assert len(own) + sum(int(one[1].replace(",", "")) for one in more if one) == counted["EIO"] >= 400
    assert more[-1]


# -- logs that block, are full or are moved


def pace(root: Path) -> float:
    """Read 100 different files, which all fail and are logged; return the seconds that the reads took."""
    began = time.monotonic()
    for number in range(100):
        assert read(root / f"k/{number}") == errno.EIO
    return time.monotonic() - began


def test_readers_do_not_wait_for_a_full_log_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    source, point = missing(tmp_path, 100), tmp_path / "mnt"
    point.mkdir()
    done = run("mount", source, point, "-o", f"log_file={pipe}")
    assert done.returncode == 2
    assert done.stderr == f"zarrfs: option log_file={pipe}: no such device or address\n"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # open, but never read
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # full after some lines
    try:
        done = run("mount", source, point, "-o", f"log_file={pipe},log_level=debug")
        assert done.returncode == 0, done.stderr
        pid = daemon_pid(point)
        assert pace(point) < 60
        assert pace(point) < 60
        assert errors(point)["EIO"] >= 200
        began = time.monotonic()
        assert run("umount", point).returncode == 0
        wait_for(lambda: not alive(pid))
        assert time.monotonic() - began < 60
    finally:
        os.close(reader)
        subprocess.run(["umount", "-l", point], capture_output=True, check=False)


def test_lines_lost_to_a_full_disk_are_counted_in_the_log(tmp_path: Path) -> None:
    source = missing(tmp_path, 60)
    with tmpfs(tmp_path / "disk", "size=64k") as disk, contextlib.ExitStack() as stack:
        (disk / "filler").write_bytes(bytes(60 << 10))
        point = tmp_path / "mnt"
        point.mkdir()
        assert run("mount", source, point, "-o", f"log_file={disk / 'log'}").returncode == 0
        stack.callback(subprocess.run, ["umount", "-l", str(point)], capture_output=True, check=False)
        stack.callback(run, "umount", point)
        for number in range(50):
            assert read(point / f"k/{number}") == errno.EIO

        def counted() -> bool:
            log = counters_of(point)
            return log["log_lines_lost_total"] > 0 and not log["log_lines_waiting"]

        wait_for(counted)
        lost = counters_of(point)["log_lines_lost_total"]
        (disk / "filler").unlink()
        assert read(point / "k/55") == errno.EIO
        wait_for(lambda: "are lost" in (disk / "log").read_text())
        wait_for(lambda: "read k/55: " in (disk / "log").read_text())
        warning = r"WARNING: ([\d,]+) lines of the log are lost: they could not be written\n"
        told = re.findall(warning, (disk / "log").read_text())
        assert int(told[0].replace(",", "")) >= lost  # a line of the daemon's own may have been lost since then


def test_a_log_that_is_moved_is_reopened_on_sighup(tmp_path: Path) -> None:
    with mounted(missing(tmp_path, 3), tmp_path / "mnt") as root:
        log = tmp_path / "mnt.log"
        assert read(root / "k/0") == errno.EIO
        wait_for(lambda: "k/0" in log_of(root))
        log.rename(tmp_path / "mnt.log.1")
        os.kill(daemon_pid(root), signal.SIGHUP)
        assert read(root / "k/1") == errno.EIO
        wait_for(lambda: log.exists() and "k/1" in log_of(root))
    assert "k/1" not in (tmp_path / "mnt.log.1").read_text()


# -- where the log goes


def test_lines_for_a_service_manager_have_levels(tmp_path: Path) -> None:
    """stderr is then the journal's stream, which JOURNAL_STREAM names. Any other stderr gets the lines alone."""
    point = tmp_path / "mnt"
    point.mkdir()
    for right in (True, False):
        ours, theirs = socket.socketpair()
        status = os.fstat(theirs.fileno())
        stream = f"{status.st_dev}:{status.st_ino + (not right)}"
        process = subprocess.Popen(
            [PROGRAM, "mount", "-f", missing(tmp_path, 2), point], stderr=theirs,
            env=os.environ | {"JOURNAL_STREAM": stream},
        )  # fmt: skip
        theirs.close()
        try:
            wait_for(lambda: bool(mount_lines(point)))
            assert read(point / "k/0") == errno.EIO
        finally:
            assert run("umount", point).returncode == 0
            assert process.wait(60) == 0
        with ours, ours.makefile() as said:
            lines = said.read().splitlines()
        assert [line.partition("zarrfs[")[0] for line in lines[:2]] == (["<6>", "<3>"] if right else ["", ""])


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Yield a machine with a journal."""
    if not os.path.exists(JOURNALD):
        pytest.skip("no systemd-journald here")
    with Machine() as found:
        # a /dev of its own, as services make sockets there
        found.root(
            "mkdir -p /mnt/dev && cd /dev && cp -a null zero random urandom full fd std* /mnt/dev && cd /"
            " && mknod -m 666 /mnt/dev/fuse c 10 229 && mount --bind /mnt/dev /dev"
        )
        journald = found.start(JOURNALD)
        wait_for(lambda: found.path("/run/systemd/journal/dev-log").exists())
        found.root("ln -s /run/systemd/journal/dev-log /dev/log")
        yield found
        os.killpg(journald.pid, signal.SIGKILL)
        journald.communicate(timeout=60)


def entries(machine: Machine, *matches: str) -> list[dict[str, str]]:
    """Return the journal's entries of zarrfs, in order."""
    machine.root("journalctl --sync", check=False)
    text = machine.root(f"journalctl -o json SYSLOG_IDENTIFIER=zarrfs {' '.join(matches)}")
    return [json.loads(line) for line in text.splitlines()]


def test_a_daemon_logs_to_the_journal_and_again_after_its_restart(machine: Machine) -> None:
    """While the socket is missing, lines are lost; later lines are in the journal again."""
    references(machine.path("/run/j.json"), **{"a/0.0": ["/none.bin", 5, 10], "b": ["/no", 0, 1]})
    machine.root("mkdir /run/j")
    done = machine.run("zarrfs", "mount", "/run/j.json", "/run/j")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Input/output error" in machine.run("cat", "/run/j/a/0.0").stderr
    wait_for(lambda: bool(entries(machine, "PRIORITY=3")))
    one = entries(machine, "PRIORITY=3")[0]
    assert one["MESSAGE"] == "/run/j: ERROR: read a/0.0: /none.bin [5, +10]: no such file or directory [EIO]"
    assert one["SYSLOG_FACILITY"] == "3"
    machine.root("rm /dev/log")
    machine.run("cat", "/run/j/b")
    machine.root("ln -s /run/systemd/journal/dev-log /dev/log")
    assert machine.run("zarrfs", "umount", "/run/j").returncode == 0
    wait_for(lambda: bool(entries(machine, "PRIORITY=6")))  # the line about the unmount
