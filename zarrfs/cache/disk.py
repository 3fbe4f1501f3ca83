"""DiskCache: blocks of targets in a directory that any number of processes and nodes share.

A block is a file whose name is a hash of target, version and range; directory.py writes and evicts the files. The
process that has created NAME.lease fetches the block, and others wait for it. For users: docs/remote-data.md.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import xxhash

from zarrfs.cache.block_request import BlockOnDisk
from zarrfs.cache.directory import BACK_OFF, BLOCKS, TOUCH, CacheDirectory
from zarrfs.errors import reason_of
from zarrfs.metrics.counters import COUNTS
from zarrfs.net.versions import TargetVersion
from zarrfs.system.buffers import Buffer, read_all, unfilled
from zarrfs.system.localfiles import read_cached

log = logging.getLogger(__name__)

LARGE = 1 << 20  # bytes: larger blocks are not read on the event loop, and may stay on the disk
_SCAN = 512 << 10  # bytes of a block that stays on the disk that are verified at a time
_HEAD = struct.Struct("<4sIQ")  # magic, length, XXH3 of the data, seeded with the name
_MAGIC = b"zfs3"

T = TypeVar("T")


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
        self._resume = 0.0  # monotonic; nothing is written before
        self._reported: set[str] = set()

    def version(self, target: str, now: bool = False) -> tuple[TargetVersion, float] | None:
        """Return (the version of `target` that its server last reported, when: seconds since 1970), if it is known."""
        text = self._try(lambda: self._load(_name_of(target), now))
        with contextlib.suppress(ValueError, KeyError, TypeError):
            about = json.loads(bytes(text or b""))
            return TargetVersion(about["tag"], about["size"]), float(about["seen"])
        return None

    def record(self, target: str, version: TargetVersion, seen: float) -> None:
        """Record that the server of `target` reported this version at the time `seen` (seconds since 1970)."""
        self._put(_name_of(target), json.dumps({**version._asdict(), "seen": seen}).encode())

    def read(
        self, target: str, version: TargetVersion, start: int, stop: int, now: bool = False, stays: bool = False
    ) -> Buffer | BlockOnDisk | None:  # fmt: skip
        """Return the bytes [start, stop) of `target`, verified; None if there is no block of exactly these bytes.

        `stays`: return a large block as a BlockOnDisk, if the directory is on a local file system.
        """
        name = _name_of(target, version, start, stop)
        large = stays and stop - start > LARGE and self._directory.local
        found = self._try(lambda: self._verify(name) if large else self._load(name, now))
        if found is not None:
            COUNTS["disk_hits_total"] += 1
        return found

    def piece(self, block: BlockOnDisk, at: int, length: int) -> Buffer | None:
        """Return `length` bytes of a verified block from `at` on; None if not all of them are in the page cache.

        Those that are not would be read from the disk again, unverified. Never waits for the disk.
        """
        try:
            with self._opened(block.name, now=True) as (file, _):
                data = read_cached(file, _HEAD.size + at, length)
        except (OSError, _Damaged):
            return None
        return data if len(data) == length else None

    def keeps(self, size: int) -> bool:
        """Return whether to write a block of `size` bytes: it is not too large, and no write has just failed."""
        return time.monotonic() >= self._resume and self._directory.fits(size)

    def write(self, target: str, version: TargetVersion, start: int, data: Buffer) -> None:
        """Write `data`, the bytes of `target` from `start` on. Drop it if there is no room."""
        self._put(_name_of(target, version, start, start + len(data)), data)

    def close(self) -> None:
        """Close the files."""
        self._directory.close()

    # -- leases

    def take(self, lease: str) -> bool | None:
        """Take a lease; return False if another process holds it, None if none can be taken now."""
        if time.monotonic() < self._resume:
            return None
        try:
            return self._directory.create(lease)
        except OSError as exc:
            self._failed(exc)
            return None

    def holder(self, lease: str) -> tuple[int, int] | None:
        """Return what distinguishes the holder of a lease from others; None if nobody holds it."""
        try:
            status = self._directory.stat(lease)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def release(self, lease: str) -> None:
        """Release a lease of this or another process."""
        self._directory.remove(BLOCKS, lease)

    # -- files

    def _try(self, read: Callable[[], T]) -> T | None:
        """Return the result of `read`; None if the file is absent, damaged or cannot be read."""
        try:
            return read()
        except BlockingIOError:
            raise
        except _Damaged as exc:
            COUNTS["disk_errors_total"] += 1
            self._directory.remove(BLOCKS, str(exc))
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ESTALE):
                self._report(exc, "some blocks cannot be read")
        return None

    def _load(self, name: str, now: bool) -> Buffer:
        """Return the verified bytes of a file. Raise OSError or _Damaged."""
        with self._opened(name, now) as (file, size):
            whole = read_cached(file, 0, size) if now else read_all(file, size, 0)
        data = memoryview(whole)[_HEAD.size :]
        if len(whole) < size or not _is_right(name, whole, xxhash.xxh3_64_intdigest(data, _seed(name)), size):
            raise BlockingIOError(errno.EAGAIN, "not in memory, or damaged") if now else _Damaged(name)
        return data

    def _verify(self, name: str) -> BlockOnDisk:
        """Verify a file without keeping its bytes. Raise OSError or _Damaged."""
        digest, buffer = xxhash.xxh3_64(seed=_seed(name)), memoryview(unfilled(_SCAN))
        with self._opened(name) as (file, size):
            head = os.pread(file, _HEAD.size, 0)
            at = len(head)
            while at < size and (count := os.preadv(file, [buffer[: size - at]], at)):
                digest.update(buffer[:count])
                at += count
        if at < size or not _is_right(name, head, digest.intdigest(), size):
            raise _Damaged(name)
        return BlockOnDisk(name, size - _HEAD.size)

    @contextlib.contextmanager
    def _opened(self, name: str, now: bool = False) -> Iterator[tuple[int, int]]:
        """Open a file and mark it as used; yield (descriptor, bytes of the file). Raise OSError or _Damaged."""
        try:
            file = self._directory.open_now(name) if now else self._directory.open(name)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
                raise _Damaged(name) from None
            raise
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size < _HEAD.size:
                raise _Damaged(name)
            if time.time() - status.st_mtime > TOUCH:
                if now:
                    raise BlockingIOError(errno.EAGAIN, "its times are to be changed")
                self._directory.touch(BLOCKS, name)
            yield file, status.st_size
        finally:
            os.close(file)

    def _put(self, name: str, data: Buffer) -> None:
        if not self.keeps(len(data)):
            return
        head = _HEAD.pack(_MAGIC, len(data), xxhash.xxh3_64_intdigest(data, _seed(name)))
        try:
            self._directory.write(BLOCKS, name, [head, data])
        except IsADirectoryError:
            pass
        except OSError as exc:
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


def lease_name(target: str, start: int, stop: int) -> str:
    """Return the name of the lease on a block. It contains no version, which may be unknown before the fetch."""
    return _name_of(target, start, stop) + ".lease"


def _name_of(target: str, *more: TargetVersion | int) -> str:
    """Return the name of the file for a range of a target in a version; without `more`, for its version record."""
    return hashlib.blake2b(repr((target, *more)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _seed(name: str) -> int:
    """Return a part of the checksum, so that a block in place of another is damaged."""
    return int(name[:16], 16)


def _is_right(name: str, head: Buffer, check: int, size: int) -> bool:
    """Return whether a file of `size` bytes that begins with `head` has the header for this checksum."""
    return bytes(head[: _HEAD.size]) == _HEAD.pack(_MAGIC, (size - _HEAD.size) & 0xFFFFFFFF, check)
