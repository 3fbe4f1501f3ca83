"""Stage-in on a real Slurm with two nodes and scripts/slurm as its prolog, epilog and task prolog.

Jobs run as the user nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.pages import blocks
from tests.slurm.cluster import (
    NOBODY,
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
BOTH = ("srun", "-N2", "-n2")
EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "archives/expected.json").read_text())


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with cluster() as made:
        archives = made.base / "archives"
        shutil.copytree(DATA / "archives", archives)
        subprocess.run(["chmod", "-R", "a+rX", str(archives)], check=True)
        yield made


@pytest.fixture
def slurm(started: Cluster) -> Iterator[Cluster]:
    """Return the cluster with the data set `job`; wait afterwards until nothing is left and all nodes are idle."""
    (started.scripts / "datasets").write_text(f"# a comment\njob {archive(started)}\n")
    yield started
    started.wait_for_nothing_left()
    wait_for(lambda: started.states() == {"idle"}, "idle nodes", started.states)


def archive(slurm: Cluster) -> str:
    """Return the sample archive as SOURCE OPTIONS."""
    return f"{slurm.base}/archives/flux-list.json blobs={slurm.base}/archives/blobs"


def batch(slurm: Cluster, script: str, *options: str, **variables: str) -> str:
    """Submit a script; return the job's number."""
    path = slurm.home / "script"
    path.write_text(f"#!/bin/sh\n{script}\n")
    done = slurm.user("sbatch", "--parsable", f"--output={slurm.home}/%A.out", *options, path, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def ended(slurm: Cluster, job: str) -> None:
    """Wait for a job to end; sbatch --wait polls only every ten seconds."""
    wait_for(lambda: not slurm.jobs("PD,CF,R,CG", "-j", job), "the end of the job")


def test_a_job_on_both_nodes_reads_what_its_prolog_has_mounted(slurm: Cluster) -> None:
    read = 'cd "$ZARRFS_DATASETS/job"; find job -type f -exec sha256sum {} +'
    done = slurm.user(*BOTH, "--comment=other zarrfs:job words", "sh", "-c", read)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [f"{entry['sha256']}  {key}" for key, entry in EXPECTED.items() if "sha256" in entry]
    assert sorted(done.stdout.splitlines()) == sorted(expected * 2)


def test_a_data_set_is_for_the_user_of_the_job_alone(slurm: Cluster) -> None:
    job = batch(slurm, "sleep 60", "--comment=zarrfs:job")
    wait_for(lambda: slurm.mounts("n0") and slurm.states() == {"allocated", "idle"}, "the job to run")
    file = f"/run/zarrfs-jobs/{job}/datasets/job/job/bin/run.sh"
    size = EXPECTED["job/bin/run.sh"]["size"]
    for user, found, reason in ((NOBODY, size, ""), (12345, 0, "Permission denied")):
        become = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
        done = slurm.on_node("n0", *become, "cat", file)
        assert len(done.stdout) == found
        assert reason in done.stderr
    assert slurm.user("scancel", job).returncode == 0


def test_a_job_without_requests_stages_nothing(slurm: Cluster) -> None:
    done = slurm.user(*BOTH, "--comment=something", "sh", "-c", "ls -A $ZARRFS_DATASETS; echo ${ZARRFS_STAGED-none}")
    assert (done.returncode, done.stdout) == (0, "none\nnone\n")


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("zarrfs:gone", "gone: {base}/gone.json: no such file or directory"),
        ("zarrfs:job,gone", "gone: {base}/gone.json: no such file or directory"),
        ("zarrfs:unknown", "unknown: no such data set"),
        ("zarrfs:/etc/shadow", "/etc/shadow: not a name of a data set"),
        ("zarrfs:../../etc", "../../etc: not a name of a data set"),
        ("zarrfs:$(id),*", "$(id): not a name of a data set"),
    ],
)
def test_a_bad_request_fails_the_job_and_does_not_drain_the_node(slurm: Cluster, comment: str, message: str) -> None:
    with (slurm.scripts / "datasets").open("a") as file:
        file.write(f"gone {slurm.base}/gone.json\n")
    done = slurm.user("srun", f"--comment={comment}", "echo", "ran")
    assert done.returncode == 1
    assert f"zarrfs: {message.format(base=slurm.base)}\n" in done.stdout
    assert "ran" not in done.stdout


