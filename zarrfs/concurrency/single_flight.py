"""Requests that many tasks want at the same time, sent once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

K = TypeVar("K")
V = TypeVar("V")


class SingleFlight(Generic[K]):
    """One fetch at a time for each key: other tasks wait for it.

    The result lies where the caller keeps it. A waiter that does not find it there, because the fetch failed or was
    cancelled, fetches itself.
    """

    def __init__(self) -> None:
        self._under_way: dict[K, trio.Event] = {}

    async def run(self, key: K, fetch: Callable[[], Awaitable[V]], cached: Callable[[], V | None]) -> V:
        """Return what `fetch` returns; after another task's fetch of `key` what `cached` returns, if not None."""
        while (ended := self._under_way.get(key)) is not None:
            await ended.wait()
            value = cached()
            if value is not None:
                return value
        ended = self._under_way[key] = trio.Event()
        try:
            return await fetch()
        finally:
            del self._under_way[key]
            ended.set()
