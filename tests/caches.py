"""The kernel's caches are the whole machine's: who drops them waits for tests that count what is asked of a mount."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK = "/tmp/zarrfs-tests-caches.lock"  # one place, whatever TMPDIR is
_PATIENCE = 8.0  # seconds


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Nobody who asks drop() drops caches meanwhile, for a while."""
    with _lock() as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def drop(what: str = "3") -> None:
    """Let the kernel drop pages, names and inodes; root's only."""
    if os.geteuid() != 0:
        return
    with _lock() as descriptor:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        Path("/proc/sys/vm/drop_caches").write_text(what)


@contextlib.contextmanager
def _lock() -> Iterator[int]:
    descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
