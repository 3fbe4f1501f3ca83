"""Blobs in local files, one per file or many in a tar, verified when they are first read.

A file counts as changed if its size, mtime or ctime differs: the kernel updates the times before it changes a byte.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import trio

from zarrfs.archives.blobrefs import hash_of, hash_of_file
from zarrfs.cache.diskfiles import Handle
from zarrfs.concurrency.lru import LRU
from zarrfs.errors import AccessDenied, Loop, OutOfRange, ReadError, TargetChanged, TargetMissing, WrongHash, reason_of
from zarrfs.system.beneath import FileVersion, file_version
from zarrfs.system.buffers import Buffer, read_all
from zarrfs.system.localfiles import read_cached
from zarrfs.system.own_mount import OWN_MOUNT, RULE

MAX_VERDICTS = 65_536  # results of verification that are remembered, for open and closed blobs
WHOLE_MAX = 4 << 20  # bytes of a blob that whole() returns
ANOTHER_HASH = "its bytes have another hash than its name says"
_TICK_NS = 20_000_000  # more than the resolution of file times (10 ms at 100 Hz)


class BlobLocation(NamedTuple):
    """The location of a blob: the whole file `path`, or `size` bytes from `start` on in the open `file`."""

    path: str
    start: int = 0
    size: int | None = None  # None: up to the end of the file
    file: Handle | None = None

    def shown(self, blobref: str) -> str:
        """Return the name of the blob in errors."""
        return self.path if self.size is None else f"{self.path}: {blobref}"


class OpenBlob:
    """A verified blob of `size` bytes: from `start` on in the file `fd`, or `data` in memory.

    `shown` is its name in errors.
    """

    __slots__ = ("data", "fd", "retired", "shown", "size", "start", "users", "version")

    def __init__(
        self, shown: str, size: int, fd: int = -1, start: int = 0, version: FileVersion | None = None,
        data: Buffer | None = None,
    ) -> None:  # fmt: skip
        self.shown, self.size, self.fd, self.start, self.version, self.data = shown, size, fd, start, version, data
        self.users = 0
        self.retired = False  # True: the last user closes it


class BlobFiles:
    """An opener and verifier of blobs in local files. Methods block and are thread-safe."""

    def __init__(self) -> None:
        self.hashed = self.hashed_bytes = 0
        self._verdicts: LRU[tuple[str, int, FileVersion], bool] = LRU(MAX_VERDICTS)
        self._lock = threading.Lock()

    def examine(self, location: BlobLocation, blobref: str, declared: int | None) -> OpenBlob:
        """Open the blob at a location and verify its length and hash. Must run in a worker thread of trio.

        Raise the errors that BlobReader documents.
        """
        shown = location.shown(blobref)
        with _about(shown):
            fd = _opened(location.path) if location.file is None else os.dup(location.file)
            try:
                status, size = self._status(fd, location, shown, declared)
                self._verify(fd, location.start, size, shown, blobref, status)
                return OpenBlob(shown, size, fd, location.start, file_version(status))
            except BaseException:
                os.close(fd)
                raise

    def whole(self, location: BlobLocation, blobref: str, declared: int | None) -> memoryview | None:
        """Return all bytes of a blob, verified; None if it is larger than WHOLE_MAX. Raise as examine()."""
        shown = location.shown(blobref)
        try:
            fd = _opened(location.path) if location.file is None else location.file
            try:
                _, size = self._status(fd, location, shown, declared)
                if size > WHOLE_MAX:
                    return None
                data = read_all(fd, size, location.start)
            finally:
                if location.file is None:
                    os.close(fd)
        except OSError as exc:  # without _about(), this method takes a tenth less time
            raise _read_error(shown, exc) from exc
        if hash_of(data, blobref) != blobref:
            raise WrongHash(shown, ANOTHER_HASH)
        self.count(size)
        return memoryview(data)

    def count(self, size: int) -> None:
        """Count a hashed blob of `size` bytes."""
        with self._lock:
            self.hashed += 1
            self.hashed_bytes += size

    def _status(self, fd: int, location: BlobLocation, shown: str, declared: int | None) -> tuple[os.stat_result, int]:
        """Return the result of fstat(2) and the blob's length. Raise OutOfRange if that is not the declared one."""
        status = os.fstat(fd)
        if status.st_dev == OWN_MOUNT.device:
            raise Loop(shown, RULE)
        if not stat.S_ISREG(status.st_mode):
            raise ReadError(shown, "not a regular file")
        size = status.st_size if location.size is None else location.size
        if declared is not None and size != declared:
            raise wrong_length(shown, size, declared)
        return status, size

    def _verify(self, fd: int, start: int, size: int, shown: str, blobref: str, status: os.stat_result) -> None:
        """Raise WrongHash unless the bytes have the hash in `blobref`. The result is cached until the file changes."""
        version = file_version(status)
        known = (blobref, start, version)
        with self._lock:
            right = self._verdicts.use(known)
        if right is None:
            # a second write within one tick of the kernel's clock leaves the times unchanged: wait for the next tick
            age = time.time_ns() - status.st_ctime_ns
            if age < _TICK_NS:
                time.sleep(min(_TICK_NS, _TICK_NS - age) / 1e9)
            right = hash_of_file(fd, blobref, size, start) == blobref
            if file_version(os.fstat(fd)) != version:
                raise TargetChanged(shown, "changed while it was verified")
            self.count(size)
            with self._lock:
                self._verdicts.put(known, right)
        if not right:
            raise WrongHash(shown, ANOTHER_HASH)


