"""Tasks: several calls at the same time, and calls that nobody waits for."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import trio

log = logging.getLogger(__name__)

T = TypeVar("T")


def in_background(function: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Run `function` in a task of its own. What it raises is logged: otherwise it would end the whole mount."""

    async def guarded() -> None:
        try:
            await function(*args)
        except Exception:
            log.exception("a task in the background failed")

    trio.lowlevel.spawn_system_task(guarded)


class Round:
    """Bounds what is done in one round of the loop, by tasks that never wait: `most`, in whatever unit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0

    def take(self, amount: int) -> bool:
        """Take `amount` from the round; False if it is used up. The last one may exceed it."""
        if self._taken >= self._most:
            return False
        if not self._taken:
            in_background(self._renew)
        self._taken += amount
        return True

    async def _renew(self) -> None:
        self._taken = 0


async def at_once(function: Callable[[T], Awaitable[object]], items: Iterable[T]) -> None:
    """Return `function` of every item. The first failure cancels the others, and is raised outside a group."""
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
