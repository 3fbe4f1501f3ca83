"""The number of processors that this process may use, by its affinity mask and the quotas of its cgroups."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from zarrfs.system import cgroups

_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}  # by version; quota, period in microseconds


def usable(root: str = "/") -> int:
    """Return the number of usable processors, at least 1. /proc and /sys are expected below `root`.

    Source: sched_getaffinity(2); "CPU" of cgroup-v2 and "CFS Bandwidth Control" in the kernel's documentation.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(root))]))


def _quotas(root: str) -> Iterator[float]:
    """Yield the quota, as a number of processors, of each cgroup of this process that has one, ancestors included."""
    for version, directory in cgroups.directories("cpu", root):
        words: list[str] = []
        with contextlib.suppress(OSError):
            for name in _FILES[version]:
                with open(os.path.join(directory, name)) as file:
                    words += file.read().split()
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            yield int(words[0]) / int(words[1])
