"""A reader in a loop over the end of a daemon and restarts: it sees right bytes and errors, never absence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import LIST_AND_READ, alive, daemon_pid, mount_lines, until
from tests.mounts.test_units import command

VALUE = b"the value"
# A program that reads and lists until its standard input ends, and prints what it saw whenever that is something new
READER = """
import collections, errno, json, os, select, sys
seen, said = collections.Counter(), 0
root, *pause = sys.argv[1:]
while not select.select([0], [], [], float(pause[0]))[0]:"""
READER += LIST_AND_READ + """
    if len(seen) > said:
        said = len(seen)
        print(json.dumps(seen), flush=True)
"""
# Root without the capabilities to bypass permissions
PLAIN = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


class Reader:
    """The program while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self.seen = process, set[str]()

    def sees(self, what: str) -> None:
        """Wait until it has seen `what`."""
        assert self._process.stdout is not None
        while what not in self.seen:
            self.seen = {*json.loads(self._process.stdout.readline())}

    def end(self) -> set[str]:
        """End it; return all that it has seen."""
        lines = self._process.communicate("\n", timeout=60)[0].splitlines()
        return {*json.loads(lines[-1])} if lines else self.seen


@contextlib.contextmanager
def reading(root: Path, pause: float = 0.001) -> Iterator[Reader]:
    """Run the program. Without pauses it takes a processor."""
    command = [*PLAIN, sys.executable, "-c", READER, str(root), str(pause)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        reader = Reader(process)
        reader.sees("right")
        yield reader
    finally:
        process.kill()
        process.wait()


def background(source: Path, root: Path) -> bool:
    return run("mount", source, root).returncode == 0


def helper(source: Path, root: Path) -> bool:
    words = [os.path.join(os.path.dirname(PROGRAM), "mount.zarrfs"), str(source), str(root), "-o", "rw"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def service(source: Path, root: Path) -> bool:
    """Start the system's unit, as systemd does."""
    variables = {"SOURCE": str(source), "MOUNTPOINT": str(root), "OPTIONS": "ro"}
    subprocess.run(command("zarrfs@.service", "ExecStartPre", variables), check=False, capture_output=True)
    words = command("zarrfs@.service", "ExecStart", variables)
    daemon = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert daemon.stderr is not None
    return any("mounted on" in line for line in daemon.stderr)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "set.json"
    path.write_text(json.dumps({"version": 1, "refs": {"a/0.0": VALUE.decode()}}))
    return path


def kill_daemon(root: Path) -> None:
    pid = daemon_pid(root)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


@pytest.mark.skipif(os.geteuid() != 0, reason="fusermount3 does not mount over a dead mount")
@pytest.mark.parametrize("start", [service, helper])
def test_a_reader_sees_right_bytes_or_errors_over_restarts(
    start: Callable[[Path, Path], bool], source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "mnt"
    root.mkdir()
    assert start(source, root)
    with reading(root) as reader:
        for _ in range(2 if start is helper else 1):  # one dead mount stays under the new one, never two
            time.sleep(0.2)
            kill_daemon(root)
            reader.sees("ENOTCONN")
            source.rename(tmp_path / "away")
            for _ in range(2):
                assert not start(source, root)
            (tmp_path / "away").rename(source)
            assert start(source, root)
            assert (root / "a/0.0").read_bytes() == VALUE
        time.sleep(0.2)
        found = reader.end()
    assert found <= {"right", "ENOTCONN", "ECONNABORTED", "EIO"}, found
    assert len(mount_lines(root)) <= 2
    assert run("umount", root).returncode == 0
    assert not mount_lines(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="fusermount3 does not mount over a dead mount")
@pytest.mark.parametrize(
    ("program", "arguments"),
    [("broken_start.py", ["_main"]), ("interrupted_mount.py", ["SIGINT", "pid", "zarrfs", "mount"])],
)
def test_a_dead_mount_stays_if_the_next_daemon_fails_after_it_has_mounted(
    program: str, arguments: list[str], source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "mnt"
    root.mkdir()
    assert background(source, root)
    kill_daemon(root)
    words = [sys.executable, Path(__file__).with_name(program), *arguments, source, root]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode, done.stderr
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.listdir(root)
    assert len(mount_lines(root)) == 1
    assert run("umount", root).returncode == 0
    assert not mount_lines(root)


@pytest.mark.parametrize("options", ["guard", "hold,foreground"])
def test_a_mount_that_fails_is_guarded_too(options: str, tmp_path: Path) -> None:
    root = tmp_path / "mnt"
    root.mkdir()
    assert run("mount", tmp_path / "missing.json", root, "-o", options).returncode == 1
    assert root.stat().st_mode & 0o777 == 0
    words = [*PLAIN, "ls", str(root)]
    assert os.strerror(errno.EACCES) in subprocess.run(words, capture_output=True, text=True, check=False).stderr
    shutil.rmtree(root)


FAILING = """
import sys, trio
from zarrfs.config.options import parse
from zarrfs.daemon import serve, session

async def fail(*_):
    await trio.sleep(1)
    raise RuntimeError("a fault of the test")

serve.log_suppressed = fail
session.mount(*sys.argv[1:], parse(["foreground"]))
"""


def test_a_daemon_in_the_foreground_that_fails_leaves_an_error(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "mnt"
    root.mkdir()
    done = subprocess.run([sys.executable, "-c", FAILING, source, root], capture_output=True, text=True, check=False)
    assert "a fault of the test" in done.stderr
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.listdir(root)
    assert run("umount", root).returncode == 0
    assert not mount_lines(root)
