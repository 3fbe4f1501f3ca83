"""BlobKeeping: verified blobs on their way to the directory of blobs in cache_dir, which nobody waits for."""

from __future__ import annotations

import trio

from zarrfs.archives.heldblobs import HeldBlobs
from zarrfs.cache.diskblobs import DiskBlobs
from zarrfs.concurrency.tasks import in_background
from zarrfs.system.buffers import Buffer

_WRITERS = 2  # threads
_PATIENCE = 30.0  # seconds that the end waits for a disk


class BlobKeeping:
    """Writes to `disk`, as long as memory of `held` has room for what waits."""

    def __init__(self, disk: DiskBlobs, held: HeldBlobs) -> None:
        self._disk, self._held = disk, held
        self._threads = trio.CapacityLimiter(_WRITERS)
        self._writes = 0
        self._ended = trio.Event()

    async def keep(self, blobref: str, data: Buffer) -> None:
        """Write a blob, later; at once where there is no memory for that."""
        if not self._held.reserve(len(data)):
            await trio.to_thread.run_sync(self._disk.put, blobref, data, limiter=self._threads)
            return
        self._writes += 1
        in_background(self._later, blobref, data)

    async def _later(self, blobref: str, data: Buffer) -> None:
        try:
            await trio.to_thread.run_sync(self._disk.put, blobref, data, limiter=self._threads)
        finally:
            self._writes -= 1
            await self._held.release(len(data))
            self._ended.set()

    async def aclose(self) -> None:
        """Wait a little for what is on its way."""
        with trio.move_on_after(_PATIENCE):
            while self._writes:
                self._ended = trio.Event()
                await self._ended.wait()
        await trio.to_thread.run_sync(self._disk.close)
