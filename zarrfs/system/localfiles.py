"""Reads of local files: directly if the page cache has the bytes, otherwise in a worker thread."""

from __future__ import annotations

import errno
import os
import resource
import stat

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import AccessDenied, Loop, OutOfRange, ReadError, TargetChanged, TargetMissing, reason_of
from zarrfs.system.buffers import Buffer, read_all, unfilled
from zarrfs.system.own_mount import OWN_MOUNT, RULE

_DESCRIPTORS = 1024  # open at most, or a quarter of the process's limit if that is lower
_PINS = 65_536  # files whose identity is remembered
_NOT_CACHED = (errno.EAGAIN, errno.EOPNOTSUPP)  # not in the page cache; a file system without RWF_NOWAIT

Identity = tuple[int, int, int, int]  # device, inode, size, mtime in ns


async def read_file(descriptor: int, offset: int, length: int) -> Buffer:
    """Read the bytes [offset, offset + length) of a file; fewer only at its end. Raise OSError as pread(2).

    This executes no checkpoint if the page cache has all bytes: the caller must let other tasks run.
    """
    found = read_cached(descriptor, offset, length)
    missing = length - len(found)
    if not missing or read_ends(descriptor, offset + len(found)):
        return found
    rest = await trio.to_thread.run_sync(read_all, descriptor, missing, offset + len(found))
    return found + rest if found else rest


def read_cached(descriptor: int, offset: int, length: int) -> bytearray:
    """Read the part of [offset, offset + length) that the page cache has, from its start. Never block on the disk.

    The result is empty if nothing is cached or the file system does not support RWF_NOWAIT. Raise OSError for any
    other failure.
    """
    buffer = unfilled(length)
    try:
        count = os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
    except OSError as exc:
        if exc.errno not in _NOT_CACHED:
            raise
        count = 0
    if count < length:
        del buffer[count:]
    return buffer


def read_ends(descriptor: int, offset: int) -> bool:
    """Return whether the file ends at `offset`; False if this cannot be determined without blocking."""
    try:
        return not os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except OSError:
        return False


class _File:
    """An open file, its identity when it was opened, and the number of reads in progress."""

    __slots__ = ("descriptor", "evicted", "identity", "readers")

    def __init__(self, descriptor: int, identity: Identity) -> None:
        self.descriptor, self.identity = descriptor, identity
        self.readers = 0
        self.evicted = False


