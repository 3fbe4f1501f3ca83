"""Space in the disk cache: a bound that all processes share, and eviction of the least recently used files.

Space is reserved one segment at a time. Under the write lock, which is a lock on a byte of the index, a writer adds up
the sizes of all segments and creates one of full size. So stat(2) shows the reserved space, and a process that is
killed leaves nothing to undo. Blobs are separate files; the mark file in their directory records the sum of their
sizes, or more.

If the bound would be exceeded, or less free space would be left on the disk than must be, the least recently used
segments and blobs are removed, down to a low-water mark. Other processes notice that when they open a segment, or
check the one that they write to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence

from zarrfs.cache.diskfiles import BLOB, BLOBS, BLOBS_MARK, TEMPORARY, Handle, Layout, is_removed, segment_name
from zarrfs.system.buffers import Buffer, write_parts
from zarrfs.system.rangelocks import UNSUPPORTED, try_lock, unlock

SEGMENT_MAX, SEGMENT_LEAST = 64 << 20, 256 << 10  # bytes
# Creating a segment takes a stat of every other one, so a cache that would have more than SEGMENTS has larger ones.
SEGMENTS, SEGMENT_LARGEST = 4096, 1 << 30
SHARE = 64  # a segment takes at most 1/64 of the bound, unless that is less than SEGMENT_LEAST or than a block
SIZE_LEAST = 1 << 20  # bytes: with a smaller bound nothing is cached
LOCKS = 1 << 62  # the byte of the index that the write lock is on; leases are on later bytes (fetchlocks.py)
PATIENCE = 0.5  # seconds for which a writer waits for the write lock; readers do not need it
LOW_WATER = 0.9  # the fraction of the bound that eviction leaves at most
FREES_MAX = 1 << 30  # bytes that are evicted at most beyond the needed ones when other data fill the disk
ABANDONED = 3600.0  # the age (seconds) at which a temporary file counts as left behind by a killed writer
LEFT = 1 << 30  # bytes of the disk that stay free; a tenth of a small one
BOOKKEEPING = 32_768  # bytes by which directories may grow


def cost(size: int) -> int:
    """Return the bytes that a file of `size` bytes takes on the disk, with its directory entry and a margin."""
    return -(-(size + size // 256) // 4096) * 4096 + 512


def size_of(status: os.stat_result) -> int:
    """Return the bytes that a file takes, or will take when its reserved part is written."""
    return max(status.st_size, status.st_blocks * 512)


class Busy(Exception):
    """Another process holds the write lock, and has not released it within the time to wait."""


class Segment:
    """A segment that this process appends to. No other process does while it is open."""

    def __init__(self, number: int, file: Handle, at: int, size: int) -> None:
        self.number, self.file, self.at, self.size = number, file, at, size

    def append(self, parts: Sequence[Buffer], sync: bool = False) -> int:
        """Write `parts`, which fit, at the end, and `sync` them; return the offset of the first. Raise OSError."""
        at = self.at
        os.lseek(self.file, at, os.SEEK_SET)
        self.at += sum(map(len, parts))  # even if the write fails, so that no written bytes are overwritten
        write_parts(self.file, parts)
        if sync:
            os.fdatasync(self.file)
        return at

    def is_gone(self) -> bool:
        """Return whether the segment was evicted."""
        return is_removed(self.file)

    def close(self) -> None:
        """Give back the reserved space that is not used. Raise OSError."""
        if self.at < self.size:  # not otherwise, because ftruncate(2) renews the mtime, which counts as a use
            os.ftruncate(self.file, self.at)


class Space:
    """The space in a cache directory. Methods raise OSError.

    Call segment(), blob(), make_room() and count_blobs() under the write lock, that is, within locked().
    """

    def __init__(self, layout: Layout, limit: int) -> None:
        self._layout, self.limit = layout, limit
        self._full = False
        self.evicted = 0  # files

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the write lock, or none if the file system has no locks. Raise Busy if others keep it."""
        self._layout.is_gone()
        file, end = self._layout.index(make=True), time.monotonic() + PATIENCE
        try:
            while not (locked := try_lock(file, LOCKS)):
                if time.monotonic() > end:
                    raise Busy
                time.sleep(0.001)
        except OSError as exc:
            if exc.errno not in UNSUPPORTED:
                raise
            locked = False  # each process may exceed the bound by a segment, and rows may be lost
        try:
            yield
        finally:
            if locked:
                unlock(file, LOCKS)

    def fits(self, size: int) -> bool:
        """Return whether a block may be kept at all."""
        return size <= min(self.limit // 2, (1 << 32) - 1) and self.limit >= SIZE_LEAST

    def is_short(self) -> bool:
        """Return whether other data fill the disk, so that segments must be evicted before a write."""
        return self._full or self._free() < 0

    def full(self) -> None:
        """Note that the system refuses to write more, perhaps because of a quota: make_room() then evicts files."""
        self._full = True

    def segment(self, least: int) -> Segment:
        """Open a segment with room for `least` bytes: one that is less than half full, or a new one."""
        could_have = min(self.limit, self._total() + self._free())
        most = max(SEGMENT_MAX, min(could_have // SEGMENTS // 4096 * 4096, SEGMENT_LARGEST))
        size = max(least, min(most, max(SEGMENT_LEAST, could_have // SHARE // 4096 * 4096)))
        found = self._unfinished(size, least)
        if found is not None:
            self.make_room(size - found.at)
        if found is None or found.is_gone():
            self.make_room(size)
            number = secrets.randbits(64)
            file = Handle(self._layout.open("", segment_name(number), os.O_RDWR | os.O_CREAT | os.O_EXCL))
            _lock(file)
            found = Segment(number, file, 0, size)
        try:
            self._reserve(found.file, size)
        except BaseException:
            found.close()
            raise
        return found

    def _unfinished(self, size: int, least: int) -> Segment | None:
        """Return a segment that is less than half full and that no process writes to."""
        half = [(status.st_mtime_ns, number) for number, status in self._layout.segments()
                if status.st_size <= min(size // 2, size - least) and stat.S_ISREG(status.st_mode)]  # fmt: skip
        for _, number in sorted(half, reverse=True)[:4]:
            with contextlib.suppress(OSError):
                file = Handle(self._layout.open("", segment_name(number), os.O_RDWR))
                if _lock(file) and (at := os.fstat(file).st_size) <= size - least:
                    return Segment(number, file, at, size)
        return None

    def _reserve(self, file: Handle, size: int) -> None:
        if self._layout.local:
            os.posix_fallocate(file, 0, size)
        else:  # without fallocate(2) in the file system, posix_fallocate(3) would write to every block
            os.ftruncate(file, size)

    def blob(self, size: int) -> tuple[str, int]:
        """Create a file for a blob of `size` bytes in the directory of blobs; return (name, descriptor)."""
        count = cost(size)
        self._layout.folder(BLOBS, make=True)
        self.make_room(count)
        name = self._layout.scratch()
        file = self._layout.open(BLOBS, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.ftruncate(file, size)
        self._write_sum((self._read_sum() or 0) + count)
        return name, file

    def make_room(self, count: int) -> None:
        """Evict files until `count` more bytes fit the bounds. Raise OSError (ENOSPC) if they do not fit even then."""
        total, free = self._total(), self._free()
        short = count - free
        if total + count <= self.limit and short <= 0 and not self._full:
            return
        self.count_blobs()
        total = self._total()
        excess = total + count - int(self.limit * LOW_WATER) if total + count > self.limit else 0
        if short > 0 or self._full:
            excess = max(excess, short + min(total // 10, FREES_MAX), 1)
        total -= self._evict(excess)
        self._full = False
        if total + count > self.limit:
            raise OSError(errno.ENOSPC, "cache_size leaves no room")
        free = self._free()
        if free < count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _total(self) -> int:
        """Return the bytes that are used or reserved."""
        blobs = self._read_sum()
        total = BOOKKEEPING + (self.count_blobs() if blobs is None else blobs)
        for name, status in self._layout.entries(""):
            total += size_of(status) if name != "." else 0
        return total

    def _free(self) -> int:
        """Return the free bytes of the file system, less those that are left to others."""
        about = os.fstatvfs(self._layout.folder())
        return about.f_bavail * about.f_frsize - min(LEFT, about.f_blocks * about.f_frsize // 10)

    def _evict(self, excess: int) -> int:
        """Remove the least recently used files until `excess` bytes are freed; return the number of freed bytes."""
        if excess <= 0:
            return 0
        kept = [(status.st_mtime_ns, size_of(status), "", segment_name(number))
                for number, status in self._layout.segments()]  # fmt: skip
        kept += [(status.st_mtime_ns, cost(status.st_size), BLOBS, name) for name, status in self._layout.blobs()]
        freed = blobs = 0
        for _, size, folder, name in sorted(kept):
            if freed >= excess:
                break
            if self._layout.remove(folder, name):
                freed += size
                blobs += size if folder == BLOBS else 0
                self.evicted += 1
        if blobs:
            self._write_sum(max(0, (self._read_sum() or 0) - blobs))
        return freed

    # -- the sum of the blobs

    def count_blobs(self) -> int:
        """Add up the sizes of blobs, and record and return the sum. Remove files that killed writers have left."""
        total, now, found = 0, time.time(), False
        for name, status in self._layout.entries(BLOBS):
            found = True
            old = TEMPORARY.fullmatch(name) and now - status.st_mtime > ABANDONED and stat.S_ISREG(status.st_mode)
            if not (old and self._layout.remove(BLOBS, name)):
                total += cost(status.st_size) if BLOB.fullmatch(name) or TEMPORARY.fullmatch(name) else 0
                total += size_of(status) if name == "." else 0
        if found:
            self._write_sum(total)
        return total

    def _read_sum(self) -> int | None:
        """Return the recorded upper bound of the bytes of blobs; None if there is no record."""
        try:
            file = Handle(self._layout.open(BLOBS, BLOBS_MARK, os.O_RDONLY))
        except FileNotFoundError:
            return 0
        text = os.pread(file, 64, 0)
        return int(text) if len(text) == 21 and text[:20].isdigit() and text[20:] == b"\n" else None

    def _write_sum(self, total: int) -> None:
        file = Handle(self._layout.open(BLOBS, BLOBS_MARK, os.O_WRONLY | os.O_CREAT))
        os.pwrite(file, b"%020d\n" % total, 0)
        os.ftruncate(file, 21)


def _lock(file: Handle) -> bool:
    """Lock a segment for appending, until it is closed; False if another process has it, or if there are no locks."""
    try:
        return try_lock(file, 0)
    except OSError:
        return False
