"""DiskCache: blocks of targets in a directory that any number of processes and nodes share.

A block is a file whose name is a hash of its target and offset; directory.py writes and evicts the files. The process
that has created NAME.lease fetches the block, writes it into that file and renames it; others wait for it. Each file
records which version of the target its server has reported, and when. A file without data, the version record, holds
only that. For users: docs/remote-data.md.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import resource
import stat
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import xxhash

from zarrfs.cache.block_request import Block, BlockOnDisk
from zarrfs.cache.directory import BACK_OFF, FULL, TOUCH, CacheDirectory, Handle
from zarrfs.errors import reason_of
from zarrfs.metrics.counters import COUNTS
from zarrfs.net.versions import TargetVersion
from zarrfs.system.buffers import Buffer, read_all, unfilled
from zarrfs.system.localfiles import read_cached

log = logging.getLogger(__name__)

LARGE = 1 << 20  # bytes: larger blocks are not read on the event loop, and may stay on the disk
_SCAN = 512 << 10  # bytes read at a time to verify a block that stays on the disk
_FIELDS = struct.Struct("<4sdQQQ")  # magic, time, size of the target, length of the data, XXH3 of the data
_HEAD = 512  # bytes: _FIELDS, the tag of the version, zeros, XXH3 of all these; both are seeded with the name
_MAGIC = b"zfs4"

T = TypeVar("T")


class Stored(NamedTuple):
    """The contents of a file: a block, and the `version` that the server reported at the time `seen`, in seconds.

    If the block `is_target`, all of it, it needs no version record: record() removes such a block of another version.
    """

    version: TargetVersion
    seen: float
    is_target: bool
    block: Block = b""


class _Damaged(Exception):
    """A file is not the one that was written."""


class DiskCache:
    """Blocks in the directory `path`, of at most `size` bytes. Thread-safe; methods raise no errors of the disk.

    Methods may wait for the disk; with `now` they raise BlockingIOError instead.

    Every block is verified by a checksum. This only detects damage: users who may write to the directory can forge
    blocks, so share it only with trusted users. A failing or full disk is reported in the log, once for each reason.
    Then nothing is written for a while, but blocks are still read.
    """

    def __init__(self, path: str, size: int) -> None:
        self._directory = CacheDirectory(path, size)
        self._leases: dict[str, Handle] = {}  # the open files of leases that this process holds
        self._leases_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4  # the others are for connections
        self._resume = 0.0  # monotonic; nothing is written before
        self._reported: set[str] = set()

    def reported(self, target: str, start: int | None = None, now: bool = False) -> Stored | None:
        """Return the version record of `target`; with `start`, the version in the block there if that is later."""
        block = None
        if start is not None:
            block = self._try(functools.partial(self._says, _name_of(target, start), now), now)
            if block is not None and block.is_target:
                return block
        record = self._try(functools.partial(self._says, _name_of(target), now), now)
        return max(filter(None, (block, record)), key=lambda one: one.seen, default=None)

    def _says(self, name: str, now: bool = False) -> Stored:
        with self._opened(name, now) as (_, raw, size):
            return _unpack(name, raw, size)[0]

    def record(self, target: str, version: TargetVersion, seen: float) -> None:
        """Record that the server of `target` reported this version at the time `seen` (seconds since 1970)."""
        self._put(_name_of(target), b"", version, seen)
        first = _name_of(target, 0)
        found = self._try(functools.partial(self._says, first), False)
        if found is not None and found.version != version:
            self._directory.remove(first)

    def read(
        self, target: str, start: int, stop: int, version: TargetVersion | None = None, now: bool = False,
        whole: bool = True,
    ) -> Stored | None:  # fmt: skip
        """Return the bytes [start, stop) of `target`, verified: of `version`, or of any version if that is None.

        Return fewer bytes at the end of the target, and None if there is no such block at `start`. If not `whole`,
        return a large block as a BlockOnDisk, provided that the directory is on a local file system.
        """
        name = _name_of(target, start)

        def load() -> Stored | None:
            with self._opened(name, now) as (file, raw, size):
                found, check = _unpack(name, raw, size)
                kept, end = min(stop - start, size), min(stop, found.version.size)
                if version not in (None, found.version) or start + kept < end:
                    return None
                if now and size > LARGE:
                    raise BlockingIOError(errno.EAGAIN, "too large")
                large = not whole and kept > LARGE and self._directory.local
                data: Buffer = b""
                if not large:
                    data = read_cached(file, _HEAD, kept) if now else read_all(file, kept, _HEAD)
                if len(data) != (0 if large else kept) or _check(name, file, data, size, now) != check:
                    raise _Damaged(name)
            return found._replace(block=BlockOnDisk(name, raw, kept) if large else data)

        found = self._try(load, now)
        if found is not None:
            COUNTS["disk_hits_total"] += 1
        return found

    def piece(self, block: BlockOnDisk, at: int, length: int) -> Buffer | None:
        """Return `length` bytes of a verified block from `at` on; None if not all of them are in the page cache.

        Those that are not would be read from the disk again, unverified. Never waits for the disk.
        """
        try:
            with self._opened(block.name, now=True) as (file, raw, _):
                data = read_cached(file, _HEAD + at, length) if raw == block.head else b""
        except (OSError, _Damaged):
            return None
        return data if len(data) == length else None

    def keeps(self, size: int) -> bool:
        """Return whether to write a block of `size` bytes: it is not too large, and no write has just failed."""
        return time.monotonic() >= self._resume and self._directory.fits(size)

    def write(self, target: str, start: int, data: Buffer, version: TargetVersion, seen: float) -> None:
        """Write `data`, the bytes of `target` from `start` on, and end the lease; without space, discard them."""
        self._put(_name_of(target, start), data, version, seen)

    def close(self) -> None:
        """Release all leases, and close the files."""
        for name in list(self._leases):
            self._release(name)
        self._directory.close()

    # -- leases

    def take(self, target: str, start: int, patience: float) -> bool | None:
        """Take the lease on a block; return False if another process holds it, None if none can be taken now.

        The lease of another process ends after `patience` seconds.
        """
        if time.monotonic() < self._resume or len(self._leases) >= self._leases_max:
            return None
        name = _name_of(target, start)
        try:
            lease = self._directory.create_lease(name, patience)
        except OSError as exc:
            if exc.errno not in FULL:  # then write() makes room
                self._failed(exc)
            return None
        if lease is not None:
            self._leases[name] = lease
        return lease is not None

    def release(self, target: str, start: int) -> None:
        """Release a lease, if this process still holds it."""
        self._release(_name_of(target, start))

    def _release(self, name: str) -> None:
        if self._leases.pop(name, None) is not None:
            self._directory.remove_lease(name)

    # -- files

    def _try(self, read: Callable[[], T], now: bool) -> T | None:
        """Return the result of `read`; None if the file is absent, damaged or cannot be read."""
        try:
            return read()
        except BlockingIOError:
            raise
        except _Damaged as exc:
            if now:
                raise BlockingIOError(errno.EAGAIN, "not in memory, or damaged") from None
            COUNTS["disk_errors_total"] += 1
            self._directory.remove(str(exc))
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ESTALE):
                self._report(exc, "some blocks cannot be read")
        return None

    @contextlib.contextmanager
    def _opened(self, name: str, now: bool = False) -> Iterator[tuple[int, bytes, int]]:
        """Open a file and mark it as used; yield (descriptor, its head, bytes of data). Raise OSError or _Damaged."""
        try:
            file = self._directory.open_now(name) if now else self._directory.open(name)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
                raise _Damaged(name) from None
            raise
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size < _HEAD:
                raise _Damaged(name)
            if time.time() - status.st_mtime > TOUCH:
                if now:
                    raise BlockingIOError(errno.EAGAIN, "its times are to be changed")
                self._directory.touch(name)
            raw = bytes(read_cached(file, 0, _HEAD)) if now else os.pread(file, _HEAD, 0)
            yield file, raw, status.st_size - _HEAD
        finally:
            os.close(file)

    def _put(self, name: str, data: Buffer, version: TargetVersion, seen: float) -> None:
        head = _pack(name, data, version, seen)
        if head is None or not self.keeps(len(data)):
            return
        lease = self._leases.get(name)
        try:
            self._directory.write(name, [head, data], lease)
            self._leases.pop(name, None)
        except IsADirectoryError:
            pass
        except OSError as exc:
            if lease is None or exc.errno not in (errno.ENOENT, errno.ESTALE):  # the lease was removed, on NFS
                self._failed(exc)

    # -- disks that fail

    def _failed(self, exc: OSError) -> None:
        COUNTS["disk_errors_total"] += 1
        self._resume = time.monotonic() + BACK_OFF
        self._report(exc, "nothing is cached for now")

    def _report(self, exc: OSError, outcome: str) -> None:
        reason = reason_of(exc)
        if reason not in self._reported:
            self._reported.add(reason)
            log.warning("cache_dir=%s: %s; %s", self._directory.path, reason, outcome)


def _name_of(target: str, *start: int) -> str:
    """Return the name of the file for the block of a target at `start`; without it, for its version record."""
    return hashlib.blake2b(repr((target, *start)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _seed(name: str) -> int:
    """Return the seed of the checksums, so that a file under the name of another is found to be damaged."""
    return int(name[:16], 16)


def _pack(name: str, data: Buffer, version: TargetVersion, seen: float) -> bytes | None:
    """Return the head of a file; None if the version is too long for it."""
    try:
        fields = _FIELDS.pack(_MAGIC, seen, version.size, len(data), xxhash.xxh3_64_intdigest(data, _seed(name)))
    except struct.error:  # a server may report any size
        return None
    head = (fields + version.tag.encode("utf-8", "surrogatepass")).ljust(_HEAD - 8, b"\0")
    return head + xxhash.xxh3_64_digest(head, _seed(name)) if len(head) == _HEAD - 8 else None


def _unpack(name: str, raw: bytes, size: int) -> tuple[Stored, int]:
    """Parse the head of a file with `size` bytes of data; return its version and their checksum. Raise _Damaged."""
    head = raw[:-8]
    if raw[-8:] != xxhash.xxh3_64_digest(head, _seed(name)) or not raw.startswith(_MAGIC):
        raise _Damaged(name)
    _, seen, whole, length, check = _FIELDS.unpack_from(head)
    if length != size:
        raise _Damaged(name)
    tag = head[_FIELDS.size :].rstrip(b"\0").decode("utf-8", "surrogatepass")
    return Stored(TargetVersion(tag, whole), seen, size == whole), check


def _check(name: str, file: int, data: Buffer, length: int, now: bool) -> int:
    """Return the checksum of `length` bytes that begin with `data`; read the others from the file. Raise OSError."""
    digest, at = xxhash.xxh3_64(data, _seed(name)), len(data)
    buffer = memoryview(unfilled(min(_SCAN, length - at)))
    while at < length:
        count = os.preadv(file, [buffer[: length - at]], _HEAD + at, os.RWF_NOWAIT if now else 0)
        if not count:
            break
        digest.update(buffer[:count])
        at += count
    return digest.intdigest()
