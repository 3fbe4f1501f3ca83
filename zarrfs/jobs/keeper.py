"""The keeper: a small process that keeps a mount busy, so that it cannot be unmounted while a job reads from it.

The keeper holds the root of the mount open, waits until its owner processes have ended, and then executes `zarrfs
unstage`. No signal but SIGKILL ends it, because a resource manager sends SIGTERM to every process of a job long before
the job ends. It runs keeper_main.py by its path, without the standard library, and takes 3 MB of memory instead of
60 MB.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import IO

from zarrfs.errors import MountError, reason_of
from zarrfs.jobs import processes
from zarrfs.jobs.processes import Process
from zarrfs.system.processes import python

_PROGRAM = os.path.join(os.path.dirname(__file__), "keeper_main.py")


def start(
    record: str, root: int | None, owners: Iterable[Process], pipe: bool = False
) -> tuple[Process, IO[bytes] | None]:
    """Start a keeper that holds the descriptor `root` until all `owners` have ended, and the stream of `pipe` ends.

    Then it unstages the record with the id `record`. Without owners and `pipe`, the keeper waits forever. Return the
    running keeper and, with `pipe`, the stream for add_owner(). Raise MountError if the keeper does not start.
    """
    words = [f"{owner.pid}:{owner.start}" for owner in owners] + (["-"] if pipe else [])
    then = [*python("zarrfs"), "unstage", "--record", record]
    command = [sys.executable, "-I", "-S", _PROGRAM, *words, "--", *then]
    keeper = subprocess.Popen(
        command, stdin=subprocess.PIPE if pipe else subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, cwd="/", pass_fds=() if root is None else (root,),
    )  # fmt: skip
    assert keeper.stdout is not None
    with keeper.stdout:
        ready = keeper.stdout.read()
    process = processes.process(keeper.pid)
    if not ready or process is None:
        raise MountError(f"the process that keeps the mount in use has ended with status {keeper.wait()}")
    _children.append(keeper)
    return process, keeper.stdin


def find(record: str) -> Process | None:
    """Find the keeper of a record that does not name one, because the command that started the keeper was killed."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            words = file.read().split(b"\0")[:-1]
            if os.fsencode(_PROGRAM) in words and words[-2:] == [b"--record", record.encode()]:
                return processes.process(int(name))
    return None


_children: list[subprocess.Popen[bytes]] = []  # not waited for, because they outlive this process


def add_owner(stream: IO[bytes] | None, owner: Process) -> None:
    """Make a keeper wait for one more process; do nothing if the keeper was killed."""
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.write(f"{owner.pid}:{owner.start}\n".encode())
            stream.flush()


def open_root(mountpoint: str) -> int:
    """Open the root of a mount, which keeps the mount busy, without a request to the daemon. Raise MountError."""
    try:
        return os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise MountError(f"{mountpoint}: {reason_of(exc)}") from None
