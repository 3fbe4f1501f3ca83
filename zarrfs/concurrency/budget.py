"""A bound on the bytes that tasks hold in memory at the same time."""

from __future__ import annotations

import trio


class MemoryBudget:
    """A number of bytes that tasks may hold in memory at the same time."""

    def __init__(self, size: int) -> None:
        self._free = self._size = size
        self._waiting = trio.lowlevel.ParkingLot()

    async def take(self, count: int) -> int:
        """Wait until `count` bytes are free, or all of them if `count` is more; return what to give back."""
        count = min(count, self._size)
        while self._free < count:
            await self._waiting.park()
        self._free -= count
        return count

    def give(self, count: int) -> None:
        """Give back `count` bytes."""
        self._free += count
        self._waiting.unpark_all()
