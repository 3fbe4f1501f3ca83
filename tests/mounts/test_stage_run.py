"""Tests of `zarrfs run`: it mounts a source for one command, returns the command's status and cleans up."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.staging import Node, eventually, is_mounted, kill, one_line
from tests.mounts.staging import node as node

SOURCE = DATA / "zarr/v2_hier"


def start(*words: str) -> subprocess.Popen[str]:
    """Start `zarrfs run` of a command in the background."""
    return subprocess.Popen(
        [PROGRAM, "run", str(SOURCE), "--", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_command_gets_the_mount_point_and_standard_input(node: Node) -> None:
    script = 'test "$ZARRFS_MOUNT" = "$1" && cat "$1"/gzip/.zarray "$2" && stat -c %a "$(dirname "$1")"; cat; exit 7'
    done = run("run", SOURCE, "--", "sh", "-c", script, "sh", "{}", "{}/.zgroup", input="typed")
    assert done.returncode == 7
    expected = (SOURCE / "gzip/.zarray").read_text() + (SOURCE / ".zgroup").read_text()
    assert done.stdout == f"{expected}700\ntyped"
    assert node.clean()


def test_at_names_the_mount_point(node: Node) -> None:
    at = node.path / "here/data"
    assert run("run", SOURCE, "--at", at, "--", "test", "-f", f"{at}/.zgroup").returncode == 0
    assert not (node.path / "here").exists()
    assert node.clean()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["nosuchcommand"], 127, "no such command"),
        (["/etc/passwd"], 126, "cannot be run"),
        (["sh", "-c", "kill -USR2 $$"], 128 + signal.SIGUSR2, ""),
        (["true"], 0, ""),
    ],
)
def test_the_status_of_the_command_is_returned(words: list[str], status: int, said: str, node: Node) -> None:
    done = run("run", SOURCE, "--", *words)
    assert done.returncode == status
    assert said in (one_line(done.stderr) if said else done.stderr)
    assert node.clean()


def test_the_command_is_not_run_without_its_mount(node: Node) -> None:
    done = run("run", node.path / "nothing.json", "--", "touch", node.path / "ran")
    assert (done.returncode, "no such file" in one_line(done.stderr)) == (125, True)
    assert not (node.path / "ran").exists()
    assert run("run", SOURCE).returncode == 2
    assert node.clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_forwarded_to_the_command(number: signal.Signals, node: Node) -> None:
    code = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(33))\n"
        "print('up', flush=True)\nwhile True: signal.pause()"
    )
    process = start(sys.executable, "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert process.wait(60) == 33
    assert node.clean()


def test_the_command_owns_the_terminal(node: Node) -> None:
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
    assert node.clean()


def test_background_processes_of_the_command_are_waited_for(node: Node) -> None:
    """A process with no file of the mount open counts too: an array reader opens its chunks one by one."""
    done = run("run", SOURCE, "--", "sh", "-c", f"(sleep 1; cat {{}}/.zgroup >{node.path}/late) & exit 5")
    assert (done.returncode, "has left behind" in one_line(done.stderr)) == (5, True)
    assert (node.path / "late").read_bytes() == (SOURCE / ".zgroup").read_bytes()
    assert node.clean()


def test_a_background_process_that_does_not_end_keeps_its_mount(node: Node) -> None:
    go = node.path / "go"
    waits = f"for _ in $(seq 600); do [ -e {go} ] && break; sleep 0.1; done; cat {{}}/.zgroup >{node.path}/late"
    script = f"setsid sh -c '{waits}' >/dev/null 2>&1 &"
    done = run("run", SOURCE, "--wait", "0.3s", "--", "sh", "-c", script)
    assert (done.returncode, "stays mounted" in done.stderr) == (125, True)
    assert len(node.mounts()) == 1
    assert run("unstage", "--stale").returncode == 0
    assert len(node.mounts()) == 1  # the background process still needs it
    go.touch()
    assert eventually(node.clean)
    assert (node.path / "late").read_bytes() == (SOURCE / ".zgroup").read_bytes()


@pytest.mark.parametrize("when", [0.05, 0.15, 0.25, None])
def test_after_sigkill_only_the_mount_of_a_running_command_remains(when: float | None, node: Node) -> None:
    process = start("sh", "-c", 'echo "$$ $ZARRFS_MOUNT"; exec sleep 100')
    if when is not None:
        time.sleep(when)
    else:
        assert process.stdout is not None
        pid, mountpoint = process.stdout.readline().split()
    process.kill()
    process.wait()
    if when is None:
        time.sleep(0.5)
        assert is_mounted(Path(mountpoint))  # the command still runs
        kill(int(pid))
        assert eventually(node.clean)
        return
    for record in node.records():
        for owner, _ in record["owners"][1:]:
            kill(owner)
    time.sleep(0.2)
    assert run("unstage", "--stale").returncode == 0
    assert eventually(node.clean), (node.records(), node.processes())


def test_a_killed_keeper_does_not_change_the_status(node: Node) -> None:
    """The command's status is returned although the command leaves a process for which the keeper would wait."""
    go = node.path / "go"
    script = f"echo; while [ ! -e {go} ]; do sleep 0.1; done; sleep 100 >&- 2>&- & exit 7"
    command = [PROGRAM, "run", SOURCE, "--wait", "0.1s", "--", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        kill(node.records()[0]["keeper"][0])
        go.touch()
        assert process.wait() == 7
    for owner, _ in node.records()[0]["owners"]:
        kill(owner)
    assert run("unstage", "--stale").returncode == 0
    assert eventually(node.clean)


def test_changes_go_to_the_upper_directory(node: Node) -> None:
    upper = node.path / "upper"
    assert run("run", SOURCE, "-o", f"upperdir={upper}", "--", "sh", "-c", "echo new >{}/new").returncode == 0
    assert (upper / "new").read_text() == "new\n"
    assert node.clean()


@pytest.mark.parametrize("left", ["", "sleep 5 & "])
def test_unstaging_the_source_meanwhile_does_not_change_the_status(left: str, node: Node) -> None:
    """Another job of the same user may run `zarrfs unstage --all`, which deletes the record."""
    script = f'{left}"$0" unstage --all && exit 7'
    done = run("run", SOURCE, "--wait", "0.1s", "--", "sh", "-c", script, PROGRAM)
    assert done.returncode == 7, done.stderr
    assert "cannot be written" not in done.stderr
    assert node.clean()
