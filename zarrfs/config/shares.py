"""The parser of --shard: the share of the work that a process does, given as I/N or by the environment of its job."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from zarrfs.errors import UsageError

_MOST = 1_000_000  # shares: each process keeps a number in memory for each share
_SHAPE = re.compile(r"([0-9]{1,7})/([0-9]{1,7})", re.ASCII)
# The innermost launcher first: mpiexec may run within srun, and a Flux instance within both.
_SLURM = "SLURM_PROCID", "SLURM_NTASKS"
_RANKS = (
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"),
    _SLURM,
)  # fmt: skip
_ARRAY = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"


@dataclasses.dataclass(frozen=True)
class Share:
    """One of `count` shares of a piece of work; `index` counts from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Share(0, 1)


def share_of(text: str | None, environment: Mapping[str, str]) -> Share | None:
    """Parse --shard: I/N with 0 <= I < N, or "auto"; None without the option. Raise UsageError for anything else."""
    if text is None:
        return None
    if text == "auto":
        return _from(environment)
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UsageError(f"--shard {text}: expected I/N, such as 0/4, or auto")
    return _checked(f"--shard {text}", int(match[1]), int(match[2]))


def _checked(what: str, index: int, count: int) -> Share:
    if not 1 <= count <= _MOST:
        raise UsageError(f"{what}: the number of shares must be 1 to {_MOST:,}")
    if not 0 <= index < count:
        raise UsageError(f"{what}: shares count from 0: the last of {count} is {count - 1}/{count}")
    return Share(index, count)


def _from(environment: Mapping[str, str]) -> Share:
    """Return the share of a task: its rank, in a job array combined with the position of its job in the array."""
    pairs = [pair for pair in _RANKS if all(environment.get(name) for name in pair)]
    in_script = bool(environment.get("SLURM_JOB_ID")) and not environment.get("SLURM_STEP_ID")
    if in_script and _SLURM in pairs:  # a batch script has rank 0 of many, but runs once
        pairs.remove(_SLURM)
    array = _array(environment)
    if not pairs and array is None:
        known = ", ".join("/".join(pair) for pair in (*_RANKS, _ARRAY))
        what = "a job's script is no task: start this with srun, or" if in_script else f"none of {known} is set:"
        raise UsageError(f"--shard auto: {what} give I/N")
    rank = _rank(pairs[0], environment) if pairs else Share(0, 1)
    if array is None:
        return rank
    return _checked("--shard auto", array.index * rank.count + rank.index, array.count * rank.count)


def _rank(pair: tuple[str, str], environment: Mapping[str, str]) -> Share:
    what = "--shard auto: " + ", ".join(f"{name}={environment[name]}" for name in pair)
    try:
        index, count = (int(environment[name]) for name in pair)
    except ValueError:
        raise UsageError(f"{what}: expected two whole numbers") from None
    return _checked(what, index, count)


def _array(environment: Mapping[str, str]) -> Share | None:
    """Return the position of a Slurm job in its array, whose ids may begin at any number and have any step."""
    if not all(environment.get(name) for name in _ARRAY):
        return None
    names = (*_ARRAY, "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP")
    what = "--shard auto: " + ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
    try:
        task, count = (int(environment[name]) for name in _ARRAY)
        first = int(environment.get(names[2], "0"))
        last = int(environment.get(names[3], str(first + count - 1)))
        step = int(environment.get(names[4], "1"))
    except ValueError:
        raise UsageError(f"{what}: expected whole numbers") from None
    if count > 1 and step >= 1 and (last - first) % (count - 1) == 0:
        step = (last - first) // (count - 1)  # for --array=1,3,5 the variable is 1
    index, rest = divmod(task - first, step) if step >= 1 else (-1, 0)
    if rest or not 0 <= index < count:
        raise UsageError(f"{what}: the ids of the array are not evenly spaced: give I/N")
    return _checked(what, index, count)
