"""Memory of this process: the default of memory_limit=, and tuning of the C heap and the garbage collector."""

from __future__ import annotations

import contextlib
import functools
import gc
import os

from zarrfs.config.options import Options
from zarrfs.system import cgroups

# M_MMAP_THRESHOLD: bytes from which an allocation is mapped by itself; M_TRIM_THRESHOLD: free bytes kept at the end of
# a heap; M_ARENA_MAX: number of heaps, by default up to one per thread; M_TOP_PAD: bytes by which a heap grows
_MALLOPT = ((-3, 32 << 20), (-1, 64 << 20), (-8, 2), (-2, 16 << 20))
_MOST = 1 << 30  # bytes; upper bound of the default of memory_limit=
_LEAST = 64 << 20  # bytes; lower bound of that default
# by cgroup version: files with limits; above memory.high the kernel throttles the process
_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}


def memory_limit(options: Options) -> int:
    """Return the bound in bytes on cached, prefetched and in-flight data."""
    return suggested() if options.memory_limit is None else options.memory_limit


def suggested(machine: int = 0, root: str = "/") -> int:
    """Return the default of memory_limit=: quarter(), but at least 64 MiB and at most 1 GiB."""
    return max(_LEAST, min(_MOST, quarter(machine, root)))


@functools.cache
def quarter(machine: int = 0, root: str = "/") -> int:
    """Return a quarter of the memory of the machine or of the cgroup's limit, whichever is lower, in bytes.

    `machine` is the memory of another machine, whose /proc and /sys are below `root`. Sources: cgroups(7); "memory" of
    cgroup versions 1 and 2 in the kernel's documentation.
    """
    limits = [machine or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for version, directory in cgroups.directories("memory", root):
        for name in _FILES[version]:  # without a limit: "max", or in version 1 a huge number
            with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, name)) as file:
                limits.append(int(file.read()))
    return min(limits) // 4


@functools.cache
def tune_heap() -> None:
    """Set the heap of the C library to keep freed memory, because new memory from the system is slower: mallopt(3)."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):  # not glibc
        library = ctypes.CDLL(None)
        for parameter, size in _MALLOPT:
            library.mallopt(parameter, size)


def trim() -> None:
    """Return free heap memory to the system with malloc_trim(3) of glibc. Takes milliseconds."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def freeze_garbage_collector() -> None:
    """Exempt all existing objects from garbage collection, and collect new ones less often."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
