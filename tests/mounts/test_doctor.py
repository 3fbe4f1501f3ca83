"""zarrfs doctor finds the problems of a machine, a user's directories and a source, and never hangs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.machine import Machine, without_others
from tests.mounts.mounting import daemon_pid, mount_lines, mounted, until
from tests.servers import Faulty
from tests.servers import faulty as faulty

SOURCE = DATA / "zarr/v2_hier"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as made:
        made.user("ann")
        yield made


def findings(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    said = json.loads(done.stdout)
    assert said["ok"] == (done.returncode == 0)
    assert set(said["findings"][0]) == {"check", "state", "fact", "advice"}
    return list(said["findings"])


def states(machine: Machine, *arguments: str, user: str = "ann", **more: str | None) -> dict[str, str]:
    """Run doctor in the machine; return the worst state of each check: "ok", "warning" or "problem"."""
    worst: dict[str, str] = {}
    for one in findings(machine.run("zarrfs", "doctor", "--json", *arguments, user=user, **more)):
        before = worst.get(one["check"], "ok")
        worst[one["check"]] = max(before, one["state"], key=("ok", "warning", "problem").index)
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
            found = findings(run("doctor", "--json", program=alone(tmp_path)))
            assert time.monotonic() - begun < 60
            facts = {one["fact"]: one["advice"] for one in found if one["check"] == "mounts"}
            died = f"the daemon has died: {dead[0]}, {dead[1]}"
            silent = f"the daemon does not answer: {stopped}"
            return facts.get(died) == f"zarrfs umount {dead[0]} '{dead[1]}'" and silent in facts

        os.kill(pid, signal.SIGSTOP)
        try:
            until(as_expected)  # on a busy machine a dead mount may first be taken for a stopped one
        finally:
            os.kill(pid, signal.SIGCONT)
            ended = run("umount", *dead)
        assert (ended.returncode, ended.stderr) == (0, "")


MUTE = """
import sys, pyfuse3, trio
class Mute(pyfuse3.Operations):
    async def statfs(self, ctx):
        print("asked", flush=True)
        await trio.sleep_forever()
pyfuse3.init(Mute(), sys.argv[1], {"fsname=mute", "subtype=zarrfs"})
trio.run(pyfuse3.main)
"""


def test_a_daemon_that_never_answers_a_request_does_not_block_doctor(tmp_path: Path) -> None:
    """No signal ends a process that waits for a request that the daemon has read: doctor waits in another process."""
    (mnt := tmp_path / "mnt").mkdir()
    with subprocess.Popen([sys.executable, "-c", MUTE, mnt], stdout=subprocess.PIPE) as daemon:
        try:
            until(lambda: mount_lines(mnt))
            with subprocess.Popen([*alone(tmp_path), "doctor"], stdout=subprocess.PIPE, text=True) as doctor:
                assert daemon.stdout is not None
                assert daemon.stdout.readline() == b"asked\n"
                try:
                    said, _ = doctor.communicate(timeout=60)  # the process that waits does not keep the pipe open
                finally:
                    daemon.kill()
                assert re.search(rf"the daemon does not answer: .*{re.escape(str(mnt))}\b", said), said
        finally:
            daemon.kill()
            subprocess.run(["umount", "-l", mnt], check=True)


def told(*arguments: object, **env: str) -> tuple[int, str]:
    """Run doctor; return its exit status and its lines about the server, the source and the target."""
    done = run("doctor", *arguments, env={**os.environ, **env})
    lines = [line for line in done.stdout.splitlines() if line.split()[1] in ("server:", "source:", "target:")]
    assert done.stderr == ""
    return done.returncode, "\n".join(lines)


def test_a_readable_source_is_ok_and_a_missing_target_is_a_problem(tmp_path: Path, references: Path) -> None:
    status, text = told(SOURCE)
    assert (status, "zarr" in text, "20 bytes read" in text) == (0, True, True)
    status, text = told(DATA / "archives/flux-list.json", "-o", f"blobs={DATA / 'archives/blobs'}")
    assert (status, "4,096 bytes read" in text) == (0, True)
    (tmp_path / "refs.json").write_text(json.dumps({"a": [f"{tmp_path}/gone", 0, 10]}))
    status, text = told(tmp_path / "refs.json")
    assert (status, "problem  target:" in text, "gone" in text) == (1, True, True)


def test_problems_of_a_server_are_distinguished(faulty: Faulty) -> None:
    """Wrong names, ports and credentials and missing values lead to different findings; none shows a secret."""
    url = faulty.put("/refs.json", b"{}")
    assert told(url)[0] == 0
    for fault, words in ((403, "credentials"), (404, "typing error"), (500, "try again later")):
        signed = faulty.put("/refs.json?sig=s3cret", b"{}", forever=fault)
        status, text = told(signed.replace("://", "://user:s3cret@"))
        assert (status, words in text) == (1, True), text
        assert "s3cret" not in text
    status, text = told("http://127.0.0.1:1/refs.json")
    assert (status, "refused" in text) == (1, True)
    status, text = told("https://no-such-host.invalid/refs.json")
    assert (status, "name of the server is unknown" in text) == (1, True)
    url = faulty.put("/slow.json", b"{}", forever="slow")
    begun = time.monotonic()
    status, text = told(url, "--timeout", "2s")
    faulty.release()
    assert time.monotonic() - begun < 60
    assert (status, "no answer within 2 s" in text) == (1, True)
