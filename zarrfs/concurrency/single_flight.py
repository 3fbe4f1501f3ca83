"""Single flight: one fetch for all tasks that want the same result at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

K = TypeVar("K")
V = TypeVar("V")


class _Flight:
    """A fetch in progress, and the exception with which it failed."""

    __slots__ = ("ended", "error")

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: Exception | None = None


class SingleFlight(Generic[K]):
    """At most one fetch at a time for each key; other tasks wait for it.

    The caller stores the results. If a fetch fails, all its waiters get the same exception. A waiter that finds no
    result after the fetch, for example because the fetch was cancelled, fetches itself.
    """

    def __init__(self) -> None:
        self._under_way: dict[K, _Flight] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._under_way

    async def run(self, key: K, fetch: Callable[[], Awaitable[V]], cached: Callable[[], V | None]) -> V:
        """Return the result of `fetch`, or that of `cached` after another task has fetched `key`.

        `fetch` is called if no other task is fetching `key`, or if `cached` returns None after that. Raise the
        exception of the other task's fetch if it failed.
        """
        while (flight := self._under_way.get(key)) is not None:
            await flight.ended.wait()
            value = cached()
            if value is not None:
                return value
            if flight.error is not None:
                raise flight.error.with_traceback(None)  # else the traceback grows with every waiter
        flight = self._under_way[key] = _Flight()
        try:
            return await fetch()
        except Exception as exc:
            flight.error = exc
            raise
        finally:
            del self._under_way[key]
            flight.ended.set()
