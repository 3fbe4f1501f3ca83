"""Mounts of jobs on a real Slurm with two nodes, with the scripts of docs/examples and those of docs/clusters.md.

A reader in a loop sees right bytes, ENOTCONN, EIO or EACCES, and never ENOENT, an empty directory or another set's
data. Jobs run as the user nobody. With proctrack/cgroup the end of a step kills its daemons; that needs a tree of
cgroups v1, with a freezer, that this machine lets us use.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import PROGRAM
from tests.mounts.mounting import LIST_AND_READ
from tests.pages import blocks
from tests.slurm.cluster import (
    FREEZER,
    NODES,
    PATH,
    ROOT,
    Cluster,
    cluster,
    command_of,
    is_zarrfs,
    unavailable,
    wait_for,
)

REASON = unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}"),
    pytest.mark.timeout(600),  # a cluster starts, and jobs of half a minute run
]
# reader.py MOUNT OUT STOP: read and list until STOP exists, and keep in OUT how often it saw what. It ignores SIGTERM.
READER = """
import collections, errno, json, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
root, out, stop = sys.argv[1:4]
seen, file = collections.Counter(), os.open(out, os.O_CREAT | os.O_WRONLY, 0o644)
while not os.path.exists(stop):"""
READER += LIST_AND_READ + """
    os.pwrite(file, json.dumps(seen).encode() + b"\\n", 0)
