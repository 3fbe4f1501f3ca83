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
_REPORTED = 3.0  # seconds of waiting before it is reported
_IN_VAIN = b"-"  # the file's content once its compiler ended without an index: the next one will not have one either


@contextlib.contextmanager
def compiling(
    path: str | None, find: Callable[[], T | None], deadline: float, report: Callable[[str], None] = lambda _: None
) -> Iterator[T | None]:
    """Provide what find() returns; until `deadline` (monotonic) wait for the holder of the lock on `path`.

    A wait of some seconds is reported once, with the holder: "process 17", on another node "process 17 on n1".
    None: the caller compiles, holding the lock if it can be had. It is not held where `path` is None or the
    directory has no locks, after `deadline`, and where another process has ended without an index.
    """
    if path is None:
        yield find()
        return
    lock = _Lock(path)
    in_vain = False  # a signal ends us: a waiter goes on
    try:
        yield lock.wait(find, deadline, report)
        in_vain = lock.held and find() is None
    except Exception:
        in_vain = lock.held
        raise
    finally:
        lock.release(in_vain)


class _Lock:
    """The lock on a file. A signal may raise an exception at any point: release() looks for a file left behind."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.held = False

    def wait(self, find: Callable[[], T | None], deadline: float, report: Callable[[str], None]) -> T | None:
        """Wait for what find() returns, or for the lock; None also after `deadline` and without locks."""
        began, reported = time.monotonic(), False
        try:
            while (found := find()) is None and (now := time.monotonic()) < deadline:
                if self._descriptor is None:
                    self._descriptor = _open(self._path)
                if not try_lock(self._descriptor, 0):
                    if now - began >= _REPORTED and not reported:
                        reported = True
                        report(_holder(os.pread(self._descriptor, 300, 0)))
                    time.sleep(min(max(_SHORTEST, (now - began) * _SHARE), _LONGEST))
                    continue
                if (found := find()) is not None:
                    break
                if _is_at(self._descriptor, self._path):
                    self.held = True
                    os.ftruncate(self._descriptor, 0)
                    with contextlib.suppress(OSError):  # a full disk
                        os.pwrite(self._descriptor, f"{os.getpid()} {os.uname().nodename}".encode(), 0)
                    return None
                if os.pread(self._descriptor, 1, 0) == _IN_VAIN:
                    break
                self._close()  # its holder has removed it
        except OSError:  # no locks, or the file of another user
            found = None
        self._close()  # or others would wait for us
        return found

    def release(self, in_vain: bool) -> None:
        """Remove the file unless another process holds the lock. `in_vain`: tell those who wait that it is no use."""
        if in_vain and self._descriptor is not None:
            with contextlib.suppress(OSError):  # a full disk
                os.pwrite(self._descriptor, _IN_VAIN, 0)
        with contextlib.suppress(OSError):
            if self._descriptor is None and os.path.lexists(self._path):
                self._descriptor = _open(self._path)
            mine = self._descriptor is not None and (self.held or try_lock(self._descriptor, 0))
            if mine and _is_at(self._descriptor, self._path):
                os.unlink(self._path)
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _holder(written: bytes) -> str:
    """Return the text for the holder of a lock, of what it has written into the file."""
    number, _, node = written.decode(errors="replace").partition(" ")
    if not number.isdecimal():
        return "another process"
    return f"process {number}" + ("" if node == os.uname().nodename else f" on {node}")


def _open(path: str) -> int:
    """Open the lock file, which only this user may write; else raise OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        raise PermissionError(path)
    return descriptor


def _is_at(descriptor: int | None, path: str) -> bool:
    """Return whether `path` is still the open file."""
    with contextlib.suppress(FileNotFoundError):
        return descriptor is not None and os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False
