"""The processors that this process may use: those of its affinity mask, as far as its cgroups let it use them."""

from __future__ import annotations

import math
import os

# of a cgroup: (directory below /sys/fs/cgroup, files with the time it has and the period, in microseconds)
_V1 = ("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")


def usable(root: str = "/") -> int:
    """Return how many processors are usable, at least 1. /proc and /sys are below `root`.

    Source: sched_getaffinity(2); "CPU" of cgroup-v2 and "CFS Bandwidth Control" in the kernel's documentation.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(root))]))


def _quotas(root: str) -> list[float]:
    """Return the processors that this process's cgroup and its ancestors have, where that is limited."""
    found = []
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except (OSError, ValueError):
        return []
    for _number, controllers, path in groups:
        if controllers == "":
            directory, names = "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            directory, names = f"sys/fs/cgroup/{_V1[0]}", [*_V1[1:]]
        else:
            continue
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            words = []
            for name in names:
                try:
                    with open(os.path.join(root, directory, *parts[:depth], name)) as file:
                        words += file.read().split()
                except OSError:
                    break
            if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
                found.append(int(words[0]) / int(words[1]))
    return found
