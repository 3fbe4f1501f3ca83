"""The option --shard: I/N, or auto, which reads the environment of a job."""

from __future__ import annotations

import pytest

from zarrfs.config.shares import Share, share_of
from zarrfs.errors import UsageError

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}  # of an sbatch script, which is not a task
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "3",
    "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_STEP": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("0/1", {}, (0, 1)),
        ("3/4", STEP, (3, 4)),
        ("auto", STEP, (2, 4)),
        ("auto", {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, 4)),
        ("auto", SCRIPT | ARRAY, (1, 3)),
        ("auto", STEP | ARRAY, (6, 12)),
        ("auto", ARRAY | {"SLURM_ARRAY_TASK_STEP": "1"}, (1, 3)),  # as --array=3,5,7 sets it
        ("auto", {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2"}, (1, 2)),
        ("auto", {"FLUX_TASK_RANK": "9", "FLUX_JOB_SIZE": "10"}, (9, 10)),
        ("auto", STEP | {"FLUX_TASK_RANK": "9", "FLUX_JOB_SIZE": "10"}, (9, 10)),
        ("auto", {"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        ("auto", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"}, (1, 2)),
        ("auto", SCRIPT | {"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
    ],
)
def test_the_share_of_a_task(text: str, environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert share_of(text, environment) == Share(*expected)


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("3/2", {}, "--shard 3/2: shares count from 0: the last of 2 is 1/2"),
        ("2/2", {}, "--shard 2/2: shares count from 0: the last of 2 is 1/2"),
        ("0/0", {}, "--shard 0/0: the number of shares must be 1 to 1,000,000"),
        ("0/1000001", {}, "--shard 0/1000001: the number of shares must be 1 to 1,000,000"),
        ("", {}, "--shard : expected I/N, such as 0/4, or auto"),
        ("-1/2", {}, "--shard -1/2: expected I/N, such as 0/4, or auto"),
        ("1/2\n", {}, "--shard 1/2\n: expected I/N, such as 0/4, or auto"),
        ("auto", {"SLURM_PROCID": "1", "FLUX_JOB_SIZE": "2"}, "--shard auto: none of FLUX_TASK_RANK/FLUX_JOB_SIZE, "),
        ("auto", SCRIPT, "--shard auto: a job's script is no task: start this with srun, or give I/N"),
        ("auto", {"PMI_RANK": "x", "PMI_SIZE": "2"}, "--shard auto: PMI_RANK=x, PMI_SIZE=2: expected two whole"),
        ("auto", {"PMI_RANK": "2", "PMI_SIZE": "2"}, "--shard auto: PMI_RANK=2, PMI_SIZE=2: shares count from 0: the"),
        ("auto", ARRAY | {"SLURM_ARRAY_TASK_ID": "4"}, "--shard auto: SLURM_ARRAY_TASK_ID=4, SLURM_ARRAY_TASK"),
        ("auto", ARRAY | {"SLURM_ARRAY_TASK_STEP": "0", "SLURM_ARRAY_TASK_COUNT": "1"}, "--shard auto: SLURM_"),
    ],
)  # fmt: skip
def test_invalid_shares_are_refused(text: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        share_of(text, environment)
    assert str(raised.value).startswith(message)


def test_ids_of_an_array_with_gaps_are_refused() -> None:
    gaps = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "17", "SLURM_ARRAY_TASK_STEP": "1"}
    with pytest.raises(UsageError, match="not evenly spaced: give I/N"):
        share_of("auto", ARRAY | gaps)
