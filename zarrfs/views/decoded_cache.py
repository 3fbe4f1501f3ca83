"""The cache of decoded chunks: a BlockCache, and worker threads that decode."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import trio

from zarrfs.cache.memory import BlockCache
from zarrfs.metrics.counters import COUNTS
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

    def __len__(self) -> int:
        return self.size

    def is_fresh(self) -> bool:
        """Return whether the value may be used without a stat."""
        return trio.current_time() - self.checked < _FRESH


class DecodedCache(BlockCache[Decoded]):
    """Decoded values, which together with those being decoded fit `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.threads = usable() + 1  # one more than CPUs, because some wait for the event loop
        self._limiter = trio.CapacityLimiter(self.threads)

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function`, which decodes about `size` bytes, in a worker thread, or directly if `size` is small."""
        COUNTS["chunks_decoded_total"] += 1
        if size <= _INLINE:
            return function(*arguments)
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._limiter)
