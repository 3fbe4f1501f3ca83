"""A lock for the kernel's caches, which the whole machine shares: drop() waits for tests that count requests."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy

# In one place, whatever TMPDIR is. A process that waits for the lock holds the gate, so that no later one overtakes it
_GATE, _LOCK = "/tmp/zarrfs-tests-caches.gate", "/tmp/zarrfs-tests-caches.lock"


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep drop() waiting until the context is left."""
    with contextlib.ExitStack() as stack:
        with _locked(_GATE, fcntl.LOCK_SH):
            stack.enter_context(_locked(_LOCK, fcntl.LOCK_SH))
        yield


def drop(what: str = "3") -> None:
    """Have the kernel drop its page, dentry and inode caches; do nothing unless run by root."""
    if os.geteuid() != 0:
        return
    with _locked(_GATE, fcntl.LOCK_EX), _locked(_LOCK, fcntl.LOCK_EX):
        Path("/proc/sys/vm/drop_caches").write_text(what)


@contextlib.contextmanager
def pinned(path: Path) -> Iterator[None]:
    """Keep the pages of a file in the page cache: locked pages are never reclaimed, only invalidated.

    Any other page may be reclaimed at any time, even while memory is free: a virtual machine may run DAMON, which
    reclaims pages that seem cold.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        address = numpy.frombuffer(pages, numpy.uint8).ctypes.data
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(pages))):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        yield


@contextlib.contextmanager
def _locked(path: str, how: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
