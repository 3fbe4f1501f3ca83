"""Requests that many tasks want at the same time, sent once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

K = TypeVar("K")
V = TypeVar("V")


class _Flight:
    """A fetch under way, and why it failed."""

    __slots__ = ("ended", "error")

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: Exception | None = None


class SingleFlight(Generic[K]):
    """One fetch at a time for each key: other tasks wait for it.

    The result lies where the caller keeps it. All who wait for a fetch that fails get its failure. A waiter that does
    not find the result, because the fetch was cancelled, fetches itself.
    """

    def __init__(self) -> None:
        self._under_way: dict[K, _Flight] = {}

    async def run(self, key: K, fetch: Callable[[], Awaitable[V]], cached: Callable[[], V | None]) -> V:
        """Return what `fetch` returns; after another task's fetch of `key` what `cached` returns, if not None."""
        while (flight := self._under_way.get(key)) is not None:
            await flight.ended.wait()
            value = cached()
            if value is not None:
                return value
            if flight.error is not None:
                raise flight.error.with_traceback(None)  # else it grows with every waiter
        flight = self._under_way[key] = _Flight()
        try:
            return await fetch()
        except Exception as exc:
            flight.error = exc
            raise
        finally:
            del self._under_way[key]
            flight.ended.set()
