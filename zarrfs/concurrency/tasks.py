"""Helpers for trio tasks: concurrent calls, calls in the background, and a limit on the work in a scheduler pass."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import trio

log = logging.getLogger(__name__)

T = TypeVar("T")

# The threads for signals, unmounting, refreshes and logs: reads that a dead file server keeps waiting may take all
# threads of trio's default limiter.
CONTROL = trio.CapacityLimiter(8)


def run(main: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run `main` on trio for a command, and raise KeyboardInterrupt at its checkpoints only.

    In the tasks of in_background() it would be an internal error of trio, and nothing would be closed or removed.
    """
    return trio.run(main, *args, restrict_keyboard_interrupt_to_checkpoints=True)


def in_background(function: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Run `function` in a system task. Log its exceptions, because they would otherwise end trio and the mount."""

    async def guarded() -> None:
        try:
            await function(*args)
        except Exception:
            log.exception("a task in the background failed")

    trio.lowlevel.spawn_system_task(guarded)


class PassLimit:
    """A limit on the work that tasks do without waiting in one pass of trio's scheduler: `most`, in any unit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0

    def take(self, amount: int) -> bool:
        """Count `amount` and return True, or return False if the limit is reached. The last amount may exceed it."""
        if self._taken >= self._most:
            return False
        if not self._taken:
            in_background(self._renew)
        self._taken += amount
        return True

    async def _renew(self) -> None:
        self._taken = 0


async def for_each(function: Callable[[T], Awaitable[object]], items: Iterable[T]) -> None:
    """Await `function` of all items concurrently.

    The first failure cancels the other calls, and is raised as it is, not in an exception group.
    """
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
