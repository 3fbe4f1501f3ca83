"""Blobs in local files, one per file, verified when they are first read.

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

import trio

from zarrfs.archives.blobrefs import hash_of, hash_of_file
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


class OpenBlob:
    """A verified blob of `size` bytes: in the file `fd`, or `data` in memory.

    `shown` is its name in errors.
    """

    __slots__ = ("data", "fd", "retired", "shown", "size", "users", "version")

    def __init__(
        self, shown: str, size: int, fd: int = -1, version: FileVersion | None = None, data: Buffer | None = None
    ) -> None:
        self.shown, self.size, self.fd, self.version, self.data = shown, size, fd, version, data
        self.users = 0
        self.retired = False  # True: the last user closes it


class BlobFiles:
    """An opener and verifier of blobs in local files. Methods block and are thread-safe."""

    def __init__(self) -> None:
        self.hashed = self.hashed_bytes = 0
        self._verdicts: LRU[tuple[str, FileVersion], bool] = LRU(MAX_VERDICTS)
        self._lock = threading.Lock()

    def examine(self, path: str, blobref: str, declared: int | None) -> OpenBlob:
        """Open the blob at a path and verify its length and hash. Must run in a worker thread of trio.

        Raise the errors that BlobReader documents.
        """
        with _about(path):
            fd = _opened(path)
            try:
                status = self._status(fd, path, declared)
                self._verify(fd, path, blobref, status)
                return OpenBlob(path, status.st_size, fd, file_version(status))
            except BaseException:
                os.close(fd)
                raise

    def whole(self, path: str, blobref: str, declared: int | None) -> memoryview | None:
        """Return all bytes of a blob, verified; None if it is larger than WHOLE_MAX. Raise as examine()."""
        try:
            fd = _opened(path)
            try:
                size = self._status(fd, path, declared).st_size
                if size > WHOLE_MAX:
                    return None
                data = read_all(fd, size, 0)
            finally:
                os.close(fd)
        except OSError as exc:  # without _about(), this method takes a tenth less time
            raise _read_error(path, exc) from exc
        if hash_of(data, blobref) != blobref:
            raise WrongHash(path, ANOTHER_HASH)
        self.count(size)
        return memoryview(data)

    def count(self, size: int) -> None:
        """Count a hashed blob of `size` bytes."""
        with self._lock:
            self.hashed += 1
            self.hashed_bytes += size

    def _status(self, fd: int, path: str, declared: int | None) -> os.stat_result:
        """Return the result of fstat(2). Raise OutOfRange if the blob's length is not the declared one."""
        status = os.fstat(fd)
        if status.st_dev == OWN_MOUNT.device:
            raise Loop(path, RULE)
        if not stat.S_ISREG(status.st_mode):
            raise ReadError(path, "not a regular file")
        if declared is not None and status.st_size != declared:
            raise wrong_length(path, status.st_size, declared)
        return status

    def _verify(self, fd: int, path: str, blobref: str, status: os.stat_result) -> None:
        """Raise WrongHash unless the bytes have the hash in `blobref`. The result is cached until the file changes."""
        version = file_version(status)
        known = (blobref, version)
        with self._lock:
            right = self._verdicts.use(known)
        if right is None:
            # a second write within one tick of the kernel's clock leaves the times unchanged: wait for the next tick
            age = time.time_ns() - status.st_ctime_ns
            if age < _TICK_NS:
                time.sleep(min(_TICK_NS, _TICK_NS - age) / 1e9)
            right = hash_of_file(fd, blobref, status.st_size) == blobref
            if file_version(os.fstat(fd)) != version:
                raise TargetChanged(path, "changed while it was verified")
            self.count(status.st_size)
            with self._lock:
                self._verdicts.put(known, right)
        if not right:
            raise WrongHash(path, ANOTHER_HASH)


async def read(blob: OpenBlob, offset: int, length: int) -> Buffer | None:
    """Read `length` bytes of a blob in a file; return None if the file has changed. Raise the errors of examine()."""
    with _about(blob.shown):
        data, version = await _pread(blob.fd, offset, length)
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