def test_a_source_that_does_not_answer_delays_a_job_only_by_the_timeout(slurm: Cluster) -> None:
    settings = (slurm.scripts / "zarrfs.conf").read_text()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with (slurm.scripts / "datasets").open("a") as file:
            file.write(f"silent http://127.0.0.1:{silent.getsockname()[1]}/refs.json\n")
        (slurm.scripts / "zarrfs.conf").write_text(settings + "TIMEOUT=2\n")
        done = slurm.user("srun", "--comment=zarrfs:silent", "echo", "ran")
        (slurm.scripts / "zarrfs.conf").write_text(settings)
    assert (done.returncode, done.stdout) == (1, "zarrfs: silent: not mounted within 2 seconds\n")


@pytest.mark.parametrize("ending", ["json", "tar"])
def test_a_file_sent_with_sbcast_is_mounted_by_the_task_prolog_once_a_node(slurm: Cluster, ending: str) -> None:
    source, options = archive(slurm).split()
    if ending == "tar":
        made = slurm.base / "sent.tar"
        for words in ("extract", source, "-o", options, "-C", slurm.base / "sent"), (
            "create", "-C", slurm.base / "sent", "-O", made, "."
        ):  # fmt: skip
            assert run("archive", *words).returncode == 0
        made.chmod(0o644)
        source, options = str(made), ""
    script = f"""
        sbcast {source} /run/user-$SLURM_JOB_ID.{ending} || exit 1
        export ZARRFS_STAGE="in /run/user-$SLURM_JOB_ID.{ending} {options}"
        srun -Q --overcommit -n4 sh -c 'cat $ZARRFS_STAGED/in/job/bin/run.sh | sha256sum'
        srun -Q -n2 sh -c 'grep -c fuse.zarrfs /proc/self/mountinfo'   # the mount of the step before is used again
        rm -f /run/user-$SLURM_JOB_ID.{ending}
    """
    for node in NODES:
        slurm.inside(node, "/run").chmod(0o1777)
    job = batch(slurm, script, "-N2")
    ended(slurm, job)
    expected = [EXPECTED["job/bin/run.sh"]["sha256"] + "  -"] * 4 + ["1", "1"]
    assert sorted((slurm.home / f"{job}.out").read_text().splitlines(), key=len, reverse=True) == expected


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("in {base}/gone.json", "in: {base}/gone.json: no such file or directory"),
        ("in {base}/private.json", "in: {base}/private.json: permission denied"),
        ("in", "ZARRFS_STAGE: in: no source; a line is: NAME SOURCE [OPTIONS]"),
        ("../in {base}/archives/flux-list.json", "ZARRFS_STAGE: ../in: not a name of a directory"),
    ],
)
def test_a_bad_source_of_the_job_itself_fails_the_step(slurm: Cluster, stage: str, message: str) -> None:
    private = slurm.base / "private.json"
    shutil.copy(DATA / "archives/flux-list.json", private)
    private.chmod(0o600)  # root's: root must not read it for a user
    done = slurm.user("srun", "echo", "ran", ZARRFS_STAGE=stage.format(base=slurm.base))
    assert done.returncode == 1
    assert done.stdout == f"zarrfs: {message.format(base=slurm.base)}\n"


@pytest.mark.parametrize("killed", ["", "the job's processes", "the daemons", "all"])
def test_a_job_that_is_cancelled_leaves_nothing(slurm: Cluster, killed: str) -> None:
    script = 'srun sh -c "exec 3<$ZARRFS_STAGED/in/job/bin/run.sh; cd $ZARRFS_DATASETS/job; exec sleep 100"'
    job = batch(slurm, script, "-N2", "--comment=zarrfs:job", ZARRFS_STAGE=f"in {archive(slurm)}")
    wait_for(lambda: [len(slurm.mounts(node)) for node in NODES] == [2, 2], "both mounts on both nodes")
    wait_for(lambda: len([pid for pid in slurm.processes() if command_of(pid) == "sleep 100 "]) == 2, "the step")
    victims = []
    if killed in ("the daemons", "all"):
        victims += [pid for pid in slurm.processes() if is_zarrfs(pid)]
    if killed in ("the job's processes", "all"):
        of_job = re.compile("sleep |srun |/bin/sh .*slurm_script")
        victims += [pid for pid in slurm.processes() if of_job.match(command_of(pid))]
    assert victims or not killed
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # some end together with others
            os.kill(pid, signal.SIGKILL)
    assert slurm.user("scancel", job).returncode == 0
    slurm.wait_for_nothing_left()


