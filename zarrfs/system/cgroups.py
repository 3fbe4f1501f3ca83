"""The cgroups of this process, whose files contain its resource limits. Source: cgroups(7)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def directories(controller: str, root: str) -> Iterator[tuple[int, str]]:
    """Yield (version, directory) of this process's cgroup under a controller, and of each ancestor of the cgroup.

    /proc and /sys are expected below `root`.
    """
    with contextlib.suppress(OSError, ValueError), open(os.path.join(root, "proc/self/cgroup"), "rb") as file:
        for line in os.fsdecode(file.read()).splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            version, top = (2, "sys/fs/cgroup") if number == "0" else (1, f"sys/fs/cgroup/{controller}")
            path = path.strip("/")
            while path:
                yield version, os.path.join(root, top, path)
                path = os.path.dirname(path)
            yield version, os.path.join(root, top)
