"""DiskCache: blocks of targets in a directory that any number of processes and nodes share.

A block is appended to a segment, and a row of the index has its place there. Files: diskfiles.py. Index: diskindex.py.
Space: diskspace.py. Leases on blocks to fetch: fetchlocks.py. For users: docs/remote-data.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import xxhash

from zarrfs.cache.diskfiles import TOUCH, Layout, hash_of, segment_name
from zarrfs.cache.diskindex import PIECE_KEY, Index, IndexRow
from zarrfs.cache.diskspace import Busy, Segment, Space
from zarrfs.cache.fetchlocks import FetchLocks, Lease
from zarrfs.concurrency.lru import LRU
from zarrfs.errors import reason_of
from zarrfs.net.versions import TargetVersion
from zarrfs.system.buffers import Buffer, read_all, unfilled
from zarrfs.system.localfiles import read_cached

log = logging.getLogger(__name__)

QUEUE = 64 << 20  # bytes that may wait to be written
UNIT = 1 << 20  # bytes: runs of tiny values are cut at multiples of this offset
PIECES = 32  # separate pieces of a unit that are kept
PIECES_HELD = 8  # pieces in memory, because a tiny value on disk is read and verified with its whole piece
BACK_OFF, BACK_OFF_MAX = 30.0, 600.0  # seconds without writes after a failure; doubled as long as writes fail
# Seconds without leases after blocks were dropped because the write lock was busy: the next ones may be dropped, too.
CROWDED = 1.0
REPORT_AGAIN = 3600.0  # seconds after which the same warning is logged again
SKEW = 300.0  # seconds by which the clocks of nodes may differ
_NOW = 1 << 20  # bytes of the largest block that is read on the event loop
_SCAN = 512 << 10  # bytes that are read and verified at a time
_BATCH = 16 << 20  # bytes of blocks that are written before their rows, by which other processes find them
_IDLE = 5.0  # seconds without a write after which a segment is closed
_INDEX_SHARE = 16  # the index does not grow by more than 1/16 of the bound
_RECORD_MAX = 64 << 10  # bytes of a version record

_WRONG = "wrong checksum"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DamagedBlock(Exception):
    """The bytes of a row are not those that were written; str() is the reason."""


class _Put(NamedTuple):
    """A block that waits to be written. A `piece` may be joined to other pieces of its unit."""

    key: bytes
    target: bytes
    start: int  # as in IndexRow
    data: memoryview
    piece: bool = False


_Found = TypeVar("_Found", bound=tuple[object, bool])

_Job = _Put | Lease | IndexRow | int  # write a block, release a lease, free a damaged row, mark a segment as used


class DiskCache:
    """Blocks in a directory. Thread-safe; methods do not raise errors of the disk.

    write(), remember() and release() queue work for a thread and do not wait; version() and read() also find queued
    blocks. These two may wait for the disk; with `now` they raise BlockingIOError instead.

    Every block is verified by a checksum. This only detects damage: users who may write to the directory can forge
    blocks, so share it only with trusted users. A failing or full disk is reported in the log, once in REPORT_AGAIN
    seconds for each reason. Then nothing is written for a while, but blocks are still read.
    """

    def __init__(self, directory: str, size: int, queue: int = QUEUE) -> None:
        """Keep at most `size` bytes, and queue at most `queue` bytes.

        Nothing on the disk is accessed yet.
        """
        self._layout = Layout(directory)
        self._space = Space(self._layout, size)
        self._index: Index | None = None
        self._lock = threading.Condition()
        self._counts = dict.fromkeys(
            ("hits", "misses", "bytes_read", "writes", "bytes_written", "dropped", "errors"), 0
        )
        self._queue_max, self._queued = queue, 0  # bytes
        self._queue: deque[_Job] = deque()
        self._waiting: dict[bytes, list[_Put]] = {}  # queued or being written; by key, pieces by that of their unit
        self._working = self._closed = False
        self._worker: threading.Thread | None = None
        self._segment: Segment | None = None  # the worker's
        self._held: LRU[tuple[int, int], bytes] = LRU(PIECES_HELD)  # pieces read last, by segment and offset
        self._pause = 0.0  # seconds of the present or latest back-off; 0 after a successful write
        self._until = 0.0  # monotonic; nothing is written before
        self._crowded = 0.0  # monotonic; no leases are taken before
        self._reported: dict[str, float] = {}
        self.leases = FetchLocks(self._layout, self._keeps)

    @property
    def local(self) -> bool:
        """Return whether the directory is known to be on a file system that never waits for a server."""
        return self._layout.local

    def version(self, target: str, newer_than: float, now: bool = False) -> TargetVersion | None:
        """Return the version of `target` that its server last reported, if after `newer_than` (seconds since 1970)."""
        key = hash_of(target)
        queued = self._waiting.get(key)
        if queued:
            seen, data = queued[-1].start, bytes(queued[-1].data)
        else:
            row = self._find(key, now)
            text = None if row is None or row.length > _RECORD_MAX else self._load(row, now)
            if row is None or text is None:
                return None
            seen, data = row.start, bytes(text)
        if not newer_than < seen / 1e9 < time.time() + SKEW:
            return None
        try:
            return _parse_record(data)
        except DamagedBlock:
            return None

    def remember(self, target: str, version: TargetVersion) -> None:
        """Record that the server of `target` has just reported this version."""
        about = version._asdict()
        key = hash_of(target)
        self._enqueue(_Put(key, key[:8], time.time_ns(), memoryview(json.dumps(about).encode())))

    def read(
        self, target: str, version: TargetVersion, start: int, stop: int, again: bool = False, now: bool = False,
        allow: Callable[[int], bool] = lambda size: True, stays: bool = False,
    ) -> Buffer | IndexRow | None:  # fmt: skip
        """Return exactly the bytes [start, stop) of `target`, verified; None if they are not cached.

        `again`: the caller has tried before, so do not count a miss. `now`: raise BlockingIOError instead of waiting,
        and also for more bytes than should be copied on the event loop, or than `allow` permits. `stays`: for a large
        block that part() can read, return its row instead of its bytes.
        """
        data: Buffer | IndexRow | None = None
        if not self._closed and start < stop:
            if now and stop - start > _NOW:
                raise BlockingIOError(errno.EAGAIN, "too long")
            data = self._block(_block_key(target, version, start, stop), now, allow, stays)
            if data is None:  # also for large ranges, which may have come in one request with tiny values
                data = self._from_units(target, version, start, stop, now, allow)
        size = data.length if isinstance(data, IndexRow) else len(data or b"")
        if size != stop - start:
            data, size = None, 0  # from a forged row
        with self._lock:
            if data is not None or not again:
                self._counts["misses" if data is None else "hits"] += 1
            self._counts["bytes_read"] += size
        return data

    def part(self, row: IndexRow, at: int, length: int) -> Buffer | None:
        """Return `length` bytes of a verified block from `at` on; None if not all of them are in the page cache.

        Those that are not would be read from the disk again, unverified. Never waits for the disk.
        """
        try:
            with _opened(self._layout, row, now=True) as (fd, due):
                data = read_cached(fd, row.offset + at, length)
        except (OSError, DamagedBlock):
            return None
        if due:
            self._enqueue(row.segment)
        return data if len(data) == length else None

    def write(self, target: str, version: TargetVersion, start: int, data: Buffer, run: bool = False) -> None:
        """Queue `data`, the bytes of `target` from `start` on, for writing. Drop it if there is no room.

        A block is found again only by its exact (start, stop). A `run`, many tiny values that came in one request, is
        cut into units; a range is found again if each unit that it touches has its part of the range in one piece.
        """
        view = memoryview(data).cast("B")
        if not view:
            return
        of, stop = hash_of(target)[:8], start + len(view)
        if not run:
            self._enqueue(_Put(_block_key(target, version, start, stop), of, start, view))
            return
        for unit in range(start // UNIT, -(-stop // UNIT)):
            low, high = max(start, unit * UNIT), min(stop, (unit + 1) * UNIT)
            part = view[low - start : high - start]
            self._enqueue(_Put(_unit_key(target, version, unit), of, low, part, piece=True))

    def release(self, lease: Lease) -> None:
        """Release a lease when all blocks queued before are visible to other processes, or dropped."""
        if not lease.held or self._closed or not self._enqueue(lease):
            self.leases.release(lease)

    def stats(self) -> dict[str, int]:
        """Return counts since the start: "dropped" blocks were not written; "evicted" are files."""
        with self._lock:
            counts = {**self._counts, "evicted": self._space.evicted, "queued": self._queued}
        return {**counts, **self.leases.stats()}

    def close(self, seconds: float = 60.0) -> None:
        """Close the cache: find and accept no blocks any more, and write the queued ones, for at most `seconds`."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._worker is not None:
            self._worker.join(seconds)
            with self._lock:
                self._queue.clear()  # so that the worker ends, if it is only slow
        self._index = None
        self._layout.forget()

    # -- reading

    def _open(self) -> Index:
        """Return the present index on the disk. Raise OSError."""
        self._layout.is_gone()
        file, index = self._layout.index(), self._index
        if index is None or index.file is not file:
            if index is None and (old := self._layout.old()):
                self._report_old(old)
            index = self._index = Index(file)
        return index

    def _search(self, search: Callable[[Index], list[IndexRow]], now: bool) -> list[IndexRow]:
        """Run `search` on the index."""
        index = self._index
        if now and (index is None or not self._layout.local):
            raise BlockingIOError(errno.EAGAIN, "may have to wait for a server")
        try:
            return search(index if now and index is not None else self._open())
        except FileNotFoundError:
            pass
        except BlockingIOError:
            raise
        except OSError as exc:
            self._unreadable(exc)
        return []

    def _find(self, key: bytes, now: bool) -> IndexRow | None:
        found = self._search(lambda index: [] if (row := index.find(key, now)) is None else [row], now)
        return found[0] if found else None

    def _load(self, row: IndexRow, now: bool) -> Buffer | None:
        """Return the verified bytes of a row; None if they are damaged or cannot be read."""
        found = self._try(row, lambda layout, row: load(layout, row, now))
        return None if found is None else found[0]

    def _try(self, row: IndexRow, read: Callable[[Layout, IndexRow], _Found]) -> _Found | None:
        """Return the result of `read` (load() or verify()); None if the bytes are damaged or cannot be read."""
        try:
            found = read(self._layout, row)
        except BlockingIOError:
            raise
        except FileNotFoundError:  # evicted
            return None
        except DamagedBlock:
            self._count("errors")
            self._enqueue(row)
            return None
        except OSError as exc:
            self._unreadable(exc)
            return None
        if found[1]:
            self._enqueue(row.segment)
        return found

    def _block(
        self, key: bytes, now: bool, allow: Callable[[int], bool], stays: bool
    ) -> Buffer | IndexRow | None:  # fmt: skip
        queued = self._waiting.get(key)
        if queued:
            return queued[-1].data
        row = self._find(key, now)
        if row is None:
            return None
        if now and not allow(row.length):
            raise BlockingIOError(errno.EAGAIN, "others have their turn")
        if stays and row.length > _NOW:
            with contextlib.suppress(BlockingIOError):  # part() cannot open the segment now, or on this system
                return row if self._try(row, verify) else None
        return self._load(row, now)

    def _from_units(
        self, target: str, version: TargetVersion, start: int, stop: int, now: bool, allow: Callable[[int], bool]
    ) -> bytes | None:
        parts = []
        for unit in range(start // UNIT, (stop - 1) // UNIT + 1):
            low, high = max(start, unit * UNIT), min(stop, (unit + 1) * UNIT)
            part = self._from_unit(_unit_key(target, version, unit), low, high, now, allow)
            if part is None:
                return None
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _from_unit(self, key: bytes, low: int, high: int, now: bool, allow: Callable[[int], bool]) -> bytes | None:
        for put in self._waiting.get(key, ()):
            if put.start <= low and high <= put.start + len(put.data):
                return bytes(put.data[low - put.start : high - put.start])
        for row in self._search(lambda index: index.pieces(key, now), now):
            if row.start <= low and high <= row.stop and row.length <= UNIT:
                with self._lock:
                    data = self._held.get((row.segment, row.offset))
                if data is None:
                    if now and not allow(row.length):
                        raise BlockingIOError(errno.EAGAIN, "others have their turn")
                    found = self._load(row, now)
                    if found is None:
                        continue
                    data = bytes(found)
                with self._lock:
                    self._held.put((row.segment, row.offset), data)
                return data[low - row.start : high - row.start]
        return None

    def _unreadable(self, exc: OSError) -> None:
        if exc.errno not in (errno.ESTALE, errno.ENOTDIR):  # removed by another node, or no directory yet
            self._count("errors")
            self._report(exc, "cannot be read")

    # -- the queue of the worker

    def _enqueue(self, job: _Job) -> bool:
        """Queue a job for the worker. Return False if it is dropped.

        Blocks are dropped for lack of room, after a failure and after close(); any job if no thread can be started.
        """
        size = len(job.data) if isinstance(job, _Put) else 0
        with self._lock:
            if isinstance(job, _Put):
                room = not self._queued or self._queued + size <= self._queue_max
                if self._closed or time.monotonic() < self._until or not room or not self._space.fits(size):
                    self._counts["dropped"] += not self._closed
                    return False
            if self._worker is None and not self._start():  # without a worker the job would stay in the queue
                self._counts["dropped"] += isinstance(job, _Put)
                return False
            if isinstance(job, _Put):
                self._waiting.setdefault(job.key, []).append(job)
            self._queue.append(job)
            self._queued += size
            if not self._working:
                self._lock.notify_all()
            return True

    def _start(self) -> bool:
        """Start the worker; False if the system has no thread for it. The next job tries again."""
        worker = threading.Thread(target=self._work, name="disk cache", daemon=True)
        try:
            worker.start()
        except RuntimeError as exc:
            log.debug("cache_dir=%s: %s", self._layout.directory, exc)
            return False
        self._worker = worker
        return True

    def _work(self) -> None:
        while True:
            with self._lock:
                self._working = False
                self._lock.wait_for(lambda: self._queue or self._closed, _IDLE if self._segment else None)
                batch: list[_Job] = []
                size = 0
                while self._queue and size < _BATCH:
                    batch.append(self._queue.popleft())
                    size += len(batch[-1].data) if isinstance(batch[-1], _Put) else 0
                ends = self._closed and not batch
                self._working = bool(batch)
            if not batch:
                self._close_segment()
            if ends:
                return
            try:
                self._do(batch)
            except Exception:
                log.exception("the cache on disk failed")
            finally:
                self._done(batch, size)

    def _done(self, batch: list[_Job], size: int) -> None:
        with self._lock:
            self._queued -= size
            for job in batch:
                if isinstance(job, _Put):
                    others = [put for put in self._waiting[job.key] if put is not job]
                    if others:
                        self._waiting[job.key] = others
                    else:
                        del self._waiting[job.key]
        for job in batch:
            if isinstance(job, Lease):
                self.leases.release(job)

    def _do(self, batch: list[_Job]) -> None:
        puts = [job for job in batch if isinstance(job, _Put)]
        for job in batch:
            if isinstance(job, int):
                with contextlib.suppress(OSError):  # read-only, another user's, or evicted
                    self._layout.touch("", segment_name(job))
            elif isinstance(job, IndexRow):
                with contextlib.suppress(OSError, Busy), self._space.locked():
                    self._open().drop(job)
        if not puts:
            return
        try:
            if time.monotonic() < self._until:  # an earlier batch has failed
                raise Busy  # noqa: TRY301
            self._layout.is_gone()
            self._layout.index(make=True)
            if self._space.is_short():
                with self._space.locked():
                    self._space.make_room(0)
            kept = self._keep([put for put in puts if not put.piece])
            for put in puts:
                kept += self._keep_piece(put) if put.piece else 0
        except Busy:
            self._crowd(len(puts))
        except OSError as exc:
            self._failed(exc, len(puts))
        else:
            with self._lock:
                self._pause = 0.0
                self._counts["bytes_written"] += kept

    # -- writing, by the worker

    def _keep(self, puts: Sequence[_Put]) -> int:
        """Write blocks and records that are not cached yet; return the number of bytes. Raise OSError or Busy."""
        puts = [put for put in {put.key: put for put in puts}.values() if not self._is_kept(put)]
        try:
            rows = self._append(puts)
        except OSError as exc:
            if exc.errno not in _NO_ROOM:
                raise
            self._space.full()  # other writers have filled the disk: make room, and try once more
            self._close_segment()
            rows = self._append(puts)
        return self._put_rows(rows)

    def _append(self, puts: Sequence[_Put]) -> list[IndexRow]:
        """Write blocks to segments; return their rows. Raise OSError or Busy."""
        rows: list[IndexRow] = []
        while puts:
            segment = self._segment_for(len(puts[0].data))
            count, stop = 0, segment.at
            while count < len(puts) and stop + len(puts[count].data) <= segment.size:
                stop += len(puts[count].data)
                count += 1
            at = segment.append([put.data for put in puts[:count]], self._layout.shared)
            for put in puts[:count]:
                check = xxhash.xxh3_64_intdigest(put.data)
                rows.append(IndexRow(put.key, put.target, segment.number, put.start, at, len(put.data), check))
                at += len(put.data)
            puts = puts[count:]
        return rows

    def _keep_piece(self, put: _Put) -> int:
        """Write a piece, joined with the kept pieces of its unit that it touches; return the number of bytes.

        Raise OSError or Busy.
        """
        start, data = put.start, put.data
        rows = self._search(lambda index: index.pieces(put.key), False)
        gone: list[IndexRow] = []
        for row in rows:
            if row.start <= start and start + len(data) <= row.stop and self._size_of(row.segment):
                return 0
            if row.start <= start + len(data) and start <= row.stop:
                old = self._load(row, False) if row.length <= UNIT else None
                gone.append(row)
                if old is not None:
                    before, after = old[: max(0, start - row.start)], old[max(0, start + len(data) - row.start) :]
                    data, start = memoryview(b"".join((before, data, after))), min(start, row.start)
        numbers = {int.from_bytes(row.key[PIECE_KEY:], "big") for row in rows}
        free = next(number for number in range(len(numbers) + 1) if number not in numbers)
        if gone:
            key = gone[0].key
        elif free < PIECES:
            key = put.key[:PIECE_KEY] + free.to_bytes(4, "big")
        else:
            lengths = {row: row.length if self._size_of(row.segment) else 0 for row in rows}
            shortest = min(rows, key=lengths.__getitem__)
            if lengths[shortest]:
                self._count("dropped")  # this piece or the shortest one, whichever is shorter
                if lengths[shortest] >= len(data):
                    return 0
            key = shortest.key
        kept = self._keep([_Put(key, put.target, start, data)])
        if gone[1:]:
            with self._space.locked():
                for row in gone[1:]:
                    self._open().drop(row)
        return kept

    def _is_kept(self, put: _Put) -> bool:
        """Return whether a block is cached already. An unchanged record in the current segment gets a new row only."""
        row = self._find(put.key, False)
        if row is None or row.length != len(put.data) or not self._size_of(row.segment):
            return False
        if put.key[:8] != put.target:
            return row.start == put.start
        if self._segment is None or row.segment != self._segment.number:
            return False  # with its older segment, the record would be evicted before the blocks that need it
        if self._load(row, False) != put.data:
            return False
        self._put_rows([row._replace(start=put.start)])
        return True

    def _segment_for(self, least: int) -> Segment:
        """Return the segment to which `least` bytes can be appended. Raise OSError or Busy."""
        segment = self._segment
        if segment is not None and segment.at + least <= segment.size and not segment.is_gone():
            return segment
        self._close_segment()
        with self._space.locked():
            self._segment = self._space.segment(least)
        return self._segment

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            with contextlib.suppress(OSError):
                segment.close()

    def _put_rows(self, rows: list[IndexRow]) -> int:
        """Write rows to the index; return the number of bytes in their blocks. Raise OSError or Busy."""
        if not rows:
            return 0
        alive: dict[int, bool] = {}

        def is_dead(segment: int) -> bool:
            if segment not in alive:
                alive[segment] = bool(self._size_of(segment))
            return not alive[segment]

        with self._space.locked():
            index = self._open()
            for row in rows:
                while not index.put(row, is_dead):
                    if index.growth > self._space.limit // _INDEX_SHARE:
                        index.put(row, is_dead, force=True)
                        break
                    self._space.make_room(index.growth)
                    index.grow()
        with self._lock:
            self._counts["writes"] += len(rows)
        return sum(row.length for row in rows)

    def _size_of(self, segment: int) -> int:
        """Return the size of a segment in bytes; 0 if it does not exist."""
        try:
            status = os.stat(segment_name(segment), dir_fd=self._layout.folder(), follow_symlinks=False)
        except OSError:
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    # -- disks that fail

    def _keeps(self) -> bool:
        return not self._closed and time.monotonic() >= max(self._until, self._crowded)

    def _crowd(self, count: int) -> None:
        with self._lock:
            self._counts["dropped"] += count
            self._crowded = time.monotonic() + CROWDED

    def _failed(self, exc: OSError, count: int) -> None:
        self._close_segment()
        with self._lock:
            self._counts["errors"] += 1
            self._counts["dropped"] += count
            self._pause = min(max(BACK_OFF, 2 * self._pause), BACK_OFF_MAX)
            self._until = time.monotonic() + self._pause
        if exc.errno in _NO_ROOM:
            self._space.full()
        self._report(exc, "nothing is cached for now")

    def _report(self, exc: OSError, outcome: str) -> None:
        reason = reason_of(exc)
        now = time.monotonic()
        with self._lock:
            news = now - self._reported.get(reason, -REPORT_AGAIN) >= REPORT_AGAIN
            if news:
                self._reported[reason] = now
        if news:
            log.warning("cache_dir=%s: %s; %s", self._layout.directory, reason, outcome)

    def _report_old(self, names: list[str]) -> None:
        directory = self._layout.directory
        log.warning(
            "cache_dir=%s: %s is of an earlier version of zarrfs and is not used; it may be removed (rm -r)",
            directory, ", ".join(names),
        )  # fmt: skip

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def load(layout: Layout, row: IndexRow, now: bool = False) -> tuple[Buffer, bool]:
    """Return (the verified bytes of a row, whether to mark its segment as used). Raise OSError or DamagedBlock.

    `now`: raise BlockingIOError instead of waiting for the disk.
    """
    with _opened(layout, row, now) as (fd, due):
        data = read_cached(fd, row.offset, row.length) if now else read_all(fd, row.length, row.offset)
    if now and len(data) < row.length:
        raise BlockingIOError(errno.EAGAIN, "not in memory")
    if xxhash.xxh3_64_intdigest(data) != row.check:
        raise DamagedBlock(_WRONG)
    return data, due


def verify(layout: Layout, row: IndexRow) -> tuple[int, bool]:
    """Verify the bytes of a row; return (their number, whether to mark its segment as used).

    Raise OSError or DamagedBlock, and BlockingIOError if the segment cannot be opened without waiting. Reading its
    bytes may wait.
    """
    digest, buffer = xxhash.xxh3_64(), memoryview(unfilled(min(_SCAN, row.length)))
    with _opened(layout, row, now=True) as (fd, due):
        at = 0
        while at < row.length:
            count = os.preadv(fd, [buffer[: row.length - at]], row.offset + at)
            if not count:
                raise DamagedBlock("cut short")
            digest.update(buffer[:count])
            at += count
    if digest.intdigest() != row.check:
        raise DamagedBlock(_WRONG)
    return at, due


@contextlib.contextmanager
def _opened(layout: Layout, row: IndexRow, now: bool = False) -> Iterator[tuple[int, bool]]:
    """Open the segment of a row; yield (descriptor, whether to mark it as used). Raise OSError or DamagedBlock."""
    name = segment_name(row.segment)
    try:
        fd = layout.open_now(name) if now else layout.open("", name, os.O_RDONLY)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):
            raise DamagedBlock("a symbolic link or a socket") from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or row.offset + row.length > status.st_size:
            raise DamagedBlock("cut short, or not a file")
        yield fd, time.time() - status.st_mtime > TOUCH
    finally:
        os.close(fd)


def _parse_record(text: bytes) -> TargetVersion:
    try:
        about = json.loads(text)
        return TargetVersion(about["tag"], about["size"])
    except (ValueError, KeyError, TypeError):
        raise DamagedBlock("no version record") from None


def _block_key(target: str, version: TargetVersion, start: int, stop: int) -> bytes:
    return hash_of(target, version.tag, version.size, start, stop)


def _unit_key(target: str, version: TargetVersion, unit: int) -> bytes:
    """Return the key of the queued pieces of a unit. In the index, its last four bytes are the number of a piece."""
    return hash_of(target, version.tag, version.size, "u", unit)[:PIECE_KEY] + bytes(4)
