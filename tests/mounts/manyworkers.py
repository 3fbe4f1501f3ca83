"""The processes of a mount with workers=: find them, stop some of them, and drop pages that the kernel has."""

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
    """Return the process that forks workers; with auto_unmount, the first one has started fusermount3 as well."""
    found = children(daemon_pid(mountpoint))
    (one,) = [pid for pid in found if Path(f"/proc/{pid}/comm").read_text() != "fusermount3\n"]
    return one


def workers(mountpoint: Path) -> list[int]:
    """Return the processes that answer requests, without the first."""
    return children(starter(mountpoint))


def replace_workers(mountpoint: Path) -> None:
    """Kill the workers, and wait until others are in their place; the kernel aborts a request that one of them has."""
    parent = starter(mountpoint)
    old = children(parent)
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(set(children(parent)) - set(old)) == len(old))


def running(mountpoint: Path) -> int | None:
    """Return how many processes answer; None if one that dies had the question."""
    with contextlib.suppress(OSError):
        return int(counters_of(mountpoint)["workers"])
    return None


def processes(mountpoint: Path) -> list[int]:
    """Return all processes that answer requests; the first one comes first."""
    return [daemon_pid(mountpoint), *workers(mountpoint)]


def state(pid: int) -> str:
    """Return the state of a process: T is stopped, S waits (proc_pid_stat(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped; raise ProcessLookupError if it has ended, and will never be."""
    try:
        if (found := state(pid)) != "Z":
            return found == "T"
    except FileNotFoundError:
        pass
    raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")


def drop_pages(directory: Path) -> None:
    """Drop what the page cache has of the files in a directory of a mount."""
    for path in directory.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(map(_is_stopped, pids)))  # or it would take one more request, and keep it
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
