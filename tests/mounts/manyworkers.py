"""Helpers for mounts with workers=: find their processes, stop or kill them, and drop pages from the page cache."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.mounts.mounting import alive, counters_of, daemon_pid, until


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if alive(int(child))]


def starter(mountpoint: Path) -> int:
    """Return the process that forks the workers.

    It is a child of the first process, which with auto_unmount also has the child fusermount3.
    """
    found = children(daemon_pid(mountpoint))
    (one,) = [pid for pid in found if Path(f"/proc/{pid}/comm").read_text() != "fusermount3\n"]
    return one


def workers(mountpoint: Path) -> list[int]:
    """Return the worker processes: those that answer requests, without the first process."""
    return children(starter(mountpoint))


def replace_workers(mountpoint: Path) -> None:
    """Kill the workers, and wait until new ones replace them; the kernel aborts the requests that they held."""
    parent = starter(mountpoint)
    old = children(parent)
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(set(children(parent)) - set(old)) == len(old))


def running(mountpoint: Path) -> int | None:
    """Return the number of processes that answer requests; None if the one that took the query died."""
    with contextlib.suppress(OSError):
        return int(counters_of(mountpoint)["workers"])
    return None


def processes(mountpoint: Path) -> list[int]:
    """Return all processes that answer requests: the first process, then the workers."""
    return [daemon_pid(mountpoint), *workers(mountpoint)]


def state(pid: int) -> str:
    """Return the state of a process (proc_pid_stat(5)): T is stopped, S is sleeping."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped; raise ProcessLookupError if it has ended."""
    try:
        if (found := state(pid)) != "Z":
            return found == "T"
    except FileNotFoundError:
        pass
    raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")


def drop_pages(directory: Path) -> None:
    """Drop the pages of all files in a directory of a mount from the page cache."""
    for path in directory.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(map(_is_stopped, pids)))  # a process that still runs could take one more request
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
