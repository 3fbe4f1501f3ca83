"""Jobs of resource managers."""

from __future__ import annotations

from pathlib import Path

import pytest

from zarrfs.jobs import processes


@pytest.mark.parametrize(
    ("script", "gone"),
    [
        ("echo RUNNING", False), ("echo COMPLETING", False), ("true", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", False),
    ],
)  # fmt: skip
def test_squeue_tells_whether_a_job_has_ended(
    script: str, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert processes.job_is_gone("slurm", "5") is gone
    assert not processes.job_is_gone("", "5")
    assert not processes.job_is_gone("slurm", "")


def test_the_job_is_found_in_the_environment() -> None:
    assert processes.job_of({"SLURM_JOB_ID": "5"}) == ("slurm", "5")
    assert processes.job_of({"SLURM_JOB_ID": "5"}, "5") == ("slurm", "5")
    assert processes.job_of({"SLURM_JOB_ID": "5"}, "6") == ("", "6")
    assert processes.job_of({"FLUX_JOB_ID": "f5"}) == ("flux", "f5")
    assert processes.job_of({"PBS_JOBID": "7.x"}) == ("", "7.x")
    assert processes.job_of({}) == ("", "")
