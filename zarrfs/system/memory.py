"""How much memory fetched bytes may take: memory_limit=, or what the machine or its cgroup suggests."""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
from collections.abc import Callable

from zarrfs.config.options import Options

# M_MMAP_THRESHOLD; M_TRIM_THRESHOLD: bytes kept at the end of a heap; M_ARENA_MAX: heaps, else one for each thread;
# M_TOP_PAD: bytes by which a heap grows at once
_MALLOPT = ((-3, 32 << 20), (-1, 64 << 20), (-8, 2), (-2, 16 << 20))
_MADV_HUGEPAGE = 14
_MOST = 1 << 30  # bytes, where nobody says more
_LEAST = 64 << 20  # bytes
_FILES = {  # of a cgroup: (directory below /sys/fs/cgroup, files with its limits)
    1: ("memory", ("memory.limit_in_bytes",)),
    2: ("", ("memory.max", "memory.high")),  # above the latter a process is slowed down
}


def memory_limit(options: Options) -> int:
    """Bytes that may be kept, read ahead and in flight."""
    return _usual() if options.memory_limit is None else options.memory_limit


@functools.cache
def _usual() -> int:
    return suggested(_machine())


@functools.cache
def quarter() -> int:
    """Bytes: a quarter of the machine's memory, or of what this process's cgroup may take."""
    return _quarter(_machine(), "/")


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def suggested(machine: int, root: str = "/") -> int:
    """Bytes: a quarter of the `machine`'s memory or of this process's cgroup, within bounds.

    `root` is where /proc and /sys are. Limits: cgroups(7), "memory" of version 1 and 2 in the kernel's documentation.
    """
    return max(_LEAST, min(_MOST, _quarter(machine, root)))


def _quarter(machine: int, root: str) -> int:
    return min([machine, *_cgroup_limits(root)]) // 4


def _cgroup_limits(root: str) -> list[int]:
    """The limits of this process's cgroup and those above it, as far as they can be read."""
    found = []
    with contextlib.suppress(OSError, ValueError), open(os.path.join(root, "proc/self/cgroup"), "rb") as file:
        for line in os.fsdecode(file.read()).splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "memory" in controllers.split(","):
                directory, names = _FILES[2 if number == "0" else 1]
                found += _limits_up(os.path.join(root, "sys/fs/cgroup", directory), path.strip("/"), names)
    return found


def _limits_up(directory: str, path: str, names: tuple[str, ...]) -> list[int]:
    found = []
    while True:
        for name in names:  # a limit that is not set is "max", or in version 1 a number beyond all memory
            with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, path, name)) as file:
                found.append(int(file.read()))
        if not path:
            return found
        path = os.path.dirname(path)


@functools.cache
def heap() -> Heap:
    """The heap of this process."""
    return Heap()


class Heap:
    """The C library's heap, which keeps what blocks leave behind and grows by large pages.

    Fresh memory from the system is several times slower than what was used before: 512 KiB take 200 microseconds at
    their first touch, in large pages 40. As mallopt(3) of glibc, sbrk(2) and madvise(2) have it; elsewhere nothing
    happens.
    """

    def __init__(self) -> None:
        import ctypes

        self._sbrk: Callable[[int], int] | None = None
        self._end = 0  # its address
        try:
            library = ctypes.CDLL(None)
            for parameter, size in _MALLOPT:
                library.mallopt(parameter, size)
            sbrk, self._madvise = library.sbrk, library.madvise
        except (AttributeError, OSError):
            return
        sbrk.argtypes, sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._sbrk, self._end = sbrk, sbrk(0)

    def grown(self) -> None:
        """To be called after large allocations: what the heap has grown by is to have large pages."""
        if self._sbrk is None:
            return
        start, self._end = self._end, self._sbrk(0)
        if start < self._end:
            start -= start % mmap.PAGESIZE
            self._madvise(start, self._end - start, _MADV_HUGEPAGE)  # refused by a kernel without: no matter


def give_back() -> None:
    """Give what the allocator keeps back to the system, as malloc_trim(3) of glibc does; takes milliseconds."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_what_is_here() -> None:
    """What was made so far stays: the collector of garbage looks at younger objects alone, and less often."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
