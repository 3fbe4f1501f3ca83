"""zarrfs doctor finds the problems of a machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.machine import Machine, without_others
from tests.mounts.mounting import daemon_pid, mounted, until
from tests.servers import faulty as faulty

SOURCE = DATA / "zarr/v2_hier"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as made:
        made.user("ann")
        yield made


def findings(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str, str]]:
    """Return (state, check, fact and advice) of each line."""
    found = [(line[:8].strip(), *line[9:].split(": ", 1)) for line in re.sub(r": +", ": ", done.stdout).splitlines()]
    assert any(one[0] == "problem" for one in found) == (done.returncode == 1)
    return found


def states(machine: Machine, *arguments: str, user: str = "ann", **more: str | None) -> dict[str, str]:
    """Run doctor in the machine; return the worst state of each check: "ok", "warning" or "problem"."""
    worst: dict[str, str] = {}
    for state, check, _ in findings(machine.run("zarrfs", "doctor", *arguments, user=user, **more)):
        worst[check] = max(worst.get(check, "ok"), state, key=("ok", "warning", "problem").index)
    return worst


def test_each_problem_of_a_machine_is_found_by_its_check_alone(machine: Machine) -> None:
    """The faults are made one by one. Each prevents a mount, and only its own check reports a problem."""
    fusermount = shutil.which("fusermount3") or "/usr/bin/fusermount3"
    machine.root(f"cp {fusermount} /mnt/plain; chmod 755 /mnt/plain")
    assert "problem" not in states(machine).values()
    for wrong, right, check, options in (
        ("chmod 600 /dev/fuse", "chmod 666 /dev/fuse", "device", ()),
        (f"mount --bind /mnt/plain {fusermount}", f"umount {fusermount}", "user", ()),
        ("true", "true", "fuse.conf", ("-o", "allow_other")),
    ):
        machine.root(wrong)
        try:
            found = states(machine, *options)
        finally:
            machine.root(right)
        assert [name for name, state in found.items() if state == "problem"] == [check], wrong
    machine.root("mkdir /etc/zarrfs; echo 'x = [' > /etc/zarrfs/zarrfs.toml")
    done = machine.run("zarrfs", "doctor", user="ann")
    machine.root("rm -r /etc/zarrfs")
    assert (done.returncode, "/etc/zarrfs/zarrfs.toml" in done.stderr, done.stderr.count("\n")) == (2, True, 1)
    assert states(machine, ZARRFS_NO_SUCH_OPTION="1")["configuration"] == "warning"


def alone(directory: Path) -> tuple[str, ...]:
    """Return the command line of a zarrfs that sees only the mounts below a directory.

    Otherwise busy mounts of other tests would appear in the findings.
    """
    return "unshare", "-m", "sh", "-c", without_others(directory) + 'exec "$@"', "sh", PROGRAM


def test_dead_and_stopped_mounts_are_named(tmp_path: Path) -> None:
    """doctor does not wait long for their daemons."""
    with mounted(SOURCE, tmp_path / "stopped") as stopped:
        dead = [tmp_path / "dead", tmp_path / "dead too"]
        for one in dead:
            one.mkdir()
            assert run("mount", SOURCE, one).returncode == 0
            os.kill(daemon_pid(one), signal.SIGKILL)
        pid = daemon_pid(stopped)

        def as_expected() -> bool:
            text = {text for _, check, text in findings(run("doctor", program=alone(tmp_path))) if check == "mounts"}
            died = f"the daemon has died: {dead[0]}, {dead[1]}: zarrfs umount {dead[0]} '{dead[1]}'"
            return died in text and any(one.startswith(f"the daemon does not answer: {stopped}:") for one in text)

        os.kill(pid, signal.SIGSTOP)
        try:
            until(as_expected)  # on a busy machine a dead mount may first be taken for a stopped one
        finally:
            os.kill(pid, signal.SIGCONT)
            ended = run("umount", *dead)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_home_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    with mounted(SOURCE, tmp_path / "home") as home:
        pid = daemon_pid(home)
        os.kill(pid, signal.SIGSTOP)
        try:
            done = run("doctor", env=os.environ | {"XDG_CONFIG_HOME": str(home)})
        finally:
            os.kill(pid, signal.SIGCONT)
    assert findings(done)[-1][0] == "problem"


def test_a_check_that_fails_is_a_problem() -> None:
    done = run("doctor", program=("unshare", "-m", "sh", "-c", 'mount -t tmpfs x /proc && exec "$@"', "sh", PROGRAM))
    assert done.returncode == 1
    assert [check for state, check, _ in findings(done) if state == "problem"] == ["mounts"]


def test_control_characters_of_an_error_are_escaped_in_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('["a\\u0000\\u001bb"]\n')
    done = run("-d", "doctor", "--config", tmp_path / "x.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"zarrfs: {tmp_path}/x.toml: a\\x00\\x1bb: unknown section\n")
    assert "Traceback" in done.stderr
    assert "\x1b" not in done.stderr
