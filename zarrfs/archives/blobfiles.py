"""BlobFiles: blobs that lie in local files, one in each or many in a tar, verified when they are first read.

What tells that a file has changed are its size, mtime and ctime: the kernel sets them before it changes a byte.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import trio

from zarrfs.archives.blobhash import digest as _digest
from zarrfs.archives.blobhash import hash_of
from zarrfs.cache.diskfiles import Handle
from zarrfs.errors import AccessDenied, Loop, OutOfRange, ReadError, TargetChanged, TargetMissing, WrongHash
from zarrfs.system.buffers import Buffer
from zarrfs.system.localfiles import read_cached
from zarrfs.system.othermounts import OTHER_MOUNTS

MAX_VERDICTS = 65_536  # verified blobs remembered, open or not
WHOLE_MAX = 4 << 20  # bytes of a blob that whole() gives
ANOTHER_HASH = "its bytes have another hash than its name says"
_TICK_NS = 20_000_000  # longer than the clock of file times stands still (10 ms at 100 Hz)


class Where(NamedTuple):
    """Where a blob is: in a file of its own, or from byte `start` on of a `file` that is open."""

    path: str
    start: int = 0
    size: int | None = None  # None: up to the end
    file: Handle | None = None

    def shown(self, blobref: str) -> str:
        """As errors name it."""
        return self.path if self.size is None else f"{self.path}: {blobref}"


class Identity(NamedTuple):
    """What changes when a file does."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Blob:
    """A verified blob of `size` bytes: those from `start` on of a descriptor, or `data`. `shown`: where it is."""

    __slots__ = ("data", "fd", "identity", "retired", "shown", "size", "start", "users")

    def __init__(
        self, shown: str, size: int, fd: int = -1, start: int = 0, identity: Identity | None = None,
        data: Buffer | None = None,
    ) -> None:  # fmt: skip
        self.shown, self.size, self.fd, self.start, self.identity, self.data = shown, size, fd, start, identity, data
        self.users = 0
        self.retired = False  # to be closed by its last user


class BlobFiles:
    """Opens, verifies and reads blobs. Its methods block, and may be called in any thread."""

    def __init__(self) -> None:
        self.forbidden_device: int | None = None  # st_dev of the mount that asks
        self.hashed = self.hashed_bytes = 0
        self._verdicts: OrderedDict[tuple[str, int, Identity], bool] = OrderedDict()
        self._lock = threading.Lock()

    def examine(self, where: Where, blobref: str, declared: int | None) -> Blob:
        """The blob that is there, open, once everything about it is right; in a worker thread of trio.

        Errors as those of BlobReader.
        """
        shown = where.shown(blobref)
        with _telling(shown):
            fd = _opened(where.path) if where.file is None else os.dup(where.file)
            try:
                status, size = self._status(fd, where, shown, declared)
                identity = _identity(status)
                self._verify(fd, where.start, size, shown, blobref, identity)
                return Blob(shown, size, fd, where.start, identity)
            except BaseException:
                os.close(fd)
                raise

    def whole(self, where: Where, blobref: str, declared: int | None) -> memoryview | None:
        """The bytes of the blob that is there, verified; None if they are more than WHOLE_MAX. Errors likewise."""
        shown = where.shown(blobref)
        try:
            fd = _opened(where.path) if where.file is None else where.file
            try:
                _, size = self._status(fd, where, shown, declared)
                if size > WHOLE_MAX:
                    return None
                data: Buffer = os.pread(fd, size, where.start)
                if len(data) != size:
                    data, _ = _fill(fd, bytearray(data), where.start, size)
            finally:
                if where.file is None:
                    os.close(fd)
        except OSError as exc:  # not _telling(), which would take a tenth of the time
            raise _told(shown, exc) from exc
        if hash_of(data, blobref) != blobref:
            raise WrongHash(shown, ANOTHER_HASH)
        self.count(size)
        return memoryview(data)

    def count(self, size: int) -> None:
        """Note that a blob of `size` bytes was hashed."""
        with self._lock:
            self.hashed += 1
            self.hashed_bytes += size

    def _status(self, fd: int, where: Where, shown: str, declared: int | None) -> tuple[os.stat_result, int]:
        """What fstat says, and the length of the blob, if the file can have it."""
        status = os.fstat(fd)
        if status.st_dev == self.forbidden_device:
            raise Loop(shown, "lies in the mount that refers to it")
        if not stat.S_ISREG(status.st_mode):
            raise ReadError(shown, "not a regular file")
        size = status.st_size if where.size is None else where.size
        if declared is not None and size != declared:
            raise wrong_length(shown, size, declared)
        return status, size

    def _verify(self, fd: int, start: int, size: int, shown: str, blobref: str, identity: Identity) -> None:
        """WrongHash unless the bytes there have the hash that `blobref` names: remembered, or found out now."""
        known = (blobref, start, identity)
        with self._lock:
            right = self._verdicts.get(known)
            if right is not None:
                self._verdicts.move_to_end(known)
        if right is None:
            # a write in the same tick as the last one would not show: let the tick pass before the first byte
            age = time.time_ns() - identity.ctime_ns
            if age < _TICK_NS:
                time.sleep(min(_TICK_NS, _TICK_NS - age) / 1e9)
            right = _digest(fd, blobref, size, start) == blobref
            if _identity(os.fstat(fd)) != identity:
                raise TargetChanged(shown, "changed while it was verified")
            self.count(size)
            with self._lock:
                self._verdicts[known] = right
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        if not right:
            raise WrongHash(shown, ANOTHER_HASH)


