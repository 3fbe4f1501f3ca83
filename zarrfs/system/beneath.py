"""Lookups with openat2(2): some cannot escape a directory through a symbolic link, some never wait for a disk.

BaseDirectory confines lookups to a directory and to allowed directories outside it. A single openat2(2) does that in
the kernel. If it is not available (Linux < 5.6, some containers), and for links that are absolute or lead out of the
base directory, the path is walked component by component with O_NOFOLLOW.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence

from zarrfs.system.own_mount import OWN_MOUNT, RULE

_SYS_OPENAT2 = 437  # the same number on every architecture
# f_type of statfs(2): bcachefs, btrfs, ext2 to ext4, f2fs, XFS. Not overlayfs, which may be mounted over any file
# system, nor tmpfs, which lacks RWF_NOWAIT
_LOCAL_FILE_SYSTEMS = (0xCA451A4E, 0x9123683E, 0xEF53, 0xF2F52010, 0x58465342)
# FUSE, squashfs, EROFS, ISO 9660, UDF, cramfs, romfs, FAT, exFAT, SMB (three), 9P, AFS (two): their ctime equals the
# mtime, or comes from an image or a server
_NO_CTIME = (
    0x65735546, 0x73717368, 0xE0F5E1E2, 0x9660, 0x15013346, 0x28CD3D45, 0x7275, 0x4D44, 0x2011BAB0, 0x517B, 0xFF534D42,
    0xFE534D42, 0x01021997, 0x5346414F, 0x6B414653,
)  # fmt: skip
_OVERLAYFS = 0x794C7630
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _CACHED = 0x01, 0x02, 0x04, 0x08, 0x20
_PATH_MAX = 4096  # bytes of a path in one system call, with the NUL
_LINKS_MAX = 40  # the kernel's own limit
_BASIC = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK

FileVersion = tuple[int, int, int, int, int]  # device, inode, size, mtime in ns, ctime in ns


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
_hows: dict[tuple[int, int], tuple[_OpenHow, int]] = {}  # a struct per set of flags, never modified


def _openat2(directory: int, path: bytes, flags: int, resolve: int) -> int:
    how = _hows.get((flags, resolve))
    if how is None:
        struct = _OpenHow(flags, 0, resolve)
        how = _hows[flags, resolve] = struct, ctypes.addressof(struct)
    found: int = _syscall(_SYS_OPENAT2, directory, path, how[1], ctypes.sizeof(_OpenHow))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(path))
    return found


def open_cached(path: str, flags: int, directory: int) -> int:
    """Open `path` in `directory` if the dentry cache has all components. Follow no symbolic link, cross no mount.

    Raise OSError as open(2) for ENOENT, ENOTDIR, ELOOP and EACCES, and BlockingIOError for any other failure: if the
    lookup would have to wait for a disk or a server, if the kernel cannot tell (before Linux 5.12, NFS), at a mount
    point, or without free descriptors. Raise ValueError if `flags` lacks O_CLOEXEC.
    """
    if not flags & os.O_CLOEXEC:
        raise ValueError("a descriptor that programs would inherit")
    try:
        return _openat2(directory, os.fsencode(path), flags, _NO_XDEV | _NO_SYMLINKS | _CACHED)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            raise
        raise BlockingIOError(errno.EAGAIN, "not in memory", path) from None  # also for ENOSYS, and EPERM in a sandbox


def is_local(descriptor: int) -> bool:
    """Return whether an open file is on a file system known to need no server and to support RWF_NOWAIT.

    The call itself may block.
    """
    return _file_system(descriptor) in _LOCAL_FILE_SYSTEMS


def keeps_ctime(descriptor: int) -> bool:
    """Return whether every change of an open file changes its ctime. The call itself may block.

    A file system whose ctime equals the mtime, or comes from an image or a server, may keep it over a change: for
    example, another image may be mounted in the same place.
    """
    found = _file_system(descriptor)
    if found == _OVERLAYFS:  # passes on the ctime of the lower file system, which in an image equals the mtime
        status = os.fstat(descriptor)
        return status.st_ctime_ns != status.st_mtime_ns
    return found not in _NO_CTIME


def file_version(status: os.stat_result) -> FileVersion:
    """Return the fields of stat(2) of which one differs after a file was replaced or changed, if keeps_ctime()."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _file_system(descriptor: int) -> int:
    """Return the type of the file system of an open file; 0 if it is unknown."""
    found = (ctypes.c_long * 64)()  # struct statfs, which begins with f_type
    try:
        failed = ctypes.CDLL(None).fstatfs(descriptor, ctypes.byref(found))
    except (AttributeError, OSError):
        return 0
    return 0 if failed else found[0]


