"""A lock with which one process compiles a document while others wait for its index.

The lock is an open-file-description lock (system/rangelocks.py). Each document that is being compiled has a lock file
in the directory of the indexes. If a holder is killed, the kernel releases its lock, and a waiter acquires it. The
holder removes the file before it releases the lock. The file of a killed holder is used again by the next process that
compiles the document, or removed after a day.
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
_SHARE = 0.1  # length of a pause, as a share of the time waited so far
_REPORTED = 3.0  # seconds of waiting after which it is reported
# Content of the lock file if its holder failed to make an index. The waiters then stop waiting, because each of them
# would probably fail, too.
_FAILED = b"-"


@contextlib.contextmanager
def compiling(
    path: str | None, find: Callable[[], T | None], deadline: float, report: Callable[[str], None] = lambda _: None
) -> Iterator[T | None]:
    """Provide the result of find(). Until `deadline` (time.monotonic()), wait for the holder of the lock on `path`.

    If the result is None, the caller compiles the document. It holds the lock meanwhile, unless `path` is None, the
    file cannot be locked, `deadline` has passed or another holder has failed to make an index. A wait of some seconds
    is reported once: `report` gets the name of the holder, "process 17", or "process 17 on n1" for another node.
    """
    if path is None:
        yield find()
        return
    lock = _Lock(path)
    in_vain = False  # also if a signal ends this process: a waiter may succeed
    try:
        yield lock.wait(find, deadline, report)
        in_vain = lock.held and find() is None
    except Exception:
        in_vain = lock.held
        raise
    finally:
        lock.release(in_vain)


class _Lock:
    """A lock on a file.

    The handler of a signal may raise an exception at any point, so release() also removes a file that was created
    although its descriptor is not known.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.held = False

    def wait(self, find: Callable[[], T | None], deadline: float, report: Callable[[str], None]) -> T | None:
        """Wait until find() returns a result, or for the lock; return the result, or None.

        Also return None after `deadline`, if the file cannot be locked, and if another holder has failed.
        """
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
                if os.pread(self._descriptor, 1, 0) == _FAILED:
                    break
                self._close()  # its holder has removed the file: open a new one
        except OSError:  # no locks on this file system, or the file of another user
            found = None
        self._close()  # release the lock, or others would wait for this process
        return found

    def release(self, in_vain: bool) -> None:
        """Remove the file unless another process holds the lock. `in_vain`: make waiters stop waiting."""
        if in_vain and self._descriptor is not None:
            with contextlib.suppress(OSError):  # a full disk
                os.pwrite(self._descriptor, _FAILED, 0)
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
    """Return the name of the holder of a lock for messages, from the content of the lock file."""
    number, _, node = written.decode(errors="replace").partition(" ")
    if not number.isdecimal():
        return "another process"
    return f"process {number}" + ("" if node == os.uname().nodename else f" on {node}")


def _open(path: str) -> int:
    """Open or create the lock file. Raise OSError if another user owns it or may write it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        raise PermissionError(path)
    return descriptor


def _is_at(descriptor: int | None, path: str) -> bool:
    """Return whether `path` still names the open file."""
    with contextlib.suppress(FileNotFoundError):
        return descriptor is not None and os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False
