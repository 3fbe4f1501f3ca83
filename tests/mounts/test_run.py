"""Tests of `zarrfs run`: it mounts a source for one command, returns the command's status and cleans up."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.mounting import alive, daemon_pid, until

SOURCE = DATA / "zarr/v2_hier"


class Place:
    """A directory for temporary files, and a check that nothing is left in it."""

    def __init__(self, path: Path) -> None:
        self.path, self.local = path, path / "local"
        self.local.mkdir()

    def mounts(self) -> list[str]:
        """Return the mount points of zarrfs below the directory."""
        with open("/proc/self/mountinfo") as file:
            points = [line.split(" ")[4] for line in file if " - fuse.zarrfs " in line]
        return [point for point in points if point.startswith(f"{self.local}/")]

    def processes(self) -> list[str]:
        """Return the processes that have the directory in their environment, except this one."""
        word, found = f"TMPDIR={self.local}\0".encode(), []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(pid) != os.getpid() and word in Path(f"/proc/{pid}/environ").read_bytes() and alive(int(pid)):
                    found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        return [line for line in found if "forkserver.serve" not in line]  # of the tests themselves

    def idle(self) -> bool:
        """Return whether no mount or process is left."""
        return not (self.mounts() or self.processes())

    def clean(self) -> bool:
        """Return whether no mount, file or process is left."""
        return self.idle() and not os.listdir(self.local)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(tmp_path)
    monkeypatch.setenv("TMPDIR", str(made.local))
    yield made
    for point in made.mounts():
        subprocess.run(["umount", "-l", point], check=False)


def start(*words: str) -> subprocess.Popen[str]:
    """Start `zarrfs run` of a command in the background."""
    return subprocess.Popen(
        [PROGRAM, "run", str(SOURCE), "--", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def one_line(text: str) -> str:
    """Assert that `text` is one line, and return it."""
    assert text.count("\n") == 1, text
    return text


def test_the_command_gets_the_mount_point_and_standard_input(place: Place) -> None:
    script = 'test "$ZARRFS_MOUNT" = "$1" && cat "$1"/gzip/.zarray "$2" && stat -c %a "$(dirname "$1")"; cat; exit 7'
    done = run("run", SOURCE, "--", "sh", "-c", script, "sh", "{}", "{}/.zgroup", input="typed")
    assert done.returncode == 7
    expected = (SOURCE / "gzip/.zarray").read_text() + (SOURCE / ".zgroup").read_text()
    assert done.stdout == f"{expected}700\ntyped"
    until(place.clean)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["nosuchcommand"], 127, "no such command"),
        (["/etc/passwd"], 126, "cannot be run"),
        (["sh", "-c", "kill -USR2 $$"], 128 + signal.SIGUSR2, ""),
        (["true"], 0, ""),
    ],
)
def test_the_status_of_the_command_is_returned(words: list[str], status: int, said: str, place: Place) -> None:
    done = run("run", SOURCE, "--", *words)
    assert done.returncode == status
    assert said in (one_line(done.stderr) if said else done.stderr)
    until(place.clean)


def test_the_command_is_not_run_without_its_mount(place: Place) -> None:
    done = run("run", place.path / "nothing.json", "--", "touch", place.path / "ran")
    assert (done.returncode, "no such file" in one_line(done.stderr)) == (125, True)
    assert not (place.path / "ran").exists()
    assert run("run", SOURCE).returncode == 2
    until(place.clean)


def test_signals_are_forwarded_to_the_command(place: Place) -> None:
    code = (
        "import signal, sys\n"
        f"signal.signal({int(signal.SIGHUP)}, lambda *_: sys.exit(33))\n"
        "print('up', flush=True)\nwhile True: signal.pause()"
    )
    process = start(sys.executable, "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 33
    until(place.clean)


def test_the_command_owns_the_terminal(place: Place) -> None:
    """The command reads typed input, and gets Ctrl-C once: from the terminal, not also from zarrfs."""
    code = (
        "import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, {2})\nprint('up', input(), flush=True)\n"
        "kernel, none = signal.sigwaitinfo({2}).si_code > 0, signal.sigtimedwait({2}, 1) is None\n"
        "sys.exit(40 + kernel + 2 * none)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(PROGRAM, [PROGRAM, "run", str(SOURCE), "--", sys.executable, "-c", code])
    os.write(terminal, b"typed\n")
    seen = b""
    while b"up typed" not in seen:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 43
    os.close(terminal)
    until(place.clean)


def test_background_processes_of_the_command_are_waited_for(place: Place) -> None:
    """A process with no file of the mount open counts too: an array reader opens its chunks one by one."""
    done = run("run", SOURCE, "--", "sh", "-c", f"(sleep 1; cat {{}}/.zgroup >{place.path}/late) & exit 5")
    assert (done.returncode, "has left behind" in one_line(done.stderr)) == (5, True)
    assert (place.path / "late").read_bytes() == (SOURCE / ".zgroup").read_bytes()
    until(place.clean)


def test_processes_left_behind_get_signals(place: Place) -> None:
    """A process in a session of its own does not get the signals of the terminal."""
    process = start("sh", "-c", "setsid sleep 100 & exit 5")
    assert process.stderr is not None
    assert "left behind" in process.stderr.readline()
    process.terminate()
    assert process.wait(60) == 5
    until(place.clean)


def test_another_user_of_the_mount_is_named_and_keeps_it(place: Place) -> None:
    process = start("sh", "-c", 'echo "$ZARRFS_MOUNT"; read _ <"$0"; exit 7', str(place.path / "fifo"))
    os.mkfifo(place.path / "fifo")
    assert process.stdout is not None
    mountpoint = process.stdout.readline().strip()
    with subprocess.Popen(["sleep", "100"], cwd=mountpoint) as user:
        (place.path / "fifo").write_text("go\n")
        assert process.wait(60) == 7
        assert process.stderr is not None
        assert f"pid {user.pid} (sleep)" in process.stderr.readline()
        assert (Path(mountpoint) / ".zgroup").read_bytes() == (SOURCE / ".zgroup").read_bytes()
        user.kill()
    until(place.clean)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_signal_at_any_moment_leaves_nothing(number: int, place: Place) -> None:
    for when in (0.05, 0.15, 0.3):
        process = start("sleep", "0.5")
        time.sleep(when)
        process.send_signal(number)
        process.wait()
        until(place.idle if number == signal.SIGKILL else place.clean)  # an empty directory is left before the mount


def test_after_sigkill_the_command_keeps_its_mount(place: Place) -> None:
    process = start("sh", "-c", 'echo "$$ $ZARRFS_MOUNT"; exec sleep 100')
    assert process.stdout is not None
    pid, mountpoint = process.stdout.readline().split()
    process.kill()
    process.wait()
    time.sleep(1.5)
    assert (Path(mountpoint) / ".zgroup").read_bytes() == (SOURCE / ".zgroup").read_bytes()
    os.kill(int(pid), signal.SIGKILL)
    until(place.clean)


def test_a_killed_daemon_gives_the_command_errors_and_leaves_nothing(place: Place) -> None:
    go = place.path / "go"
    os.mkfifo(go)
    process = start("sh", "-c", f'echo "$ZARRFS_MOUNT"; read _ <{go}; cat {{}}/.zgroup')
    assert process.stdout is not None
    assert process.stderr is not None
    mountpoint = process.stdout.readline().strip()
    pid = daemon_pid(Path(mountpoint))
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    go.write_text("go\n")
    assert process.wait(60) == 1
    assert "not connected" in process.stderr.read()
    until(place.clean)


def test_the_log_goes_to_standard_error(place: Place) -> None:
    (place.path / "set.json").write_text('{"version": 1, "refs": {"a": ["/none.bin", 0, 1]}}')
    done = run("run", place.path / "set.json", "--", "cat", "{}/a")
    assert done.returncode == 1
    assert "read a: /none.bin [0, +1]: no such file or directory [EIO]" in done.stderr
    until(place.clean)


def test_changes_go_to_the_upper_directory(place: Place) -> None:
    upper = place.path / "upper"
    upper.mkdir()
    assert run("run", SOURCE, "-o", f"upperdir={upper}", "--", "sh", "-c", "echo new >{}/new").returncode == 0
    assert (upper / "new").read_text() == "new\n"
    until(place.clean)
