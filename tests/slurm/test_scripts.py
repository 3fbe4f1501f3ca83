"""scripts/slurm: comments in data set tables and requests, and the sweep of what no epilog has removed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import NOBODY, Cluster, unavailable, wait_for
from tests.slurm.test_slurm import archive, batch
from tests.slurm.test_slurm import slurm as slurm
from tests.slurm.test_slurm import started as started

REASON = unavailable()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}"),
    pytest.mark.timeout(600),  # a cluster starts, and jobs of half a minute run
]
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": f"{NOBODY}", "SLURM_JOB_GID": f"{NOBODY}"}
PLACE = "/run/zarrfs-jobs/4711"


@pytest.fixture
def job(slurm: Cluster) -> Iterator[Cluster]:
    """Run the prolog of a job on a node before a test and the epilog after it."""
    assert slurm.on_node("n0", slurm.scripts / "prolog", **JOB).returncode == 0
    yield slurm
    slurm.on_node("n0", slurm.scripts / "epilog", **JOB)


def task_prolog(slurm: Cluster, stage: str) -> str:
    """Run the task prolog of the job; return the variables that it adds, or its error."""
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    variables = {**JOB, "ZARRFS_STAGE": stage, "HOME": str(slurm.home)}
    return slurm.on_node("n0", *become, slurm.scripts / "task_prolog", **variables).stdout


def test_tables_and_requests_may_have_comments_and_no_last_newline(slurm: Cluster) -> None:
    (slurm.scripts / "datasets").write_text(f"# a comment\n\nother /nowhere\njob {archive(slurm)}")
    stage = f"# mine\n\nin {archive(slurm)}\n  # more"
    show = 'ls "$ZARRFS_DATASETS/job" "$ZARRFS_STAGED/in"'
    done = slurm.user("srun", "--comment=zarrfs:job", "sh", "-c", show, ZARRFS_STAGE=stage)
    assert (done.returncode, done.stdout.split().count("job")) == (0, 2), done.stdout


def test_the_sweep_removes_leftovers_without_an_epilog(job: Cluster) -> None:
    job.inside("n0", f"{PLACE}/datasets").chmod(0o711)
    task_prolog(job, f"in {archive(job)}")
    running = subprocess.run(
        ["squeue", "-h", "-o", "%i"], env=job.environment, capture_output=True, text=True, check=True
    ).stdout
    assert running == ""
    environment = {"SLURM_CONF": job.environment["SLURM_CONF"]}
    settings = job.scripts / "zarrfs.conf"
    before = settings.read_text()
    (job.base / "bin").mkdir()
    (job.base / "bin/squeue").write_text("#!/bin/sh\nexit 1\n")  # the state of jobs is unknown
    (job.base / "bin/squeue").chmod(0o755)
    settings.write_text(f"{before}PATH={job.base}/bin:$PATH\n")
    done = job.on_node("n0", job.scripts / "sweep", **environment)
    settings.write_text(before)
    assert len(job.mounts("n0")) == 1, done.stderr
    done = job.on_node("n0", job.scripts / "sweep", **environment)
    job.wait_for_nothing_left()
    assert job.on_node("n0", job.scripts / "sweep", **environment).returncode == 0


def test_the_sweep_leaves_mounts_of_running_jobs(slurm: Cluster) -> None:
    job = batch(slurm, "sleep 100", "--comment=zarrfs:job", "-w", "n0")
    wait_for(lambda: len(slurm.mounts("n0")) == 1, "the job's mount")
    slurm.on_node("n0", slurm.scripts / "sweep", SLURM_CONF=slurm.environment["SLURM_CONF"])
    assert len(slurm.mounts("n0")) == 1
    assert slurm.user("scancel", job).returncode == 0
