"""Commands that end while their child compiles: the child ends, too, prints nothing and leaves no temporary file."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import PROGRAM
from tests.mounts.remotevalues import wait_for

ENTRIES = 1_000_000  # to compile them takes ten seconds
LEADER = """import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])"""


@pytest.fixture(autouse=True)
def _records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the records of killed commands in the test's own directory."""
    monkeypatch.setenv("ZARRFS_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a document that takes long to compile."""
    path = tmp_path_factory.mktemp("long") / "long.json"
    entry = '{"path":"f%d","mode":33188,"size":4,"mtime":1,"encoding":"utf-8","data":"text"}'
    path.write_text(f"[{','.join(entry % number for number in range(ENTRIES))}]")
    return path


def scratch(cache: Path) -> list[Path]:
    """Return the files below `cache` that are no finished index: temporary files and locks."""
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".index"]


def of_session(leader: int) -> list[str]:
    """Return the lines of ps for the processes of a session, without zombies."""
    listed = subprocess.run(["ps", "-s", str(leader), "-o", "pid=,stat=,args="], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if " Z" not in line]


def gather(file: IO[bytes], into: list[bytes]) -> threading.Thread:
    """Read a file to its end in a thread; reading a closed terminal raises an error."""

    def read() -> None:
        try:
            while data := os.read(file.fileno(), 4096):
                into.append(data)
        except OSError:
            pass

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def has_child(pid: int) -> bool:
    """Return whether a process has a child."""
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def commands(archive: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Return commands that plan `archive`. Only `extract` compiles in its own process, as the archive is a list."""
    return {
        "ls": ["ls", str(archive)],
        "extract": ["archive", "extract", "-C", str(tmp_path / "made"), str(archive)],
        "copy": ["stage", "--copy", str(archive), str(tmp_path / "made")],
        "mount": ["mount", str(archive), str(tmp_path / "mnt")],
    }


STATUS = {signal.SIGINT: (130,), signal.SIGTERM: (130, -signal.SIGTERM), signal.SIGHUP: (130, -signal.SIGHUP)}


SIGNALS = [
    (signal.SIGINT, "all"), (signal.SIGTERM, "command"), (signal.SIGKILL, "command"), (signal.SIGINT, "command"),
    (signal.SIGTERM, "all"), (signal.SIGHUP, "all"),
]  # fmt: skip
# few cases for `copy` and `mount`: they handle signals as `extract` does, and their child ends as that of `ls` does
CASES = [(name, *case) for name, count in (("ls", 6), ("extract", 6), ("copy", 2), ("mount", 3))
         for case in SIGNALS[:count]]  # fmt: skip


@pytest.mark.parametrize(("name", "number", "whom"), CASES)
def test_a_signal_ends_the_child(name: str, number: signal.Signals, whom: str, archive: Path, tmp_path: Path) -> None:
    """The signal is sent to the process group, as by Ctrl-C, or to the command alone, as by kill(1)."""
    (tmp_path / "mnt").mkdir()
    cache = tmp_path / "cache"
    with subprocess.Popen(
        [PROGRAM, *commands(archive, tmp_path)[name]], env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
    ) as command:  # fmt: skip
        wait_for(lambda: any(len(path.stem) < 64 for path in scratch(cache)))  # an index, not its document's lock
        assert command.poll() is None, "it has ended by itself"
        (os.killpg if whom == "all" else os.kill)(command.pid, number)
        _, said = command.communicate(timeout=60)
    assert said == b""
    assert command.returncode in STATUS.get(number, (-number,))
    wait_for(lambda: not of_session(command.pid))
    if number != signal.SIGKILL:
        assert not (tmp_path / "made").exists()
    if number != signal.SIGKILL or name != "extract":  # else no process is left to remove it
        assert scratch(cache) == []


@pytest.mark.parametrize("name", ["ls", "copy"])
def test_ctrl_c_at_a_terminal_prints_no_traceback(name: str, archive: Path, tmp_path: Path) -> None:
    """This holds however soon after the start of the child Ctrl-C is typed."""
    for delay in (0.0, 0.02, 0.04, 0.06, 0.1, 0.3):
        cache = tmp_path / f"cache{delay}"
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            said: list[bytes] = []
            command = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", LEADER, PROGRAM, *commands(archive, tmp_path)[name]],
                env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdin=theirs, stdout=theirs, stderr=theirs,
                start_new_session=True,
            )  # fmt: skip
            os.close(theirs)
            reading = gather(terminal, said)
            wait_for(lambda command=command: has_child(command.pid))  # type: ignore[misc]
            time.sleep(delay)
            os.write(ours, b"\x03")
            command.wait(60)
            wait_for(lambda command=command: not of_session(command.pid))  # type: ignore[misc]
            reading.join(60)
        assert scratch(cache) == []
        assert b"Traceback" not in b"".join(said), (delay, b"".join(said))


def test_a_time_limit_ends_the_command_and_its_child(archive: Path, tmp_path: Path) -> None:
    cache, report = tmp_path / "cache", tmp_path / "report.json"
    with subprocess.Popen(
        [PROGRAM, "stage", "--copy", "--timeout", "0.5", "--report", report, archive, tmp_path / "made"],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stderr=subprocess.PIPE, start_new_session=True,
    ) as command:  # fmt: skip
        _, said = command.communicate(timeout=60)
    assert said.decode().endswith("made: not done after 0.5 s (--timeout)\n"), said
    assert command.returncode == 124
    assert json.loads(report.read_text())["error"]
    wait_for(lambda: not of_session(command.pid))
    assert scratch(cache) == []
    assert not (tmp_path / "made").exists()
