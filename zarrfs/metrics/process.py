"""What a daemon knows of itself: its version, memory, processor time, descriptors, failures, lost lines of its log."""

from __future__ import annotations

import functools
import os
import resource
import time
from typing import Any

from zarrfs.failures import FAILURES
from zarrfs.metrics import logs

_STARTED = time.time()


def stats() -> dict[str, Any]:
    """Counters, as a part of those of a mount; waits for no disk, and takes microseconds."""
    return {
        "errors": {"EIO": 0, **FAILURES.counts},  # from 0 on: the first one is an increase
        "log": logs.counters(),
        "process": _process(),
        "version": _version(),
    }


def _process() -> dict[str, float]:
    """Of /proc/self, proc(5), and getrusage(2); what this kernel does not tell is not there."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    found: dict[str, float] = {
        "cpu_seconds": used.ru_utime + used.ru_stime, "started": _STARTED,
        "descriptors_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }  # fmt: skip
    try:
        virtual, in_memory = _sizes()
        found |= {"resident": in_memory, "virtual": virtual}
        # since Linux 6.2 the size is how many there are; counting 10,000 takes 20 ms
        found["descriptors"] = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except (OSError, ValueError):
        pass
    return found


def resident() -> int:
    """Bytes of memory that this process has; 0 where nobody tells."""
    try:
        return _sizes()[1]
    except (OSError, ValueError):
        return 0


def _sizes() -> tuple[int, int]:
    """(virtual, resident) size in bytes; OSError or ValueError where there is no /proc."""
    with open("/proc/self/statm") as file:
        virtual, in_memory = map(int, file.read().split()[:2])
    page = os.sysconf("SC_PAGE_SIZE")
    return virtual * page, in_memory * page


def _version() -> str:
    try:
        return _installed()
    except (ImportError, OSError):  # PackageNotFoundError; or no more files can be open: the next time
        return "unknown"


@functools.cache
def _installed() -> str:
    from importlib import metadata

    return metadata.version("zarrfs")
