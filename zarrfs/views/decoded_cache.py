"""Decoded chunks: kept in memory within a budget of their own, each made by one task, in worker threads."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Any, TypeVar

import trio

from zarrfs.concurrency.tasks import in_background

T = TypeVar("T")

_INLINE = 16 << 10  # bytes: decoding so few takes less time than a visit to a thread


class Decoded:
    """Something decoded: a chunk, None for one that is not there, or the index of a shard."""

    __slots__ = ("checked", "size", "value", "version")

    def __init__(self, value: Any, size: int, version: Hashable, checked: float) -> None:
        self.value = value
        self.size = size  # bytes
        self.version = version  # of the stored value, as far as the store can tell
        self.checked = checked  # trio's time when it was that


class _Flight:
    """One that is being made, and what became of it."""

    __slots__ = ("done", "error", "found")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.found: Decoded | None = None
        self.error: Exception | None = None


class DecodedCache:
    """Decoded values by key, the least recently used dropped so that kept and expected bytes fit `budget`.

    Each is made in a task of its own, which waits until its bytes fit beside those of others that are being made. One
    that is larger than everything is made alone, and kept until the next comes: it takes that memory anyway.
    Failures are handed to those who wait, and not kept.
    """

    def __init__(self, budget: int) -> None:
        self.budget = self.largest = budget
        self.threads = len(os.sched_getaffinity(0)) + 1  # one more: some wait for the loop
        self._limiter = trio.CapacityLimiter(self.threads)
        self._kept: OrderedDict[Hashable, Decoded] = OrderedDict()  # least recently used first
        self._flights: dict[Hashable, _Flight] = {}
        self._bytes = self._expected = 0
        self._waiting: OrderedDict[object, None] = OrderedDict()  # first come, first served
        self._room = trio.lowlevel.ParkingLot()
        self._hits = self._decoded = 0

    def resize(self, budget: int) -> None:
        """Bound what is kept anew; 0: nothing is. One value may be as large as the bound ever was."""
        self.budget, self.largest = budget, max(budget, self.largest)
        self._evict()
        self._room.unpark_all()

    def peek(self, key: Hashable) -> Decoded | None:
        """What is kept under `key`."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            self._hits += 1
        return found

    def coming(self, key: Hashable) -> bool:
        """Whether `key` is kept, or being made."""
        return key in self._kept or key in self._flights

    async def get(self, key: Hashable, size: int, make: Callable[[], Awaitable[Decoded]]) -> Decoded:
        """What is kept under `key`, or made now by `make`, which takes about `size` bytes. Raises what that raises.

        For what something else needs while it is made, `size` is 0: it may not wait for room that this one has taken.
        """
        found = self.peek(key)
        if found is not None:
            return found
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            in_background(self._fly, key, size, make, flight)
        await flight.done.wait()
        if flight.error is not None:
            raise flight.error.with_traceback(None)
        assert flight.found is not None
        return flight.found

    def drop(self, key: Hashable, found: Decoded) -> None:
        """Forget `found`, if that is what is kept under `key`."""
        if self._kept.get(key) is found:
            del self._kept[key]
            self._bytes -= found.size

    def retire(self, keys: Iterable[Hashable]) -> None:
        """Drop these before others, when there is no room."""
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key, last=False)

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """`function`, which decodes about `size` bytes, in a thread; there are a few of those."""
        self._decoded += 1
        if size <= _INLINE:
            return function(*arguments)
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._limiter)

    def stats(self) -> dict[str, int]:
        """Counters: `decoded` chunks, `hits` of those that were kept; `kept` bytes of `budget`."""
        return {"decoded": self._decoded, "hits": self._hits, "kept": self._bytes, "budget": self.budget}

    async def _fly(self, key: Hashable, size: int, make: Callable[[], Awaitable[Decoded]], flight: _Flight) -> None:
        try:
            await self._find_room(size)
            try:
                found = flight.found = await make()
            finally:
                self._expected -= size
                self._room.unpark_all()
            self._kept[key] = found
            self._bytes += found.size
            self._evict()
        except Exception as exc:
            flight.error = exc
        finally:
            del self._flights[key]
            flight.done.set()

    async def _find_room(self, size: int) -> None:
        """Set `size` bytes aside. First come, first served: else a large one might wait for ever."""
        if not size:
            return
        ticket = object()
        self._waiting[ticket] = None
        try:
            while next(iter(self._waiting)) is not ticket or (self._expected and self._expected + size > self.budget):
                await self._room.park()
        finally:
            del self._waiting[ticket]
            if self._waiting:
                self._room.unpark_all()
        self._expected += size
        self._evict()

    def _evict(self) -> None:
        while self._bytes + self._expected > self.budget and len(self._kept) > bool(self.budget):
            self._bytes -= self._kept.popitem(last=False)[1].size
