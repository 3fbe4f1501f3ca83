"""BlockCache: blocks in memory, bounded in bytes, each fetched by one task however many want it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sized
from typing import Any, Generic, TypeVar

import trio

V = TypeVar("V", bound=Sized)


class _Flight(Generic[V]):
    """A fetch that goes on, and how many wait for it."""

    __slots__ = ("block", "done", "error", "scope", "waiters")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self.waiters = 0
        self.block: V | None = None
        self.error: Exception | None = None


class BlockCache(Generic[V]):
    """Blocks by key, the least recently used ones dropped so that kept and expected bytes fit `max_bytes`.

    A block is bytes, or anything else whose len() is the bytes that it takes.

    A fetch runs in a task of its own: a reader that is cancelled takes nothing from the others, and the fetch
    is cancelled when nobody waits any more. A fetch waits until its bytes fit beside those of other fetches;
    one that is larger than everything runs alone. Failures are handed to those who wait and not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._blocks: OrderedDict[Hashable, V] = OrderedDict()
        self._flights: dict[Hashable, _Flight[V]] = {}
        self._kept = self._expected = 0
        self._room = trio.lowlevel.ParkingLot()
        self._hits = self._misses = self._joins = 0

    async def get(self, key: Hashable, size: int, fetch: Callable[[], Awaitable[V]]) -> V:
        """The block `key`: kept, or about to come, or fetched now by `fetch`, which gives about `size` bytes.

        The block is shared: nobody may change it. Raises what `fetch` raises.
        """
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
            self._hits += 1
            return block
        flight = self._flights.get(key)
        if flight is None:
            self._misses += 1
            flight = self._flights[key] = _Flight()
            trio.lowlevel.spawn_system_task(self._fly, key, size, fetch, flight)
        else:
            self._joins += 1
        flight.waiters += 1
        try:
            await flight.done.wait()
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.done.is_set():
                flight.scope.cancel()
                self._take_off(key, flight)
        if flight.error is not None:
            raise flight.error.with_traceback(None)
        assert flight.block is not None
        return flight.block

    def drop(self, wanted: Callable[[Hashable], bool]) -> None:
        """Forget the kept blocks whose key is `wanted`."""
        for key in [key for key in self._blocks if wanted(key)]:
            self._kept -= len(self._blocks.pop(key))

    def resize(self, max_bytes: int) -> None:
        """Bound the cache anew."""
        self.max_bytes = max_bytes
        self._evict()
        self._room.unpark_all()

    def stats(self) -> dict[str, Any]:
        """Counters, for the log."""
        return {
            "hits": self._hits, "misses": self._misses, "joins": self._joins, "blocks": len(self._blocks),
            "kept": self._kept, "expected": self._expected,
        }  # fmt: skip

    async def _fly(
        self, key: Hashable, size: int, fetch: Callable[[], Awaitable[V]], flight: _Flight[V]
    ) -> None:
        with flight.scope:
            try:
                while self._expected and self._expected + size > self.max_bytes:
                    await self._room.park()
                self._expected += size
                self._evict()
                try:
                    block = flight.block = await fetch()
                finally:
                    self._expected -= size
                    self._room.unpark_all()
                self._keep(key, block)
            except Exception as exc:
                flight.error = exc
            flight.done.set()
        self._take_off(key, flight)

    def _take_off(self, key: Hashable, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    def _keep(self, key: Hashable, block: V) -> None:
        old = self._blocks.pop(key, None)
        self._kept += len(block) - (0 if old is None else len(old))
        self._blocks[key] = block
        self._evict()

    def _evict(self) -> None:
        while self._blocks and self._kept + self._expected > self.max_bytes:
            self._kept -= len(self._blocks.popitem(last=False)[1])
