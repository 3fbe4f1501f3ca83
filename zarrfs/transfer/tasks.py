"""at_once(): one call for each of several things, at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import trio

T = TypeVar("T")


async def at_once(function: Callable[[T], Awaitable[object]], items: Iterable[T]) -> None:
    """`function` of every item. The first failure ends the others, and is raised as itself, not in a group."""
    failed: list[Exception] = []

    async def one(item: T) -> None:
        try:
            await function(item)
        except Exception as exc:
            failed.append(exc)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for item in items:
            nursery.start_soon(one, item)
    if failed:
        raise failed[0]