async def read(blob: OpenBlob, offset: int, length: int) -> Buffer | None:
    """Read `length` bytes of a blob in a file; return None if the file has changed. Raise the errors of examine()."""
    with _about(blob.shown):
        data, version = await _pread(blob.fd, blob.start + offset, length)
    if version != blob.version:
        return None
    if len(data) != length:
        raise OutOfRange(blob.shown, f"ends before byte {offset + length}")
    return data


def wrong_length(shown: str, size: int, declared: int) -> OutOfRange:
    """Return the error about a blob of another length than the archive declares."""
    return OutOfRange(shown, f"a blob of {size} bytes, where the archive says {declared}")


@contextlib.contextmanager
def _about(shown: str) -> Iterator[None]:
    """Turn OSErrors of the body into ReadErrors about a blob."""
    try:
        yield
    except OSError as exc:
        raise _read_error(shown, exc) from exc


def _read_error(shown: str, exc: OSError) -> ReadError:
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return TargetMissing(shown, "no such blob")
    return (AccessDenied if exc.errno in (errno.EACCES, errno.EPERM) else ReadError)(shown, reason_of(exc))


def _opened(path: str) -> int:
    # O_NONBLOCK: opening a FIFO must not block. Symlinks are followed, because the blob is verified by its hash.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if OWN_MOUNT.device is None:
        return os.open(path, flags)
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if OWN_MOUNT.has(found):
            raise Loop(path, RULE)
        return os.open(f"/proc/self/fd/{found}", flags)
    finally:
        os.close(found)


async def _pread(fd: int, offset: int, length: int) -> tuple[Buffer, FileVersion]:
    """Return up to `length` bytes, and the version of the file after reading them."""
    data = read_cached(fd, offset, length)
    if len(data) == length:
        return data, file_version(os.fstat(fd))
    return await trio.to_thread.run_sync(_fill, fd, data, offset, length)


def _fill(fd: int, data: bytearray, offset: int, length: int) -> tuple[Buffer, FileVersion]:
    """Append bytes of the file to `data` until it has `length` bytes or the file ends. Blocks."""
    data += read_all(fd, length - len(data), offset + len(data))
    return data, file_version(os.fstat(fd))