async def read(blob: Blob, offset: int, length: int) -> Buffer | None:
    """`length` bytes of a blob that lies in a file; None where that has changed. On the loop. Errors likewise."""
    with _telling(blob.shown):
        data, identity = await _pread(blob.fd, blob.start + offset, length)
    if identity != blob.identity:
        return None
    if len(data) != length:
        raise OutOfRange(blob.shown, f"ends before byte {offset + length}")
    return data


def wrong_length(shown: str, size: int, declared: int) -> OutOfRange:
    """A blob of another length than the archive says."""
    return OutOfRange(shown, f"a blob of {size} bytes, where the archive says {declared}")


@contextlib.contextmanager
def _telling(shown: str) -> Iterator[None]:
    """Turns what the system says of a blob into a ReadError about it."""
    try:
        yield
    except OSError as exc:
        raise _told(shown, exc) from exc


def _told(shown: str, exc: OSError) -> ReadError:
    """What the system says of a blob, as a ReadError about it."""
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return TargetMissing(shown, "no such blob")
    reason = (exc.strerror or str(exc)).lower()
    return (AccessDenied if exc.errno in (errno.EACCES, errno.EPERM) else ReadError)(shown, reason)


def _identity(status: os.stat_result) -> Identity:
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _opened(path: str) -> int:
    # a fifo must not hold us up, and a place may hold symlinks: the hash decides
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not OTHER_MOUNTS.present():
        return os.open(path, flags)
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        OTHER_MOUNTS.enter(found, path)
        return os.open(f"/proc/self/fd/{found}", flags)
    finally:
        os.close(found)


async def _pread(fd: int, offset: int, length: int) -> tuple[Buffer, Identity]:
    """Up to `length` bytes, and the identity of the file after they were read."""
    data = read_cached(fd, offset, length)
    if len(data) == length:
        return data, _identity(os.fstat(fd))
    return await trio.to_thread.run_sync(_fill, fd, data, offset, length)


def _fill(fd: int, data: bytearray, offset: int, length: int) -> tuple[Buffer, Identity]:
    """`data` with what the file has after it, up to `length` bytes; blocks."""
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data, _identity(os.fstat(fd))
