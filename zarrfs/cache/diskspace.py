"""Room in the disk cache: a hard bound that all processes share, and who has to go when it is reached.

The file `usage` holds a number that is never below the sum of st_blocks in the cache directory. A process reserves
room there before it writes, a piece at a time, under flock(2); a file in `leases`, which it holds locked while it
lives, says how much of that it may still use. What a killed process had reserved stays in the number, an
overestimate, until the next scan.

When the bound is reached, or less than the free space to be left would be left, the process that notices counts
what is there and removes what was not used for longest, down to a low-water mark. Nothing is counted before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

from zarrfs.cache.diskfiles import BLOB, BLOBS, FOLDER, KEPT, TEMPORARY, Handle, Layout, checksum

PIECE = 32 << 20  # bytes that are reserved at a time, at most
PATIENCE = 0.5  # seconds that a writer waits for a lock, or for a scan; a reader never does
SYNC = 5.0  # seconds that a writer waits for another of its process, which may wait for the disk
LOW_WATER = 0.9  # of the bound: what is left by a scan, at most
SCAN_FREES = 1 << 30  # bytes that a scan frees at most where another's files fill the disk
ABANDONED = 3600.0  # seconds after which a temporary file has no writer any more
FOLDER_COST = 8192  # bytes: a new directory, and its entry
BOOKKEEPING = 32_768  # bytes that usage, leases and claims may grow by

_NUMBER = re.compile(rb"(\d{20}) ([0-9a-f]{16})\n")


def cost(size: int) -> int:
    """Bytes that a file of `size` bytes takes on the disk, with its part of the directory and some to spare."""
    return -(-(size + size // 256) // 4096) * 4096 + 512


@dataclasses.dataclass
class Ages:
    """Bytes by the time of their last use, coarser the more different times there are."""

    shift: int = 20  # of nanoseconds: a millisecond at first
    limit: int = 65_536
    bytes: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))

    def add(self, when_ns: int, size: int) -> None:
        """Count `size` bytes that were used at that time."""
        self.bytes[when_ns >> self.shift] += size
        while len(self.bytes) > self.limit:
            self.shift += 1
            old, self.bytes = self.bytes, defaultdict(int)
            for when, count in old.items():
                self.bytes[when >> 1] += count

    def before(self, excess: int) -> int:
        """The time (ns) such that what was used before holds `excess` bytes or little more."""
        for when in sorted(self.bytes):
            if excess <= 0:
                return when << self.shift
            excess -= self.bytes[when]
        return 1 << 100


class Space:
    """The room left in a cache directory. Thread-safe; methods raise OSError if the disk fails."""

    def __init__(self, layout: Layout, limit: int, min_free: int) -> None:
        self._layout, self._limit, self._min_free = layout, limit, min_free
        self._counts = threading.Lock()
        self._room = 0  # reserved, and not in use
        self._flying = 0  # in use by writes that go on
        self._lease: Handle | None = None
        self._lease_name = ""
        self._asking = threading.Lock()
        self._scanning = 0.0  # since then (monotonic); 0: not
        self._full = False  # the system has said so: a quota, or no more inodes
        self._pause = 0.0  # until then (monotonic) the lock is not asked for: another process scans
        self.evicted = 0  # files that scans have removed

    def resize(self, limit: int, min_free: int) -> None:
        """Other bounds from now on; what is over them goes when something is written next."""
        self._limit, self._min_free = limit, min_free

    def take(self, count: int) -> bool:
        """Reserve `count` bytes for a write, which done() ends; False to skip it. OSError if there is no room."""
        free = not self._full and self._free() - count >= self._min_free
        if free and self._take(count):
            return True
        if time.monotonic() < self._pause or count > self._limit // 2:
            return False
        if not self._ask():
            return False
        try:
            return (free and self._take(count)) or self._reserve(count)
        finally:
            self._asking.release()

    def done(self, count: int, taken: int) -> None:
        """End a write that took `count`; `taken` bytes of the disk are in use by it (0: it failed)."""
        with self._counts:
            self._flying -= count
            self._room -= max(0, taken - count)

    def full(self) -> None:
        """The system refuses to write more: the next take() makes room first."""
        self._full = True

    def forget(self) -> None:
        """Drop all reservations: the directory was removed."""
        with self._counts:
            self._room, self._lease = 0, None

    def close(self) -> None:
        """Give back what was reserved and not used."""
        if self._lease is None or self._flying or os.fstat(self._lease).st_nlink == 0:
            return
        with contextlib.suppress(OSError), self._locked(PATIENCE) as usage:
            if usage is not None and (total := usage.read()) is not None:
                usage.write(total - max(0, self._room))
                leases = self._layout.folder("leases")
                os.unlink(self._lease_name, dir_fd=leases)  # if not, the next scan does it
        self.forget()

    def recount(self, patience: float) -> bool:
        """Count anew after files were removed; False if the lock was not to be had within `patience` seconds."""
        with self._locked(patience) as usage:
            if usage is not None:
                usage.write(self._scan(None, 0))
            return usage is not None

    def _take(self, count: int) -> bool:
        with self._counts:
            if self._room < count:
                return False
            self._room -= count
            self._flying += count
            return True

    def _ask(self) -> bool:
        """Let one thread at a time ask for room; yields False if another one takes too long."""
        end = time.monotonic() + SYNC
        while not self._asking.acquire(timeout=0.02):
            now, scanning = time.monotonic(), self._scanning
            if now > end or (scanning and now - scanning > PATIENCE):
                return False
        return True

    def _free(self) -> int:
        about = os.fstatvfs(self._layout.folder("", make=True))
        return about.f_bavail * about.f_frsize

    def _reserve(self, count: int) -> bool:
        """Reserve a piece and take `count` of it, after a scan where it must be."""
        with self._locked(PATIENCE) as usage:
            if usage is None:
                self._pause = time.monotonic() + PATIENCE
                return False
            holders, found = self._leases(), self._lease is not None and os.fstat(self._lease).st_nlink > 0
            want = max(count, min(PIECE, self._limit // (8 * max(2, holders + (not found)))))
            short = max(self._min_free + count - self._free(), int(self._full))
            total = usage.read()
            with self._counts:
                lost = 0 if found else self._room + self._flying
            if total is None or total + lost + want > self._limit or short > 0:
                self._write_lease(0)
                usage.write(total := self._make_room(want, count, short))
            else:
                total += lost + (0 if found else FOLDER_COST)
            with self._counts:
                self._write_lease(self._room + self._flying + want)
                usage.write(total + want)
                self._room += want - count
                self._flying += count
        return True

    def _make_room(self, want: int, count: int, short: int) -> int:
        """Scan; returns the bytes in use and reserved.

        OSError(ENOSPC) if even so `want` is too much for the bound, or `count` for the disk.
        """
        self._scanning = time.monotonic()
        try:
            total = self._scan(want, short)
        finally:
            self._scanning, self._full = 0.0, False
        if total + want > self._limit:
            raise OSError(errno.ENOSPC, "cache_size leaves no room")
        if self._free() - count < self._min_free:
            raise OSError(errno.ENOSPC, "less than cache_min_free would be left")
        return total

    def _scan(self, want: int | None, short: int) -> int:
        """Count everything, and (with `want`) remove the least recently used; returns what is in use and reserved."""
        reserved, ages = self._reserved(), Ages()
        total = os.stat(self._layout.directory).st_blocks * 512 + BOOKKEEPING
        now = time.time()
        for folder, name, status in self._everything():
            size = status.st_blocks * 512
            if TEMPORARY.fullmatch(name) and now - status.st_mtime > ABANDONED and stat.S_ISREG(status.st_mode):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._layout.folder(folder))
                    continue
            total += size
            if folder and (KEPT if folder != BLOBS else BLOB).fullmatch(name):
                ages.add(status.st_mtime_ns, size)
        if want is not None:
            excess = total + reserved + want - int(self._limit * LOW_WATER)
            if short > 0:
                excess = max(excess, short + min(total // 10, SCAN_FREES))
            if excess > 0:
                total -= self._evict(ages.before(excess), excess)
        return total + reserved

    def _everything(self) -> Iterator[tuple[str, str, os.stat_result]]:
        """(directory, name, lstat) of all there is in LAYOUT, directories as "."."""
        for name, status in self._layout.entries(""):
            if not stat.S_ISDIR(status.st_mode) or name == ".":
                yield "", name, status
            elif FOLDER.fullmatch(name) or name in ("leases", "claims"):
                for inner, about in self._layout.entries(name):
                    yield name, inner, about
        for inner, about in self._layout.entries(BLOBS):
            yield BLOBS, inner, about

    def _evict(self, before_ns: int, excess: int) -> int:
        """Remove files last used before that time until `excess` bytes are free; returns how many are."""
        freed = 0
        for name, status in self._layout.kept():
            if freed >= excess:
                break
            if status.st_mtime_ns < before_ns:
                with contextlib.suppress(OSError):
                    self._layout.unlink(name)
                    freed += status.st_blocks * 512
                    self.evicted += 1
        return freed

    # -- the files of the bookkeeping

    @contextlib.contextmanager
    def _locked(self, patience: float) -> Iterator[_Usage | None]:
        """`usage`, locked; None if that takes longer than `patience` seconds. OSError where nothing can be locked."""
        end = time.monotonic() + patience
        while True:
            file = Handle(self._layout.open("", "usage", os.O_RDWR | os.O_CREAT, make=True))
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "usage is not a file")
            while not _lock(file):
                if time.monotonic() > end:
                    yield None
                    return
                time.sleep(0.005)
            with contextlib.suppress(FileNotFoundError):  # removed while we waited
                status = os.stat("usage", dir_fd=self._layout.folder(""), follow_symlinks=False)
                if os.path.samestat(status, os.fstat(file)):
                    break
        usage = _Usage(file)
        try:
            yield usage
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
            if usage.changed:  # after a power cut, the number must not be older than what it is about
                with contextlib.suppress(OSError):
                    os.fdatasync(file)

    def _write_lease(self, count: int) -> None:
        """Note under the lock of `usage` how much is reserved; 0 notes what is now."""
        if self._lease is None or os.fstat(self._lease).st_nlink == 0:
            name = secrets.token_hex(8)
            lease = Handle(self._layout.open("leases", name, os.O_RDWR | os.O_CREAT | os.O_EXCL, make=True))
            if not _lock(lease):
                raise OSError(errno.ENOLCK, "a new file is locked")
            self._lease, self._lease_name = lease, name
        os.pwrite(self._lease, b"%020d\n" % (count or self._room + self._flying), 0)

    def _leases(self) -> int:
        return sum(name != "." for name, _ in self._layout.entries("leases"))

    def _reserved(self) -> int:
        """Bytes that living processes may still write; the leases of dead ones are removed."""
        total = 0
        for name, _ in self._layout.entries("leases"):
            if name == ".":
                continue
            try:
                lease = Handle(self._layout.open("leases", name, os.O_RDWR))
            except FileNotFoundError:
                continue
            except OSError:  # of a user who does not share: it may be a whole piece
                total += PIECE
                continue
            if _lock(lease):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._layout.folder("leases"))
            else:
                text = os.pread(lease, 20, 0)
                total += int(text) if text.isdigit() else PIECE
        return total


class _Usage:
    """The file `usage` while it is locked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.changed = False

    def read(self) -> int | None:
        """The number; None where it is missing or damaged."""
        found = _NUMBER.fullmatch(os.pread(self._fd, 64, 0))
        return int(found[1]) if found and checksum(found[1]) == found[2] else None

    def write(self, total: int) -> None:
        """Set the number."""
        text = b"%020d" % max(0, total)
        os.pwrite(self._fd, b"%s %s\n" % (text, checksum(text)), 0)
        if os.fstat(self._fd).st_size != 38:  # a change of size would make fdatasync() wait for the journal
            os.ftruncate(self._fd, 38)
        self.changed = True


def _lock(fd: int) -> bool:
    """Lock a file unless another holds it. OSError (ENOLCK, ENOTSUP) where its file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