class BaseDirectory:
    """An open directory. Paths are bytes, relative to it, without a leading slash.

    The open descriptor keeps the file system from being unmounted. Renames of parent directories and mounts over them,
    including a FUSE mount on this very directory, do not affect the paths.
    """

    def __init__(self, path: str) -> None:
        """Open `path`. Raise OSError if that fails or `path` is no directory."""
        self.descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._roots = tuple({os.fsencode(os.path.abspath(path)), os.fsencode(os.path.realpath(path))})
        try:
            os.close(_openat2(self.descriptor, b".", os.O_PATH | os.O_CLOEXEC, _BENEATH))
            self._kernel_walks = True
        except OSError:  # Linux < 5.6, or a sandbox
            self._kernel_walks = False

    def close(self) -> None:
        """Close the descriptor. Closing twice is harmless."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def open(self, path: bytes, flags: int, cached: bool = False) -> int:
        """Open `path` ("" is the directory itself) and return the descriptor.

        A symbolic link as the last component is followed unless `flags` has O_NOFOLLOW. With `cached` the lookup never
        waits for a disk or a server: raise BlockingIOError unless the dentry cache has every component. Raise OSError
        as open(2); EXDEV for a link that leads out of the base directory.
        """
        flags |= os.O_CLOEXEC if flags & os.O_PATH else _BASIC
        resolve = _BENEATH | _NO_MAGICLINKS | (_CACHED if cached else 0)
        if self._kernel_walks and len(path) < _PATH_MAX:
            try:
                return _openat2(self.descriptor, path or b".", flags, resolve)
            except OSError as exc:
                # EAGAIN: not cached; a rename, so that the kernel is not sure; a lease, at which _walk() fails, too.
                # EINVAL: Linux < 5.12
                if exc.errno not in (errno.EXDEV, errno.EAGAIN) and not (exc.errno == errno.EINVAL and cached):
                    raise
        if cached:
            raise BlockingIOError(errno.EAGAIN, "not cached")
        return self._walk(path, flags)

    def find(self, path: bytes, allowed: Sequence[str] = (), nofollow: bool = False, cached: bool = False) -> int:
        """Return an O_PATH descriptor of the file at `path`, even if links lead out of the base directory.

        A file outside must have a real path below one of `allowed`, the real paths of directories. With `nofollow`, a
        link as the last component is not followed; `cached` is as in open(). Raise OSError as open(2): EXDEV, with a
        reason that names the real path, if that is not allowed; ELOOP if the path leads through our own mount,
        which would wait for the result of this call.
        """
        flags = os.O_PATH | (os.O_NOFOLLOW if nofollow else 0)
        try:
            return self.open(path, flags, cached)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
        found = self._walk(path, flags, out=True)
        try:
            self._check_allowed(found, allowed)
        except BaseException:
            os.close(found)
            raise
        return found

    def _check_allowed(self, found: int, allowed: Sequence[str]) -> None:
        real = real_path(found)
        roots = (*allowed, real_path(self.descriptor))
        if not any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots):
            raise OSError(errno.EXDEV, f"leads to {real}, which is out of the store (-o allow_path=DIR)")

    def directory(self, path: bytes) -> int:
        """Return an O_PATH descriptor of the directory `path`. Raise OSError; ENOTDIR if a component is a link."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._kernel_walks and len(path) < _PATH_MAX:
            try:
                return _openat2(self.descriptor, path or b".", flags, _BENEATH | _NO_SYMLINKS)
            except OSError as exc:
                if exc.errno == errno.ELOOP:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(path)) from None
                if exc.errno != errno.EAGAIN:  # a rename, so that the kernel is not sure
                    raise
        found = os.open(b".", flags, dir_fd=self.descriptor)
        for name in _parts(path):
            above = found
            try:
                found = os.open(name, flags, dir_fd=above)
            finally:
                os.close(above)
        return found

    def _walk(self, path: bytes, flags: int, out: bool = False) -> int:
        """Open a path component by component. All parent directories stay open, which makes ".." safe.

        With `out`, links may lead to any place, but nothing is looked up in our own mount.
        """
        stack = [os.open(b".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)]
        todo = _parts(path)
        links = 0
        try:
            while todo:
                name = todo.pop(0)
                if name == b".." and not out:
                    os.close(stack.pop())
                    if not stack:
                        raise _leads_out(path)
                    continue
                found = _open_part(name, stack[-1], bool(todo))
                stack.append(found)
                if out and OWN_MOUNT.has(found):  # before fstat(2), which this process would have to answer
                    raise OSError(errno.ELOOP, RULE, os.fsdecode(path))
                mode = os.fstat(found).st_mode
                if stat.S_ISLNK(mode) and (todo or not flags & os.O_NOFOLLOW):
                    links += 1
                    if links > _LINKS_MAX:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fsdecode(path))
                    target = os.readlink(b"", dir_fd=found)
                    os.close(stack.pop())
                    if target.startswith(b"/"):
                        target = target if out else self._inside(target, path)
                        while len(stack) > 1:
                            os.close(stack.pop())
                        if out:
                            stack.append(os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
                    todo = _parts(target) + todo
                elif todo and not stat.S_ISDIR(mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(path))
                elif not todo and not stat.S_ISDIR(mode) and not flags & os.O_PATH:
                    os.close(stack.pop())
                    return os.open(name, flags | os.O_NOFOLLOW, dir_fd=stack[-1])
            return _reopen(stack, flags)
        finally:
            for descriptor in stack:
                os.close(descriptor)

    def _inside(self, target: bytes, path: bytes) -> bytes:
        """Return an absolute link target relative to the base directory. Raise OSError (EXDEV) if it is outside."""
        for root in self._roots:
            if target == root or target.startswith(root.rstrip(b"/") + b"/"):
                return target[len(root) :]
        raise _leads_out(path)


def real_path(descriptor: int) -> str:
    """Return the current path of an open descriptor. Raise OSError (EIO) without /proc."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        raise OSError(errno.EIO, "cannot be found without /proc") from None


def reopen(descriptor: int, flags: int, wait: bool = False) -> int:
    """Open the regular file of an O_PATH descriptor, even if its name has changed. Raise OSError; EIO without /proc.

    Raise BlockingIOError if another process holds a conflicting lease on the file (fcntl_locking(2)). With `wait`,
    block instead until the lease holder, or after lease-break-time the kernel, has released or downgraded it.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | (_BASIC & ~os.O_NONBLOCK if wait else _BASIC))
    except FileNotFoundError:
        raise OSError(errno.EIO, "cannot be opened without /proc") from None


def _open_part(name: bytes, above: int, inner: bool) -> int:
    """Open one component with O_PATH. With `inner`, more components follow, so that an automount must be triggered."""
    if inner:
        try:
            return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
        except NotADirectoryError:
            pass  # a symbolic link, or a file in the middle of the path
    return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)


def _reopen(stack: list[int], flags: int) -> int:
    """Open the top of the stack with `flags`. With O_PATH, take its descriptor off the stack and return that."""
    if flags & os.O_PATH and not (flags & os.O_DIRECTORY and not stat.S_ISDIR(os.fstat(stack[-1]).st_mode)):
        return stack.pop()
    return os.open(b".", flags, dir_fd=stack[-1])


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def _leads_out(path: bytes) -> OSError:
    return OSError(errno.EXDEV, "leads out of the store", os.fsdecode(path))