def test_small_jobs_back_to_back_leave_nothing(slurm: Cluster) -> None:
    out = f"--output={slurm.home}/small-%a.out"
    script = 'sha256sum < "$ZARRFS_DATASETS/job/job/bin/run.sh"'
    ended(slurm, batch(slurm, script, "--array=0-9", "--comment=zarrfs:job", out))
    expected = EXPECTED["job/bin/run.sh"]["sha256"] + "  -\n"
    assert [(slurm.home / f"small-{number}.out").read_text() for number in range(10)] == [expected] * 10


def test_a_prolog_that_runs_again_clears_what_is_left(slurm: Cluster) -> None:
    """A requeued job keeps its number, and the epilog of its first run may not have run."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": f"{NOBODY}", "SLURM_JOB_GID": f"{NOBODY}"}
    job["SLURM_JOB_COMMENT"] = "zarrfs:job"
    place = slurm.inside("n0", "/run/zarrfs-jobs/4711")
    slurm.on_node("n0", slurm.scripts / "prolog", **job)
    (place / "user/left").touch()
    (first,) = slurm.mounts("n0")
    slurm.on_node("n0", slurm.scripts / "prolog", **job)
    assert slurm.mounts("n0") == [first]
    assert os.listdir(place / "user") == []
    slurm.on_node("n0", slurm.scripts / "epilog", **job)
    assert not place.exists()


def test_a_node_where_the_program_is_missing_is_drained() -> None:
    with cluster() as slurm:  # its own cluster: slurmd keeps reporting the failure
        (slurm.scripts / "zarrfs.conf").write_text("ZARRFS=/nowhere/zarrfs\n")
        done = slurm.user("srun", "-w", "n0", "echo", "ran")
        assert done.returncode != 0
        assert "ran" not in done.stdout
        wait_for(lambda: slurm.states() == {"drained: Prolog error", "idle"}, "a drained node", slurm.states)


@pytest.mark.parametrize("number", [0, 1], ids=["mount", "copy"])
def test_the_job_scripts_of_the_page(slurm: Cluster, number: int) -> None:
    """With the scripts in docs/howto-hpc.md both nodes read, the model's status is returned, and nothing is left."""
    page = (ROOT / "docs/howto-hpc.md").read_text()
    scripts = [text for text in blocks(page) if text.startswith("#!/bin/sh\n#SBATCH")]
    assert len(scripts) == 2
    refs = slurm.home / "combined.json"
    refs.write_text(json.dumps({"version": 1, "refs": {"rain/0": "some rain"}}))
    model = slurm.home / "model"
    model.write_text('#!/bin/sh\ncat "$1/rain/0" && echo " $(grep -c fuse.zarrfs /proc/self/mountinfo)" && exit 3\n')
    model.chmod(0o755)
    for node in NODES:  # the nodes share /tmp
        slurm.inside(node, "/run").chmod(0o1777)
    script = scripts[number].replace("/data/era5/combined.json", str(refs)).partition("\n")[2]
    path = f"{os.path.dirname(PROGRAM)}:{PATH}"
    variables = {"PATH": path, "TMPDIR": "/run", "ZARRFS_STATE_DIR": "/run/staged-by-nobody"}
    job = batch(slurm, script, f"--chdir={slurm.home}", **variables)
    ended(slurm, job)
    output = (slurm.home / f"{job}.out").read_text()
    assert output.splitlines().count(f"some rain {1 - number}") == 2, output
    shown = subprocess.run(["scontrol", "show", "job", job], env=slurm.environment, capture_output=True, text=True,
                           check=True).stdout  # fmt: skip
    assert "ExitCode=3:0" in shown
    for node in NODES:
        assert not [name for name in os.listdir(slurm.inside(node, "/run")) if name.startswith("input-")]
        assert os.listdir(slurm.inside(node, "/run/staged-by-nobody")) == []
