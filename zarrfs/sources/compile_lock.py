"""The lock that lets one process compile a document while the others wait for its index.

The lock is an open-file-description lock (system/rangelocks.py) on a file beside the indexes, of which there is one
for each document that is being compiled. The kernel drops it with the process that holds it, so a waiter succeeds a
compiler that was killed. The holder removes the file before it drops the lock; a file left by a killed process is used
by the next one, or swept after a day.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from zarrfs.system.rangelocks import try_lock

T = TypeVar("T")

_SHORTEST, _LONGEST = 0.005, 0.1  # seconds between attempts
_SHARE = 0.1  # of the time waited so far: the next pause
_IN_VAIN = b"-"  # the file's content once its compiler ended without an index: the next one will not have one either


@contextlib.contextmanager
def compiling(path: str | None, find: Callable[[], T | None], deadline: float) -> Iterator[T | None]:
    """Provide what find() returns; until `deadline` (monotonic) wait for the holder of the lock on `path`.

    None: the caller compiles, holding the lock if it can be had. It is not held where `path` is None or the directory
    has no locks, after `deadline`, and where another process has ended without an index.
    """
    found, descriptor = _wait(path, find, deadline) if path is not None else (find(), None)
    if descriptor is None or path is None:
        yield found
        return
    in_vain = False  # a signal ends us: a waiter goes on
    try:
        yield found
        in_vain = find() is None
    except Exception:
        in_vain = True
        raise
    finally:
        if in_vain:
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, _IN_VAIN, 0)
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _wait(path: str, find: Callable[[], T | None], deadline: float) -> tuple[T | None, int | None]:
    """Return (what find() returned, None), or (None, the descriptor that holds the lock; None without a lock)."""
    began = time.monotonic()
    descriptor = None
    try:
        while (found := find()) is None and (now := time.monotonic()) < deadline:
            descriptor = _open(path) if descriptor is None else descriptor
            if not try_lock(descriptor, 0):
                time.sleep(min(max(_SHORTEST, (now - began) * _SHARE), _LONGEST))
                continue
            if (found := find()) is not None:
                break
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                held, descriptor = descriptor, None
                return None, held
            if os.pread(descriptor, 1, 0) == _IN_VAIN:
                break
            os.close(descriptor)  # its holder has removed it
            descriptor = None
    except OSError:  # no locks, or the file of another user
        found = None
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return found, None


def _open(path: str) -> int:
    """Open the lock file, which only this user may write; else raise OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        raise PermissionError(path)
    return descriptor


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether `path` is still the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False
