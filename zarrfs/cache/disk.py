"""DiskCache: blocks of targets in a directory that any number of processes and nodes share.

A block is a file whose name is a hash of target, version and range; directory.py writes and evicts the files. The
process that has created NAME.part fetches the block, and others wait for it. For users: docs/remote-data.md.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import json
import logging
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import xxhash

from zarrfs.cache.block_request import BlockOnDisk
from zarrfs.cache.directory import BACK_OFF, BLOCKS, TOUCH, CacheDirectory
from zarrfs.concurrency.lru import LRU
from zarrfs.errors import reason_of
from zarrfs.metrics.counters import COUNTS
from zarrfs.net.versions import TargetVersion
from zarrfs.system.buffers import Buffer, unfilled
from zarrfs.system.localfiles import read_cached

log = logging.getLogger(__name__)

UNIT = 256 << 10  # bytes of a target in which a run, a range of many values, is cut
REPORT_AGAIN = 3600.0  # seconds after which the same warning is logged again
SKEW = 300.0  # seconds by which the clocks of nodes may differ
_HEAD = struct.Struct("<4sIQ")  # magic, length, XXH3 of the data, seeded with the name
_MAGIC = b"zfs3"
LARGE = 1 << 20  # bytes: larger blocks are not read on the event loop, and may stay on the disk
_SCAN = 512 << 10  # bytes of a block that stays on the disk that are verified at a time
_HELD = 8  # units in memory, because a small value in a run is read and verified with its whole unit
_SHORTEST, _LONGEST, _SHARE = 0.005, 0.25, 0.3  # pauses of a waiter: seconds, and a fraction of the time waited so far

T = TypeVar("T")


class _Damaged(Exception):
    """A file is not the one that was written."""


class Turn(enum.Enum):
    """The outcome of another attempt at a lease."""

    WAIT = 1
    OURS = 2  # this process has the lease now; the block may already be on the disk
    FREE = 3  # do not wait any longer


class Lease:
    """The lease on a block: this process holds it if `held`, otherwise another one does."""

    __slots__ = ("began", "file", "held", "name", "since", "stolen")

    def __init__(self, name: str, held: bool) -> None:
        self.name, self.held, self.stolen = name, held, False
        self.file = (0, 0)  # inode and time of the holder's file
        self.began = self.since = time.monotonic()  # start of the whole wait; of the wait for this holder

    def pause(self) -> float:
        """Return the seconds until the next attempt."""
        return min(max(_SHORTEST, (time.monotonic() - self.began) * _SHARE), _LONGEST)


class DiskCache:
    """Blocks in the directory `path`, of at most `size` bytes. Thread-safe; methods raise no errors of the disk.

    Methods may wait for the disk; with `now` they raise BlockingIOError instead.

    Every block is verified by a checksum. This only detects damage: users who may write to the directory can forge
    blocks, so share it only with trusted users. A failing or full disk is reported in the log, once in REPORT_AGAIN
    seconds for each reason. Then nothing is written for a while, but blocks are still read.
    """

    def __init__(self, path: str, size: int) -> None:
        self._directory = CacheDirectory(path, size)
        self._lock = threading.Lock()
        self._held: LRU[str, Buffer] = LRU(_HELD)  # units read last, by name
        self._until = 0.0  # monotonic; nothing is written before
        self._reported: dict[str, float] = {}

    @property
    def local(self) -> bool:
        """Return whether the directory is known to be on a file system that never waits for a server."""
        return self._directory.local

    def version(self, target: str, now: bool = False) -> tuple[TargetVersion, float] | None:
        """Return (the version of `target` that its server last reported, when: seconds since 1970), if it is known."""
        text = self._get(_name_of(target), now)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            about = json.loads(bytes(text or b""))
            if about["seen"] < time.time() + SKEW:
                return TargetVersion(about["tag"], about["size"]), about["seen"]
        return None

    def remember(self, target: str, version: TargetVersion, seen: float) -> None:
        """Record that the server of `target` reported this version at the time `seen` (seconds since 1970)."""
        self._put(_name_of(target), json.dumps({**version._asdict(), "seen": seen}).encode())

    def read(
        self, target: str, version: TargetVersion, start: int, stop: int, now: bool = False, stays: bool = False
    ) -> Buffer | BlockOnDisk | None:  # fmt: skip
        """Return exactly the bytes [start, stop) of `target`, verified; None if they are not cached.

        `now`: raise BlockingIOError instead of waiting. `stays`: return a large block as a BlockOnDisk.
        """
        name = _name_of(target, version, start, stop)
        data: Buffer | BlockOnDisk | None = None
        if stop - start <= UNIT:
            data = self._from_units(target, version, start, stop, now, held=True)
        if stays and stop - start > LARGE and self.local:
            data = self._try(lambda: self._verify(name))
        if data is None:
            data = self._get(name, now)
        if data is None or _length(data) != stop - start:
            data = self._from_units(target, version, start, stop, now)
        if data is not None:
            COUNTS["disk_hits_total"] += 1
        return data

    def part(self, block: BlockOnDisk, at: int, length: int) -> Buffer | None:
        """Return `length` bytes of a verified block from `at` on; None if not all of them are in the page cache.

        Those that are not would be read from the disk again, unverified. Never waits for the disk.
        """
        try:
            with self._opened(block.name, now=True) as (file, _):
                data = read_cached(file, _HEAD.size + at, length)
        except (OSError, _Damaged):
            return None
        return data if len(data) == length else None

    def write(self, target: str, version: TargetVersion, start: int, data: Buffer, run: bool = False) -> None:
        """Write `data`, the bytes of `target` from `start` on. Drop it if there is no room.

        A block is found again by its exact (start, stop). A `run`, a range of many values, is cut into units; a range
        is found again if all the units that it touches were whole.
        """
        view = memoryview(data).cast("B")
        if not run:
            self._put(_name_of(target, version, start, start + len(view)), view)
            return
        stop = start + len(view)
        for unit in range(-(-start // UNIT), -(-stop // UNIT)):
            low, high = unit * UNIT, min((unit + 1) * UNIT, version.size)
            if high <= stop:
                self._put(_name_of(target, version, "unit", unit), view[low - start : high - start])

    def drop(self) -> None:
        """Count a block that is not written, because too many wait."""

    def keeps(self) -> bool:
        """Return whether blocks are written at the moment."""
        return time.monotonic() >= self._until

    def close(self) -> None:
        """Close the files."""
        self._directory.close()

    # -- leases

    def take(self, target: str, start: int, stop: int) -> Lease | None:
        """Return the lease on a block, held or not; None if the caller must fetch without one."""
        lease = Lease(_name_of(target, start, stop) + ".part", False)
        if not self.keeps() or self._attempt(lease) is Turn.FREE:
            return None
        return lease

    def look(self, lease: Lease, patience: float) -> Turn:
        """Try again to take a lease of another process; after `patience` seconds, take it from its holder."""
        turn = self._attempt(lease)
        if turn is not Turn.WAIT:
            return turn
        try:
            status = self._directory.stat(lease.name)
        except OSError:  # it has just been released
            return Turn.WAIT
        if (file := (status.st_ino, status.st_mtime_ns)) != lease.file:
            lease.file, lease.since = file, time.monotonic()
        elif time.monotonic() - lease.since >= patience:
            if lease.stolen:
                return Turn.FREE
            lease.stolen = True
            self._directory.remove(BLOCKS, lease.name)
            return self._attempt(lease)
        return Turn.WAIT

    def release(self, lease: Lease) -> None:
        """Release a lease if this process holds it."""
        if lease.held:
            lease.held = False
            self._directory.remove(BLOCKS, lease.name)

    def _attempt(self, lease: Lease) -> Turn:
        try:
            lease.held = self._directory.create(lease.name)
        except OSError as exc:
            self._failed(exc)
            return Turn.FREE
        return Turn.OURS if lease.held else Turn.WAIT

    # -- files

    def _get(self, name: str, now: bool = False) -> Buffer | None:
        return self._try(lambda: self._load(name, now))

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
            head, data = bytearray(_HEAD.size), unfilled(size)
            try:
                count = os.preadv(file, [head, data], 0, os.RWF_NOWAIT if now else 0)
            except OSError as exc:
                raise BlockingIOError(errno.EAGAIN, "not in memory") if now else exc from None
            while count < _HEAD.size + size:
                if now:
                    raise BlockingIOError(errno.EAGAIN, "not in memory")
                more = os.preadv(file, [memoryview(data)[max(0, count - _HEAD.size) :]], count)
                if not more or count < _HEAD.size:
                    raise _Damaged(name)
                count += more
        if not _is_right(name, head, size, xxhash.xxh3_64_intdigest(data, _seed(name))):
            raise BlockingIOError(errno.EAGAIN, "damaged") if now else _Damaged(name)
        return data

    def _verify(self, name: str) -> BlockOnDisk:
        """Verify a file without keeping its bytes. Raise OSError or _Damaged."""
        digest, buffer = xxhash.xxh3_64(seed=_seed(name)), memoryview(unfilled(_SCAN))
        with self._opened(name) as (file, size):
            head, at = os.pread(file, _HEAD.size, 0), 0
            while at < size:
                count = os.preadv(file, [buffer[: size - at]], _HEAD.size + at)
                if not count:
                    raise _Damaged(name)
                digest.update(buffer[:count])
                at += count
        if not _is_right(name, head, size, digest.intdigest()):
            raise _Damaged(name)
        return BlockOnDisk(name, size)

    @contextlib.contextmanager
    def _opened(self, name: str, now: bool = False) -> Iterator[tuple[int, int]]:
        """Open a file and mark it as used; yield (descriptor, bytes of its data). Raise OSError or _Damaged."""
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
            yield file, status.st_size - _HEAD.size
        finally:
            os.close(file)

    def _put(self, name: str, data: Buffer) -> None:
        if not self.keeps() or not self._directory.fits(len(data)):
            return
        check = xxhash.xxh3_64_intdigest(data, _seed(name))
        try:
            self._directory.write(BLOCKS, name, [_HEAD.pack(_MAGIC, len(data), check), data])
        except IsADirectoryError:
            pass
        except OSError as exc:
            self._failed(exc)

    def _from_units(
        self, target: str, version: TargetVersion, start: int, stop: int, now: bool, held: bool = False
    ) -> Buffer | None:  # fmt: skip
        """Return a range cut out of the units of runs; with `held`, only out of those in memory."""
        parts = []
        for unit in range(start // UNIT, -(-stop // UNIT)):
            low, high = unit * UNIT, min((unit + 1) * UNIT, version.size)
            name = _name_of(target, version, "unit", unit)
            with self._lock:
                data = self._held.use(name)
            if data is None and not held:
                data = self._get(name, now)
            if data is None or len(data) != high - low:
                return None
            with self._lock:
                self._held.put(name, data)
            parts.append(memoryview(data)[max(start - low, 0) : stop - low])
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    # -- disks that fail

    def _failed(self, exc: OSError) -> None:
        COUNTS["disk_errors_total"] += 1
        self._until = time.monotonic() + BACK_OFF
        self._report(exc, "nothing is cached for now")

    def _report(self, exc: OSError, outcome: str) -> None:
        reason, now = reason_of(exc), time.monotonic()
        with self._lock:
            news = now - self._reported.get(reason, -REPORT_AGAIN) >= REPORT_AGAIN
            if news:
                self._reported[reason] = now
        if news:
            log.warning("cache_dir=%s: %s; %s", self._directory.path, reason, outcome)


def _length(data: Buffer | BlockOnDisk) -> int:
    return data.length if isinstance(data, BlockOnDisk) else len(data)


def _name_of(target: str, *parts: TargetVersion | str | int) -> str:
    """Return the name of the file for a range of a target in a version; without `parts`, for its version record."""
    return hashlib.blake2b(repr((target, *parts)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _seed(name: str) -> int:
    """Return a part of the checksum, so that a block in place of another is damaged."""
    return int(name[:16], 16)


def _is_right(name: str, head: Buffer, size: int, check: int) -> bool:
    return bytes(head) == _HEAD.pack(_MAGIC, size & 0xFFFFFFFF, check)
