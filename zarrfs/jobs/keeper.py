"""The keeper: a small process that keeps a mount in use, so that nobody unmounts it under a job that reads it.

It holds the root of the mount open, waits for the end of the processes that it is for, and then becomes `zarrfs
unstage`. Signals do not end it but SIGKILL: a resource manager sends SIGTERM to every process of a job, long before
that ends. It is Python without its library: 3 MB of memory of its own, where zarrfs has 60.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import IO

from zarrfs.errors import MountError
from zarrfs.jobs import processes
from zarrfs.jobs.processes import Process

_PROGRAM = os.path.join(os.path.dirname(__file__), "keeping.py")


def start(
    record: str, root: int | None, owners: Iterable[Process], pipe: bool = False
) -> tuple[Process, IO[bytes] | None]:
    """Start a keeper: (it, where to tell of more processes, with `pipe`). It is there when this returns. MountError.

    It holds the descriptor `root` and waits for the end of `owners` (of nobody: for good), to unstage `record`.
    """
    words = [f"{who.pid}:{who.start}" for who in owners] + (["-"] if pipe else [])
    then = [sys.executable, "-I", "-m", "zarrfs", "unstage", "--record", record]
    command = [sys.executable, "-I", "-S", _PROGRAM, *words, "--", *then]
    keeper = subprocess.Popen(
        command, stdin=subprocess.PIPE if pipe else subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, cwd="/", pass_fds=() if root is None else (root,),
    )  # fmt: skip
    assert keeper.stdout is not None
    with keeper.stdout:
        ready = keeper.stdout.read()
    who = processes.process(keeper.pid)
    if not ready or who is None:
        raise MountError(f"the process that keeps the mount in use has ended with status {keeper.wait()}")
    _children.append(keeper)
    return who, keeper.stdin


def of(record: str) -> Process | None:
    """The keeper of a record that does not name it, as whoever started it was killed before; None if there is none."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            words = file.read().split(b"\0")[:-1]
            if os.fsencode(_PROGRAM) in words and words[-2:] == [b"--record", record.encode()]:
                return processes.process(int(name))
    return None


_children: list[subprocess.Popen[bytes]] = []  # not waited for: they stay when this process has ended


def tell(stream: IO[bytes] | None, who: Process) -> None:
    """Tell a keeper of one more process to wait for, unless it was killed."""
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.write(f"{who.pid}:{who.start}\n".encode())
            stream.flush()


def hold(mountpoint: str) -> int:
    """A descriptor of the root of a mount, which keeps it in use; it asks the daemon for nothing. MountError."""
    try:
        return os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise MountError(f"{mountpoint}: {(exc.strerror or str(exc)).lower()}") from None
