"""The cache of decoded chunks: an LRU cache with a memory budget, single flight, and worker threads that decode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Any, TypeVar

import trio

from zarrfs.concurrency.budget import MemoryBudget
from zarrfs.concurrency.lru import SizedLRU
from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.metrics.counters import CACHES, COUNTS
from zarrfs.system.cpus import usable

T = TypeVar("T")

_INLINE = 16 << 10  # bytes; decoding less than this is faster than a switch to a thread
_FRESH = 1.0  # seconds for which a cached value of a mutable store is used without a stat


class Decoded:
    """A value in the cache: a decoded chunk, None for a missing chunk, or the index of a shard."""

    __slots__ = ("checked", "size", "value", "version")

    def __init__(self, value: Any, size: int, version: Hashable, checked: float) -> None:
        self.value = value
        self.size = size  # bytes
        self.version = version  # of the stored value, as far as the store knows it
        self.checked = checked  # trio time of the last check of that version

    def is_fresh(self) -> bool:
        """Return whether the value may be used without a stat."""
        return trio.current_time() - self.checked < _FRESH


class DecodedCache:
    """An LRU cache of decoded values. Cached values and values being decoded together fit `budget`.

    One task decodes each value (single flight), after waiting until its bytes fit beside those of other decodes. A
    value larger than the budget is decoded alone, and stays cached until another is decoded, because its memory was
    needed anyway. Failures are raised in every waiter and not cached.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.threads = usable() + 1  # one more than CPUs, because some wait for the event loop
        self._limiter = trio.CapacityLimiter(self.threads)
        self._kept: SizedLRU[Hashable, Decoded] = SizedLRU(lambda decoded: decoded.size)
        self._flights: SingleFlight[Hashable] = SingleFlight()
        self._expected = MemoryBudget(budget)
        CACHES.add(self)

    def peek(self, key: Hashable) -> Decoded | None:
        """Return the cached value of `key` and mark it as used; None if there is none."""
        return self._kept.use(key)

    def coming(self, key: Hashable) -> bool:
        """Return whether `key` is cached or being decoded."""
        return key in self._kept or key in self._flights

    async def get(self, key: Hashable, size: int, make: Callable[[], Awaitable[Decoded]]) -> Decoded:
        """Return the cached value of `key`, or the result of `make`, which needs about `size` bytes.

        Pass `size` 0 for a value that another `make` waits for, because it must not wait for memory that the other one
        has reserved.
        """
        found = self.peek(key)
        if found is not None:
            return found
        return await self._flights.run(key, lambda: self._make(key, size, make), lambda: self._kept.use(key))

    def drop(self, key: Hashable, found: Decoded) -> None:
        """Drop `found` if it is the cached value of `key`."""
        if self._kept.peek(key) is found:
            self._kept.drop(key)

    def retire(self, keys: Iterable[Hashable]) -> None:
        """Make the values of `keys` the first to be evicted."""
        for key in keys:
            self._kept.age(key)

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function`, which decodes about `size` bytes, in a worker thread, or directly if `size` is small."""
        COUNTS["chunks_decoded_total"] += 1
        if size <= _INLINE:
            return function(*arguments)
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._limiter)

    def gauges(self) -> dict[str, float]:
        """Return figures for `zarrfs stats`."""
        return {"memory_kept_bytes": self._kept.bytes, "memory_limit_bytes": self.budget}

    async def _make(self, key: Hashable, size: int, make: Callable[[], Awaitable[Decoded]]) -> Decoded:
        if size:
            await self._expected.take(size)
            self._evict()
        try:
            found = await make()
        finally:
            self._expected.give(size)
        self._kept.put(key, found)
        self._evict()
        return found

    def _evict(self) -> None:
        self._kept.evict(self.budget - self._expected.held, keep=bool(self.budget))
