"""Open-file-description locks on single bytes of a file: fcntl(2), F_OFD_SETLK.

A lock belongs to the open file description, not to the process. So two descriptions of one file exclude each other,
even in one process, and the kernel drops the lock when the last descriptor is closed, also if the process is killed. A
locked byte may be beyond the end of the file. On NFS, taking and dropping a lock makes the client revalidate and flush
its cached data.
"""

from __future__ import annotations

import errno
import fcntl
import struct

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_HELD = (errno.EAGAIN, errno.EACCES)
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def try_lock(descriptor: int, at: int) -> bool:
    """Lock byte `at` exclusively; return False if another description holds a lock on it.

    This waits for no other lock holder, but perhaps for a file server. Raise OSError, with an errno in UNSUPPORTED if
    the file system or the kernel has no such locks.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, at, 1, 0))
    except OSError as exc:
        if exc.errno in _HELD:
            return False
        raise
    return True


def unlock(descriptor: int, at: int) -> None:
    """Drop the lock on byte `at`. Raise OSError."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, at, 1, 0))
