"""Opening files that can be opened without waiting for a disk or a server: openat2(2) with RESOLVE_CACHED."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable

_OPENAT2 = 437  # on every architecture
# statfs(2): bcachefs, btrfs, ext2 to ext4, f2fs, XFS. overlayfs may lie over anything, tmpfs has no RWF_NOWAIT
_LOCAL = (0xCA451A4E, 0x9123683E, 0xEF53, 0xF2F52010, 0x58465342)
_RESOLVE_NO_XDEV, _RESOLVE_NO_SYMLINKS, _RESOLVE_CACHED = 0x01, 0x04, 0x20


class _How(ctypes.Structure):
    """struct open_how."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_cached(path: str, flags: int, directory: int) -> int:
    """A descriptor of `path` in `directory`, all of whose names the kernel has in memory; no symbolic link, no mount.

    OSError as open(2); BlockingIOError where the kernel would have to ask, or cannot tell (before Linux 5.12, NFS).
    """
    if not flags & os.O_CLOEXEC:
        raise ValueError("a descriptor that programs would inherit")
    how = _How(flags, 0, _RESOLVE_NO_XDEV | _RESOLVE_NO_SYMLINKS | _RESOLVE_CACHED)
    found = _system_call()(_OPENAT2, directory, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if found >= 0:
        return found
    code = ctypes.get_errno()
    if code in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
        raise OSError(code, os.strerror(code), path)
    raise BlockingIOError(errno.EAGAIN, "not in memory", path)  # also ENOSYS, or EPERM of a sandbox


def is_local(descriptor: int) -> bool:
    """Whether what is open lies on a file system that has no server to wait for; asks it, and may wait."""
    found = (ctypes.c_long * 64)()  # struct statfs, which begins with f_type
    try:
        failed = ctypes.CDLL(None).fstatfs(descriptor, ctypes.byref(found))
    except (AttributeError, OSError):
        return False
    return not failed and found[0] in _LOCAL


@functools.cache
def _system_call() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function
