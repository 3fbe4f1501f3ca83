"""zarrfs doctor finds the problems of a machine, a user's directories and a source, and never hangs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.machine import Machine, without_others
from tests.mounts.mounting import daemon_pid, mount_lines, mounted, until
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
        ("true", "true", "cache", ("-o", "cache_dir=/proc/none")),
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
    found = states(machine, "-o", "cache_dir=/proc", ZARRFS_NO_SUCH_OPTION="1")
    assert (found["cache"], found["configuration"]) == ("problem", "warning")


def test_a_file_is_no_cache_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o755)
    done = run("doctor", "-o", f"cache_dir={tmp_path}/file")
    assert ("problem", "cache") in [one[:2] for one in findings(done)]


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
            begun = time.monotonic()
            text = {text for _, check, text in findings(run("doctor", program=alone(tmp_path))) if check == "mounts"}
            assert time.monotonic() - begun < 60
            died = f"the daemon has died: {dead[0]}, {dead[1]}: zarrfs umount {dead[0]} '{dead[1]}'"
            return died in text and any(one.startswith(f"the daemon does not answer: {stopped}:") for one in text)

        os.kill(pid, signal.SIGSTOP)
        try:
            until(as_expected)  # on a busy machine a dead mount may first be taken for a stopped one
        finally:
            os.kill(pid, signal.SIGCONT)
            ended = run("umount", *dead)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_check_that_fails_is_a_problem() -> None:
    done = run("doctor", program=("unshare", "-m", "sh", "-c", 'mount -t tmpfs x /proc && exec "$@"', "sh", PROGRAM))
    assert done.returncode == 1
    assert [check for state, check, _ in findings(done) if state == "problem"] == ["mounts"]


MUTE = """
import sys, pyfuse3, trio
class Mute(pyfuse3.Operations):
    async def statfs(self, *about):
        await trio.sleep_forever()
    lookup = statfs
pyfuse3.init(Mute(), sys.argv[1], {"fsname=mute", "subtype=zarrfs"})
trio.run(pyfuse3.main)
"""


def test_a_daemon_that_never_answers_does_not_block_doctor(tmp_path: Path) -> None:
    """No signal ends a process that waits for such a daemon, so doctor waits in another process, for up to 10 s.

    The mount is one to check, the directory of blocks, and the home of indexes, as on a dead NFS.
    """
    (mnt := tmp_path / "mnt").mkdir()
    with subprocess.Popen([sys.executable, "-c", MUTE, mnt], stdout=subprocess.DEVNULL) as daemon:
        try:
            until(lambda: mount_lines(mnt))
            doctors = [
                subprocess.Popen(
                    [*alone(tmp_path), "doctor", *words], stdout=subprocess.PIPE, text=True, env=os.environ | more
                )
                for words, more in (([], {}), (["-o", f"cache_dir={mnt}/x"], {}), ([], {"XDG_CACHE_HOME": f"{mnt}"}))
            ]
            told = [doctor.communicate(timeout=60)[0] for doctor in doctors]  # the pipe is closed
        finally:
            daemon.kill()
            subprocess.run(["umount", "-l", mnt], check=True)
    assert re.search(rf"the daemon does not answer: .*{re.escape(str(mnt))}\b", told[0]), told
    for doctor, said in zip(doctors[1:], told[1:], strict=True):
        found = findings(subprocess.CompletedProcess(doctor.args, doctor.returncode, said, ""))
        assert (doctor.returncode, found[-1][0]) == (1, "problem"), said


def test_control_characters_of_an_error_are_escaped_in_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('["a\\u0000\\u001bb"]\n')
    done = run("-d", "doctor", "--config", tmp_path / "x.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"zarrfs: {tmp_path}/x.toml: a\\x00\\x1bb: unknown section\n")
    assert "Traceback" in done.stderr
    assert "\x1b" not in done.stderr
