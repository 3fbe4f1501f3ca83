"""Processes and jobs. A process is identified by its pid and its start time, because pids are reused."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from zarrfs.system.processes import readable

_ANSWER_TIMEOUT = 10.0  # seconds to wait for the answer of a resource manager
_MANAGERS = {"slurm": "SLURM_JOB_ID", "flux": "FLUX_JOB_ID"}  # by name: the variable with the id of a job
_OTHERS = ("PBS_JOBID", "LSB_JOBID")


class Process(NamedTuple):
    """A process: its pid, and its start in clock ticks since boot. Source: proc(5), stat, field 22."""

    pid: int
    start: int


def process(pid: int) -> Process | None:
    """Return the process with this pid; None if there is no such process, or it is a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else Process(pid, int(fields[19]))


def alive(who: Process | None) -> bool:
    """Return whether a process is running."""
    return who is not None and process(who.pid) == who


def may_be_in_other_namespace(who: Process) -> bool:
    """Return whether a running process may be in another mount namespace than this one."""
    try:
        return os.readlink(f"/proc/{who.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
    except FileNotFoundError:  # it has just ended
        return False
    except OSError:  # it is in a user namespace that this process may not inspect
        return True


def children() -> list[Process]:
    """Return the child processes of this one, without zombies."""
    own, found = str(os.getpid()), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        fields = _stat(int(name))
        if fields is not None and fields[1] == own and fields[0] not in "ZX":
            found.append(Process(int(name), int(fields[19])))
    return found


def kill(who: Process | None, timeout: float = 5.0) -> None:
    """Send SIGKILL to a process and wait until it has ended, for at most `timeout` seconds.

    A later process with the same pid gets no signal.
    """
    if who is None:
        return
    try:
        descriptor = os.pidfd_open(who.pid)
    except OSError:
        return
    try:
        if alive(who):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            readable(descriptor, timeout)
    except PermissionError:
        pass
    finally:
        os.close(descriptor)


def job_of(environment: Mapping[str, str], job_id: str | None = None) -> tuple[str, str]:
    """Return (resource manager, id) of the job `job_id`, or of the job in `environment`; "" for an unknown value."""
    for manager, variable in _MANAGERS.items():
        found = environment.get(variable)
        if found and job_id in (None, found):
            return manager, found
    return "", job_id or next((environment[name] for name in _OTHERS if environment.get(name)), "")


def job_is_gone(manager: str, job: str) -> bool:
    """Return whether the resource manager says that a job has ended; False if that is unknown."""
    if manager == "slurm" and job:
        done = _ask("squeue", "-h", "-j", job, "-o", "%T")
        if done is None or done.returncode:
            return done is not None and "Invalid job id" in done.stderr
        return not done.stdout.strip()
    if manager == "flux" and job:
        done = _ask("flux", "jobs", "-n", "-o", "{state}", job)
        return done is not None and not done.returncode and done.stdout.strip() == "INACTIVE"
    return False


def _ask(program: str, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    path = shutil.which(program)
    if path is None:
        return None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_ANSWER_TIMEOUT, check=False)
    return None


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, beginning with the third (state); None without such a process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def booted() -> float:
    """Return the time when this node was booted, in seconds since 1970."""
    with open("/proc/stat") as file:
        return next(float(line.split()[1]) for line in file if line.startswith("btime"))
