"""How much memory fetched bytes may take: memory_limit=, or what the machine or its cgroup suggests."""

from __future__ import annotations

import contextlib
import functools
import os

from zarrfs.options import Options

_MOST = 1 << 30  # bytes, where nobody says more
_LEAST = 64 << 20  # bytes
_CGROUP = "/sys/fs/cgroup"


def memory_limit(options: Options) -> int:
    """Bytes that may be kept, read ahead and in flight."""
    return _usual() if options.memory_limit is None else options.memory_limit


@functools.cache
def _usual() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_LEAST, min(_MOST, min([machine, *_cgroup_limits()]) // 4))


def _cgroup_limits() -> list[int]:
    """The limits of this process's cgroup and those above it, as far as they can be read."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers in ("", "memory"):  # version 2, or version 1
                root = _CGROUP if not controllers else f"{_CGROUP}/memory"
                name = "memory.max" if not controllers else "memory.limit_in_bytes"
                found += _limits_up(root, path.strip("/"), name)
    return found


def _limits_up(root: str, path: str, name: str) -> list[int]:
    found = []
    while True:
        with contextlib.suppress(OSError, ValueError), open(os.path.join(root, path, name)) as file:
            found.append(int(file.read()))
        if not path:
            return found
        path = os.path.dirname(path)