"""
(STEP,) = (block for block in blocks((ROOT / "docs/clusters.md").read_text()) if "SLURM_LOCALID" in block)


@pytest.fixture(scope="module", params=["cgroup", "linuxproc"])
def started(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "cgroup" and not os.access(FREEZER, os.W_OK):
        pytest.skip("no tree of cgroups v1 with a freezer")
    with cluster(request.param) as made:
        for name, value in (("set", "the value"), ("other", "another value")):
            (made.home / f"{name}.json").write_text(json.dumps({"version": 1, "refs": {"a/0.0": value}}))
        (made.home / "reader.py").write_text(READER)
        yield made


@pytest.fixture
def slurm(started: Cluster) -> Iterator[Cluster]:
    """Return the cluster; wait afterwards until nothing is left and all nodes are idle."""
    for path in started.home.glob("*.out"):
        path.unlink()
    for name in ("stop", "stop-short"):
        (started.home / name).unlink(missing_ok=True)
    yield started
    for name in ("stop", "stop-short"):  # a failed test leaves readers
        (started.home / name).touch()
    started.wait_for_nothing_left()
    wait_for(lambda: started.states() == {"idle"}, "idle nodes", started.states)


def step(slurm: Cluster, model: str, source: str = "set", options: str = "--overlap") -> str:
    """Return the srun of docs/clusters.md with another source, and a command for `model "$MOUNT"`."""
    _shebang, _sbatch, _export, command = STEP.split("\n", 3)
    command = command.replace("exec ./model", model).replace("srun -K", f"srun -K -Q {options}")
    return f"(export SOURCE={slurm.home}/{source}.json; {command.strip()})"


def reader(name: str, stop: str = "stop") -> str:
    """Return the command of a reader that ends when the file `stop` exists."""
    return f'exec {sys.executable} reader.py "$MOUNT" {name}.$SLURM_PROCID.out {stop}'


def batch(slurm: Cluster, script: str, *options: str) -> str:
    """Submit a script; return the job's number."""
    path = slurm.home / "script"
    path.write_text(f"#!/bin/sh\n{script}\n")
    more = [f"--output={slurm.home}/job.out", f"--chdir={slurm.home}", *options]
    done = slurm.user("sbatch", "--parsable", *more, path, PATH=f"{os.path.dirname(PROGRAM)}:{PATH}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def ended(slurm: Cluster, job: str) -> str:
    """Wait for a job to end, and return its output; sbatch --wait polls only every ten seconds."""
    wait_for(lambda: not slurm.jobs("PD,CF,R,CG", "-j", job), "the end of the job")
    return (slurm.home / "job.out").read_text()


def seen(slurm: Cluster, name: str) -> dict[str, int]:
    """Return what a reader has seen until now."""
    with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
        return dict(json.loads((slurm.home / f"{name}.out").read_text().splitlines()[0]))
    return {}


def test_the_job_script_of_the_page(slurm: Cluster) -> None:
    """All four tasks read through the mount of their node, and the job succeeds."""
    model = 'echo "$(cat "$MOUNT/a/0.0") $(grep -c fuse.zarrfs /proc/self/mountinfo)"; :'
    script = step(slurm, model, options="-n4")
    job = batch(slurm, script, "-N2", "--ntasks-per-node=2")
    output = ended(slurm, job)
    assert output.count("the value 1\n") == 4, output
    assert slurm.exit_code(job) == "0:0"


def test_run_in_each_task(slurm: Cluster) -> None:
    script = f"srun -Q --ntasks-per-node=1 zarrfs run {slurm.home}/set.json -- sh -c 'cat {{}}/a/0.0; exit 3'"
    output = ended(slurm, batch(slurm, script, "-N2", "--ntasks-per-node=1"))
    assert output.count("the value") == 2, output


def test_a_source_that_cannot_be_opened_ends_the_job_with_a_reason(slurm: Cluster) -> None:
    output = ended(slurm, batch(slurm, step(slurm, "echo ran", "gone", "-n1"), "-N1", "-n1"))
    assert "gone.json: no such file" in output
    assert "ran" not in output


def test_steps_beside_each_other_do_not_disturb_a_reader(slurm: Cluster) -> None:
    """One step ends while another reads, and a third begins, with another source."""
    script = f"""
        {step(slurm, reader("short", "stop-short"))} &
        {step(slurm, reader("long"))} &
        wait $!
    """
    job = batch(slurm, script, "-N1", "-n1")
    wait_for(lambda: seen(slurm, "short.0") and seen(slurm, "long.0"), "both readers")
    (slurm.home / "stop-short").touch()
    more = f"--jobid={job}"
    variables = {"PATH": f"{os.path.dirname(PROGRAM)}:{PATH}"}
    third = step(slurm, 'cat "$MOUNT/a/0.0"; :', "other", f"{more} --overlap -n1")
    done = slurm.user("sh", "-c", third, **variables)
    assert done.stdout == "another value", done.stderr
    before = seen(slurm, "long.0")["right"]
    wait_for(lambda: seen(slurm, "long.0").get("right", 0) > before + 200, "more reads")
    (slurm.home / "stop").touch()
    ended(slurm, job)
    assert seen(slurm, "long.0").keys() == {"right"}
    assert seen(slurm, "short.0").keys() == {"right"}


@pytest.mark.parametrize("how", ["scancel", "time limit"])
def test_a_reader_that_survives_sigterm_is_right_until_it_is_killed(how: str, slurm: Cluster) -> None:
    job = batch(slurm, step(slurm, reader("one"), options="-n1"), "-N1", "-n1", "--time=1")
    wait_for(lambda: seen(slurm, "one.0"), "the reader")
    if how == "scancel":
        assert slurm.user("scancel", job).returncode == 0
    ended(slurm, job)
    found = seen(slurm, "one.0")
    assert found["right"]
    assert found.keys() <= {"right", "ENOTCONN", "ECONNABORTED", "EACCES"}, found


def test_a_killed_daemon_gives_errors(slurm: Cluster) -> None:
    job = batch(slurm, step(slurm, reader("one"), options="-n1"), "-N1", "-n1")
    wait_for(lambda: seen(slurm, "one.0"), "the reader")
    (daemon,) = (pid for pid in slurm.processes() if is_zarrfs(pid) and " mount " in command_of(pid))
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: seen(slurm, "one.0").get("ENOTCONN", 0) > 100, "errors")
    (slurm.home / "stop").touch()
    ended(slurm, job)
    assert seen(slurm, "one.0").keys() <= {"right", "ENOTCONN", "ECONNABORTED"}


