"""HeldBlobs: verified blobs in memory, those that did not come from a file of their own, and room for more."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator

import trio

from zarrfs.errors import ReadError
from zarrfs.system.buffers import Buffer

UNKNOWN = 4 << 20  # bytes reserved for a blob whose length nobody declares


class HeldBlobs:
    """Blobs by their names, at most `limit` bytes with what is on its way; the one not read for longest goes first.

    A blob may be as large as `limit` ever was: who reads it when the bound becomes smaller goes on, and the one that
    was read last stays, unless nothing is to be held.
    """

    def __init__(self, limit: int) -> None:
        self.limit = self._largest = limit
        self._held: OrderedDict[str, Buffer] = OrderedDict()
        self.bytes = 0
        self._flying = 0
        self._landed = trio.Condition()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, blobref: str) -> Buffer | None:
        """The bytes of a blob, if they are here."""
        found = self._held.get(blobref)
        if found is not None:
            self._held.move_to_end(blobref)
        return found

    def has(self, blobref: str) -> bool:
        """Whether a blob is here; that is not reading it."""
        return blobref in self._held

    def add(self, blobref: str, data: Buffer) -> None:
        """Hold a blob, whose room is still reserved."""
        if blobref not in self._held:
            self._held[blobref] = data
            self.bytes += len(data)

    @contextlib.asynccontextmanager
    async def room(self, blobref: str, size: int | None) -> AsyncIterator[None]:
        """Room for `size` bytes on their way, once there is some. ReadError where there never is."""
        size = min(UNKNOWN, self._largest) if size is None else size
        if size > self._largest:
            raise ReadError(blobref, f"a blob of {size} bytes does not fit in memory (-o memory_limit=)")
        async with self._landed:
            while self._flying and self._flying + size > self.limit // 4:
                await self._landed.wait()
            self._flying += size
        try:
            self._shrink()
            yield
        finally:
            await self.release(size)

    def reserve(self, size: int) -> bool:
        """Whether there is room for `size` bytes more on their way, now; then it is taken until release()."""
        if self._flying + size > self.limit // 4:
            return False
        self._flying += size
        self._shrink()
        return True

    async def release(self, size: int) -> None:
        """Room that is free again."""
        self._flying -= size
        self._shrink()
        with trio.CancelScope(shield=True):
            async with self._landed:
                self._landed.notify_all()

    def resize(self, limit: int) -> None:
        """Bound what is held anew."""
        self.limit, self._largest = limit, max(limit, self._largest)
        self._shrink()

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()
        self.bytes = 0

    def _shrink(self) -> None:
        least = 0 < self.limit < self._largest
        while len(self._held) > least and self.bytes + self._flying > self.limit:
            _, data = self._held.popitem(last=False)
            self.bytes -= len(data)
