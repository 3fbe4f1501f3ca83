"""Open-file-description locks on single bytes of a file: fcntl(2), F_OFD_SETLK.

The lock belongs to the open file description, not to the process: two opens of one file exclude each other even in one
process, and the kernel drops the lock with the last descriptor, so with a process that is killed. A byte may lie
beyond the end of the file. On NFS, taking and dropping a lock revalidates and flushes what the client has cached.
"""

from __future__ import annotations

import errno
import fcntl
import struct

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_HELD = (errno.EAGAIN, errno.EACCES)
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def try_lock(descriptor: int, at: int) -> bool:
    """Lock byte `at` for writing unless another description holds it; waits only where a server is asked.

    Raise OSError, one of UNSUPPORTED where the file system or the kernel has no such locks.
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