@pytest.mark.parametrize("killed", ["the job's processes", "the daemons", "all"])
def test_a_job_that_is_killed_leaves_nothing(killed: str, slurm: Cluster) -> None:
    script = step(slurm, 'cd "$MOUNT" && exec sleep 100; :', options="-n2")
    job = batch(slurm, script, "-N2", "--ntasks-per-node=1")
    wait_for(lambda: len([pid for pid in slurm.processes() if command_of(pid) == "sleep 100 "]) == 2, "the step")
    victims = []
    if killed in ("the daemons", "all"):
        victims += [pid for pid in slurm.processes() if is_zarrfs(pid)]
    if killed in ("the job's processes", "all"):
        victims += [pid for pid in slurm.processes() if command_of(pid) == "sleep 100 "]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # some end together with others
            os.kill(pid, signal.SIGKILL)
    slurm.user("scancel", job)
    slurm.wait_for_nothing_left()


@pytest.mark.parametrize("opens", [True, False])
def test_a_process_that_outlives_its_job_gets_errors(opens: bool, started: Cluster) -> None:
    """If it has a file of the mount open, that stays; a reader that opens file by file gets EACCES."""
    if started.proctrack == "cgroup":
        pytest.skip("no process outlives its job")
    slurm, stop = started, started.home / "stop"
    stop.unlink(missing_ok=True)
    (slurm.home / "one.out").unlink(missing_ok=True)
    held = '3<"$MOUNT/a/0.0"' if opens else ""
    left = f'setsid {sys.executable} reader.py "$MOUNT" one.out stop </dev/null >/dev/null 2>&1 {held} & sleep 3; :'
    job = batch(slurm, step(slurm, left, options="-n1"), "-N1", "-n1")
    wait_for(lambda: seen(slurm, "one"), "the reader")
    ended(slurm, job)
    if opens:
        before = seen(slurm, "one")["right"]
        wait_for(lambda: seen(slurm, "one").get("right", 0) > before + 1000, "more reads")
    else:
        wait_for(lambda: seen(slurm, "one").get("EACCES", 0) > 100, "errors", lambda: seen(slurm, "one"))
    stop.touch()
    wait_for(lambda: not any(map(slurm.mounts, NODES)), "the unmount")
    assert seen(slurm, "one").keys() <= {"right", "EACCES"}
    for node in NODES:  # what the epilog leaves for the process, it removes in a day
        slurm.on_node(node, "rm", "-r", "-f", "/run/zarrfs-jobs")
    slurm.wait_for_nothing_left()


def test_the_directory_is_for_the_user_of_the_job_alone(slurm: Cluster) -> None:
    job = batch(slurm, step(slurm, reader("one"), options="-n1"), "-N1", "-n1", "-w", "n0")
    wait_for(lambda: seen(slurm, "one.0"), "the reader")
    become = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
    done = slurm.on_node("n0", *become, "ls", f"/run/zarrfs-jobs/{job}/user")
    assert (done.returncode, "Permission denied" in done.stderr) == (2, True)
    (slurm.home / "stop").touch()
    ended(slurm, job)


def test_a_prolog_that_runs_again_clears_what_is_left(slurm: Cluster) -> None:
    """A requeued job keeps its number, and the epilog of its first run may not have run."""
    job = {"SLURM_JOB_ID": "47", "SLURM_JOB_UID": "65534", "SLURM_JOB_GID": "65534"}
    place = slurm.inside("n0", "/run/zarrfs-jobs/47")
    for _ in range(2):
        assert slurm.on_node("n0", slurm.scripts / "slurm-prolog", **job).returncode == 0
        assert os.listdir(place / "user") == []
        (place / "user/left").touch()
    assert slurm.on_node("n0", slurm.scripts / "slurm-epilog", **job).returncode == 0
    assert not (place / "user").exists()
