"""This machine: which boot of it, and which of its processes live. Sources: random(4), proc(5), pid_namespaces(7)."""

from __future__ import annotations

import functools
import os
import select


@functools.cache
def boot() -> str:
    """The id of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def here() -> str:
    """What processes that know each other by their numbers have in common: a boot, and a name space of processes."""
    return f"{boot()} {os.readlink('/proc/self/ns/pid')}"


def lives(pid: int) -> bool:
    """Whether a process of this name space has not ended; one that waits for its parent has."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between open and read
        return False


def readable(descriptor: int, seconds: float) -> bool:
    """Whether a descriptor can be read from, or has ended, within `seconds`; whatever its number, unlike select(2)."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def end_with_parent(parent: int | None, number: int = 0) -> None:
    """Be sent the signal `number` when the process `parent` ends, which has started us; None: not any more.

    It is so when the thread ends that has started us: it has to wait for us.
    """
    import ctypes

    ctypes.CDLL(None).prctl(1, number if parent else 0, 0, 0, 0)  # PR_SET_PDEATHSIG, linux/prctl.h
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def close_descriptors(keep: set[int]) -> None:
    """In a forked process: stdin and stdout become /dev/null; everything not kept is closed."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    low = 3
    for descriptor in [*sorted(keep - {0, 1, 2}), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(low, descriptor)
        low = descriptor + 1
