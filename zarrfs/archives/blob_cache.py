"""Caches of verified blobs that did not come from local files: in memory, and as files in cache_dir.

MemoryBlobs is the cache in memory. BackgroundWriter passes blobs to DiskBlobs, so that readers need not wait for the
disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator

import trio

from zarrfs.cache.directory import BLOBS, TOUCH, CacheDirectory
from zarrfs.concurrency.budget import MemoryBudget
from zarrfs.concurrency.lru import SizedLRU
from zarrfs.concurrency.tasks import in_background
from zarrfs.errors import ReadError, reason_of
from zarrfs.system.buffers import Buffer

log = logging.getLogger(__name__)

UNKNOWN = 4 << 20  # bytes reserved for a blob whose length the archive does not declare
BACK_OFF = 30.0  # seconds without writes to the disk after a failed write
_WRITERS = 2  # threads that write to the disk
_PATIENCE = 30.0  # seconds that aclose() waits for writes under way


class MemoryBlobs:
    """An LRU cache of blobs by blobref, bounded in bytes together with the blobs in flight.

    At most a quarter of `limit` is in flight at a time, or a single larger blob. A blob may be as large as the largest
    limit so far, so that its readers do not fail when the limit shrinks. After that, the most recently used blob is
    never evicted, unless the new limit is 0.
    """

    def __init__(self, limit: int) -> None:
        self.limit = self._largest = limit
        self._blobs: SizedLRU[str, Buffer] = SizedLRU(len)
        self._in_flight = MemoryBudget(limit // 4)

    def __len__(self) -> int:
        return len(self._blobs)

    @property
    def bytes(self) -> int:
        """The total size of the cached blobs in bytes."""
        return self._blobs.bytes

    def get(self, blobref: str) -> Buffer | None:
        """Return the bytes of a blob and mark it as used last; None on a miss."""
        return self._blobs.use(blobref)

    def has(self, blobref: str) -> bool:
        """Return whether a blob is cached, without marking it as used."""
        return blobref in self._blobs

    def add(self, blobref: str, data: Buffer) -> None:
        """Add a blob. Call this inside room(), while the bytes of the blob are still reserved."""
        if blobref not in self._blobs:
            self._blobs.put(blobref, data)

    @contextlib.asynccontextmanager
    async def room(self, blobref: str, size: int | None) -> AsyncIterator[None]:
        """Wait until `size` bytes can be in flight, and reserve them for the body. Raise ReadError if they never fit.

        If `size` is None, reserve 4 MiB, or the largest limit so far if that is less.
        """
        size = min(UNKNOWN, self._largest) if size is None else size
        if size > self._largest:
            raise ReadError(blobref, f"a blob of {size} bytes does not fit in memory (-o memory_limit=)")
        await self._in_flight.take(size)
        try:
            self._shrink()
            yield
        finally:
            self.release(size)

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes in flight until release(), or return False if the caller would have to wait."""
        if not self._in_flight.take_now(size):
            return False
        self._shrink()
        return True

    def release(self, size: int) -> None:
        """Give back `size` reserved bytes."""
        self._in_flight.give(size)
        self._shrink()

    def clear(self) -> None:
        """Drop all blobs."""
        self._blobs.clear()

    def _shrink(self) -> None:
        self._blobs.evict(self.limit - self._in_flight.held, keep=0 < self.limit < self._largest)


class DiskBlobs:
    """Blobs in cache_dir, one file each in `directory`, which is read like any directory of blobs.

    Blobs share one bound with the cached blocks in cache_dir (zarrfs.cache.directory): whichever was least recently
    used is evicted first. No file in the directory is trusted: BlobReader verifies every blob that it reads from it.
    Methods except close() are thread-safe. They block, and do not raise errors of the disk.
    """

    def __init__(self, cache_dir: str, size: int) -> None:
        """Keep blobs within the same bounds as DiskCache, in bytes. The disk is not accessed yet."""
        self._files = CacheDirectory(cache_dir, size)
        self._cache_dir = cache_dir
        self.directory = os.path.normpath(os.path.join(cache_dir, BLOBS))
        self._until = 0.0  # time.monotonic() before which nothing is written, because a write has failed
        self._reported: set[str] = set()
        self._counts = dict.fromkeys(("writes", "bytes_written", "dropped", "errors"), 0)
        self._lock = threading.Lock()
        self._closed = False

    def put(self, blobref: str, data: Buffer) -> None:
        """Write a verified blob if there is room; replace a file of the same name."""
        if self._closed or time.monotonic() < self._until or not self._files.fits(len(data)):
            self._count("dropped")
            return
        try:
            self._files.write(BLOBS, blobref, [data])
        except OSError as exc:
            self._count("errors")
            self._count("dropped")
            self._until = time.monotonic() + BACK_OFF
            reason = reason_of(exc)
            if reason not in self._reported:
                self._reported.add(reason)
                log.warning("cache_dir=%s: %s; no blobs are cached for now", self._cache_dir, reason)
            return
        self._count("writes", len(data))

    def touch(self, blobref: str) -> None:
        """Mark a blob as used, by the times of its file.

        Call this before the file is opened, because a blob whose file changes while it is open is verified again.
        """
        with contextlib.suppress(OSError):
            path = os.path.join(self.directory, blobref)
            if time.time() - os.stat(path, follow_symlinks=False).st_mtime > TOUCH:
                self._files.touch(BLOBS, blobref)

    def stats(self) -> dict[str, int]:
        """Return counters since the start."""
        return {**self._counts, "evicted": self._files.evicted}

    def close(self) -> None:
        """Drop all further blobs, and close the descriptors."""
        self._closed = True
        self._files.close()

    def _count(self, counter: str, written: int = 0) -> None:
        with self._lock:
            self._counts[counter] += 1
            self._counts["bytes_written"] += written


class BackgroundWriter:
    """A writer of blobs to `disk` in background tasks, as long as `memory` has room for the waiting blobs."""

    def __init__(self, disk: DiskBlobs, memory: MemoryBlobs) -> None:
        self._disk, self._memory = disk, memory
        self._threads = trio.CapacityLimiter(_WRITERS)
        self._writes = 0
        self._ended = trio.Event()

    async def write(self, blobref: str, data: Buffer) -> None:
        """Write a blob in a background task; if `memory` has no room for it meanwhile, write it before returning."""
        if not self._memory.reserve(len(data)):
            await trio.to_thread.run_sync(self._disk.put, blobref, data, limiter=self._threads)
            return
        self._writes += 1
        in_background(self._write, blobref, data)

    async def _write(self, blobref: str, data: Buffer) -> None:
        try:
            await trio.to_thread.run_sync(self._disk.put, blobref, data, limiter=self._threads)
        finally:
            self._writes -= 1
            self._memory.release(len(data))
            self._ended.set()

    def stats(self) -> dict[str, int]:
        """Return the counters of `disk`, and as "queued" the number of blobs whose write has not finished."""
        return {**self._disk.stats(), "queued": self._writes}

    async def aclose(self) -> None:
        """Wait up to 30 s for writes under way, then close `disk`."""
        with trio.move_on_after(_PATIENCE):
            while self._writes:
                self._ended = trio.Event()
                await self._ended.wait()
        await trio.to_thread.run_sync(self._disk.close)
