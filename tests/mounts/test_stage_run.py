"""zarrfs run: a command with a source mounted for it alone, its status, and nothing left."""

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
    """`zarrfs run` of a command, in the background."""
    return subprocess.Popen(
        [PROGRAM, "run", str(SOURCE), "--", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_command_finds_the_mount(node: Node) -> None:
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
def test_the_status_is_the_command_s(words: list[str], status: int, said: str, node: Node) -> None:
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
def test_signals_are_the_command_s(number: signal.Signals, node: Node) -> None:
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


def test_the_terminal_is_the_command_s(node: Node) -> None:
    """Ctrl-C reaches the command once, from the terminal alone; it reads what is typed."""
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
    """Also what does not use the mount at the moment: a reader of an array opens its chunks one by one."""
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
    assert len(node.mounts()) == 1  # it is still needed
    go.touch()
    assert eventually(node.clean)
    assert (node.path / "late").read_bytes() == (SOURCE / ".zgroup").read_bytes()


@pytest.mark.parametrize("when", [0.05, 0.15, 0.25, None])
def test_killed_it_leaves_nothing_but_the_command_s_mount(when: float | None, node: Node) -> None:
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
        assert is_mounted(Path(mountpoint))  # as long as the command runs
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
    """The status stays that of the command, though something is left behind that the keeper was to wait for."""
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


def test_changes_go_to_the_upper(node: Node) -> None:
    upper = node.path / "upper"
    assert run("run", SOURCE, "-o", f"upperdir={upper}", "--", "sh", "-c", "echo new >{}/new").returncode == 0
    assert (upper / "new").read_text() == "new\n"
    assert node.clean()


@pytest.mark.parametrize("left", ["", "sleep 5 & "])
def test_a_source_that_is_unstaged_meanwhile_does_not_change_the_status(left: str, node: Node) -> None:
    """As by `zarrfs unstage --all` of another job of the user: there is no record any more."""
    script = f'{left}"$0" unstage --all && exit 7'
    done = run("run", SOURCE, "--wait", "0.1s", "--", "sh", "-c", script, PROGRAM)
    assert done.returncode == 7, done.stderr
    assert "cannot be written" not in done.stderr
    assert node.clean()