class LocalFiles:
    """A reader of regular files by path, through a bounded set of open descriptors.

    A file is pinned when it is first opened, by device, inode, size and mtime. If one of these differs later, reads
    raise TargetChanged. Other errors are TargetMissing, AccessDenied, OutOfRange (the file ends too early), Loop (the
    file is in the mount that this process serves), and ReadError.

    `roots` are the real paths of directories; reading a file that is below none of them raises AccessDenied with the
    reason `rule`. None allows every file.
    """

    def __init__(self, roots: tuple[str, ...] | None = None, rule: str = "") -> None:
        self._roots, self._rule = roots, rule
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        capacity = _DESCRIPTORS if limit == resource.RLIM_INFINITY else min(_DESCRIPTORS, limit // 4)
        self._open: LRU[str, _File] = LRU(capacity, _evict)  # evicts in order of opening: a read updates nothing
        self._pins: LRU[str, Identity] = LRU(_PINS)

    async def read(self, path: str, offset: int, length: int) -> Buffer:
        """Read exactly the bytes [offset, offset + length) of the file `path`, which is absolute."""
        file = self._open.get(path)
        if file is None:
            file = await self._open_pinned(path)
        if offset + length > file.identity[2]:
            asked = f"bytes [{offset}, {offset + length}) were asked for"
            raise OutOfRange(path, f"has {file.identity[2]} bytes, {asked}")
        descriptor = file.descriptor
        file.readers += 1
        try:
            data: Buffer = read_cached(descriptor, offset, length)
            if len(data) == length:
                # The page cache had all bytes, so the file system supports RWF_NOWAIT and is local: fstat(2) does not
                # block.
                status = os.fstat(descriptor)
            else:
                rest, status = await trio.to_thread.run_sync(
                    _read_and_stat, descriptor, offset + len(data), length - len(data)
                )
                data = bytes(data) + rest if data else rest
        except OSError as exc:
            raise _read_error(path, exc) from exc
        finally:
            self._leave(file)
        # Compared after the read, because a write updates the mtime before the bytes.
        if status.st_mtime_ns != file.identity[3] or status.st_size != file.identity[2]:
            raise TargetChanged(path, "has changed since it was first read")
        if len(data) != length:
            raise OutOfRange(path, f"ends before byte {offset + length}")
        return data

    async def size(self, path: str) -> int:
        """Return the size in bytes of the pinned version of the file `path`."""
        pin = self._pins.get(path)
        return pin[2] if pin is not None else (await self._open_pinned(path)).identity[2]

    async def aclose(self) -> None:
        """Close all files. A file that is being read is closed when its last read ends."""
        while self._open:
            _evict(self._open.popitem()[1])

    async def _open_pinned(self, path: str) -> _File:
        if self._roots == ():
            raise AccessDenied(path, self._rule)
        try:
            descriptor, identity = await trio.to_thread.run_sync(self._open_regular, path)
        except OSError as exc:
            raise _read_error(path, exc) from exc
        pin = self._pins.get(path)
        if pin is None:
            self._pins.put(path, identity)
        elif pin != identity:
            os.close(descriptor)
            raise TargetChanged(path, "is not the file that was first read")
        file = self._open.get(path)
        if file is not None:  # another task has opened it meanwhile
            os.close(descriptor)
            return file
        return self._open.put(path, _File(descriptor, identity))

    def _open_regular(self, path: str) -> tuple[int, Identity]:
        """Open a regular file and return (descriptor, identity). Raise OSError or ReadError. Blocks."""
        # O_NONBLOCK: opening a FIFO must not block the thread until a writer opens it
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        checked = OWN_MOUNT.device is not None or self._roots is not None
        try:
            descriptor = self._open_checked(path, flags) if checked else os.open(path, flags)
        except BlockingIOError:  # another process holds a lease on it (fcntl_locking(2))
            descriptor = self._open_checked(path, flags, wait=True)
        try:
            return descriptor, self._identity(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def _identity(self, path: str, descriptor: int) -> Identity:
        """Return the identity of an open file. Raise ReadError if it is not regular or must not be read."""
        status = os.fstat(descriptor)
        if status.st_dev == OWN_MOUNT.device:  # reached through a bind mount of the mount being served
            raise Loop(path, RULE)
        if not stat.S_ISREG(status.st_mode):
            raise ReadError(path, "is not a regular file")
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _open_checked(self, path: str, flags: int, wait: bool = False) -> int:
        """Open a file. Raise Loop if it is in the mount being served.

        Raise AccessDenied if the file is below none of the roots. With `wait`, if a regular file has a lease, block
        until the lease holder releases or downgrades it.
        """
        # Check the file that was found, not its name, so that links and concurrent renames do not matter. O_PATH looks
        # up a file without opening it: files outside the roots are not touched, and our own mount only gets lookups,
        # which need no size. open(2) and fstat(2) would request attributes, perhaps while it is answering that very
        # request.
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if OWN_MOUNT.has(found):
                raise Loop(path, RULE)
            link = f"/proc/self/fd/{found}"
            if self._roots is not None:
                real = os.readlink(link)
                if not any(real.startswith(root.rstrip("/") + "/") for root in self._roots):
                    raise AccessDenied(path, self._rule)
            if wait and stat.S_ISREG(os.fstat(found).st_mode):
                flags &= ~os.O_NONBLOCK
            return os.open(link, flags)
        finally:
            os.close(found)

    def _leave(self, file: _File) -> None:
        file.readers -= 1
        if file.evicted and not file.readers:
            os.close(file.descriptor)


def _evict(file: _File) -> None:
    """Close a file, now or when its last read ends."""
    file.evicted = True
    if not file.readers:
        os.close(file.descriptor)


def _read_and_stat(descriptor: int, offset: int, length: int) -> tuple[bytes, os.stat_result]:
    return read_all(descriptor, length, offset), os.fstat(descriptor)


def _read_error(path: str, exc: OSError) -> ReadError:
    reason = reason_of(exc)
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return TargetMissing(path, reason)
    if exc.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(path, reason)
    if exc.errno == errno.ESTALE:
        return TargetChanged(path, reason)
    return ReadError(path, reason)
