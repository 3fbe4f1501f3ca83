"""The scripts of scripts/slurm one by one, on a node of a real Slurm: odd tables, and what was killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import NOBODY, Cluster, command_of, is_zarrfs, unavailable, wait_for
from tests.slurm.test_slurm import archive, batch
from tests.slurm.test_slurm import slurm as slurm
from tests.slurm.test_slurm import started as started

REASON = unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}")
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": f"{NOBODY}", "SLURM_JOB_GID": f"{NOBODY}"}
PLACE = "/run/zarrfs-jobs/4711"


@pytest.fixture
def job(slurm: Cluster) -> Iterator[Cluster]:
    """A node on which the prolog of a job was run; its epilog is at the end."""
    assert slurm.on_node("n0", slurm.scripts / "prolog", **JOB).returncode == 0
    yield slurm
    slurm.on_node("n0", slurm.scripts / "epilog", **JOB)


def task_prolog(slurm: Cluster, stage: str) -> str:
    """What the task prolog of the job adds to the environment, or says."""
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    variables = {**JOB, "ZARRFS_STAGE": stage, "HOME": str(slurm.home)}
    return slurm.on_node("n0", *become, slurm.scripts / "task_prolog", **variables).stdout


def daemons(slurm: Cluster) -> list[int]:
    """The processes of zarrfs on n0 that serve a mount."""
    return [pid for pid in slurm.processes("n0") if is_zarrfs(pid) and " stage " in command_of(pid)]


def readable(slurm: Cluster) -> bool:
    """Whether the job's user can read its mount."""
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    return slurm.on_node("n0", *become, "ls", f"{PLACE}/user/in/job").returncode == 0


def test_a_table_and_a_wish_with_comments_and_no_last_newline(slurm: Cluster) -> None:
    (slurm.scripts / "datasets").write_text(f"# a comment\n\nother /nowhere\njob {archive(slurm)}")
    stage = f"# mine\n\nin {archive(slurm)}\n  # more"
    show = 'ls "$ZARRFS_DATASETS/job" "$ZARRFS_STAGED/in"'
    done = slurm.user("srun", "--comment=zarrfs:job", "sh", "-c", show, ZARRFS_STAGE=stage)
    assert (done.returncode, done.stdout.split().count("job")) == (0, 2), done.stdout


def test_a_dead_mount_is_made_again_by_the_next_step(job: Cluster) -> None:
    stage = f"in {archive(job)}"
    said = task_prolog(job, stage)
    assert said.endswith(f"export ZARRFS_STAGED={PLACE}/user\n")
    assert readable(job)
    (pid,) = daemons(job)
    assert task_prolog(job, stage) == said
    assert daemons(job) == [pid]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not readable(job), "the end of the mount")
    assert task_prolog(job, stage) == said
    assert readable(job)
    assert len(job.mounts("n0")) == 1


def test_a_mount_of_a_task_prolog_that_was_killed_is_made_again(job: Cluster) -> None:
    """It was killed between the mount and the file that tells of it."""
    stage = f"in {archive(job)}"
    said = task_prolog(job, stage)
    os.unlink(job.inside("n0", f"{PLACE}/user/.in.line"))
    assert task_prolog(job, stage) == said
    assert readable(job)
    assert len(job.mounts("n0")) == 1
    assert "in: is mounted already, and from something else" in task_prolog(job, stage + ",ro")


def test_what_no_epilog_has_taken_away_the_sweep_does(job: Cluster) -> None:
    job.inside("n0", f"{PLACE}/datasets").chmod(0o711)
    task_prolog(job, f"in {archive(job)}")
    running = subprocess.run(
        ["squeue", "-h", "-o", "%i"], env=job.environment, capture_output=True, text=True, check=True
    ).stdout
    assert running == ""
    environment = {"SLURM_CONF": job.environment["SLURM_CONF"]}
    done = job.on_node("n0", job.scripts / "sweep", SLURM_CONF="/nonexistent")  # squeue cannot tell
    assert len(job.mounts("n0")) == 1, done.stderr
    done = job.on_node("n0", job.scripts / "sweep", **environment)
    assert job.left() == [], done.stderr
    assert job.on_node("n0", job.scripts / "sweep", **environment).returncode == 0


def test_the_sweep_leaves_jobs_that_run(slurm: Cluster) -> None:
    job = batch(slurm, "sleep 100", "--comment=zarrfs:job", "-w", "n0")
    wait_for(lambda: len(slurm.mounts("n0")) == 1, "the job's mount")
    slurm.on_node("n0", slurm.scripts / "sweep", SLURM_CONF=slurm.environment["SLURM_CONF"])
    assert len(slurm.mounts("n0")) == 1
    assert slurm.user("scancel", job).returncode == 0


def test_the_epilog_of_a_job_of_root(slurm: Cluster) -> None:
    """Other jobs of root's keep what they have."""
    root = {**JOB, "SLURM_JOB_UID": "0", "SLURM_JOB_GID": "0"}
    source, blobs = archive(slurm).split(" ")
    program = (slurm.scripts / "zarrfs.conf").read_text().partition("ZARRFS=")[2].split()[0]
    assert slurm.on_node("n0", slurm.scripts / "prolog", **root, SLURM_JOB_COMMENT="zarrfs:job").returncode == 0
    for number, name in ("4711", "mine"), ("4712", "others"):
        at = f"/run/{name}"
        variables = {"SLURM_JOB_ID": number, "PATH": "/usr/bin:/bin"}
        done = slurm.on_node("n0", program, "stage", "-o", blobs, source, at, **variables)
        assert done.returncode == 0, done.stderr
    assert len(slurm.mounts("n0")) == 3
    slurm.on_node("n0", slurm.scripts / "epilog", **root)
    assert slurm.mounts("n0") == ["/run/others"]
    assert slurm.on_node("n0", program, "unstage", "--job", "4712", PATH="/usr/bin:/bin").returncode == 0
