"""A bound on the bytes that tasks hold in memory at the same time."""

from __future__ import annotations

import trio


class MemoryBudget:
    """A limit of `size` bytes that tasks hold in memory at the same time. Requests are granted in order of arrival.

    A request for more than `size` waits until nothing is held, and is then granted alone.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.held = 0
        self._turn = trio.Lock()  # held by the first task that waits
        self._given = trio.lowlevel.ParkingLot()

    async def take(self, count: int) -> None:
        """Wait until `count` bytes fit, and take them. A task that is cancelled while it waits takes nothing."""
        if self.take_now(count):
            return
        async with self._turn:  # trio.Lock is fair, so small requests cannot overtake a large one for ever
            while self.held and self.held + count > self._size:
                await self._given.park()
            self.held += count

    def take_now(self, count: int) -> bool:
        """Take `count` bytes and return True; return False if they do not fit, or if other tasks wait in take()."""
        if self._turn.locked() or self.held + count > self._size:
            return False
        self.held += count
        return True

    def give(self, count: int) -> None:
        """Give back `count` bytes."""
        self.held -= count
        self._given.unpark()

    def resize(self, size: int) -> None:
        """Set another size. Bytes that are held beyond it stay held."""
        self._size = size
        self._given.unpark()
