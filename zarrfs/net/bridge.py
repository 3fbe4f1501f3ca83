"""Calls from trio to fsspec's asyncio loop. All such calls are made by this module."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import outcome
import trio

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


def start() -> None:
    """Import fsspec and start its loop, so that the first call() need not."""
    from fsspec.asyn import get_loop

    get_loop()


async def call(function: Callable[..., Awaitable[T]], *args: Any, timeout: float | None = None) -> T:
    """Await `function(*args)` on fsspec's loop, which runs in a thread of its own, and return the result.

    Raise the exception of the function, or TimeoutError after `timeout` seconds. Cancelling the trio task cancels the
    asyncio task and waits until that has ended, so that nothing continues in the background.
    """
    from fsspec.asyn import get_loop

    found: T = await _Call(get_loop(), function, args, timeout).wait()
    return found


class _Call:
    """One call: its asyncio task, the trio task that waits for it, and the callback of a cancellation by trio."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        timeout: float | None,
    ) -> None:
        self._loop, self._function, self._args, self._timeout = loop, function, args, timeout
        self._task: asyncio.Task[Any] | None = None
        self._raise_cancel: Callable[[], None] | None = None

    async def wait(self) -> Any:
        self._token = trio.lowlevel.current_trio_token()
        self._waiter = trio.lowlevel.current_task()
        self._loop.call_soon_threadsafe(self._start)
        return await trio.lowlevel.wait_task_rescheduled(self._abort)

    # -- on trio

    def _abort(self, raise_cancel: Callable[[], None]) -> trio.lowlevel.Abort:
        self._raise_cancel = raise_cancel
        self._loop.call_soon_threadsafe(self._cancel)
        return trio.lowlevel.Abort.FAILED  # _resume() will reschedule the task

    def _resume(self, result: outcome.Outcome[Any]) -> None:
        import asyncio

        cancelled = isinstance(result, outcome.Error) and isinstance(result.error, asyncio.CancelledError)
        if cancelled and self._raise_cancel is not None:
            result = outcome.capture(self._raise_cancel)
        trio.lowlevel.reschedule(self._waiter, result)

    # -- on asyncio

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        # not at the end of _run(), because a task that is cancelled before its first step never runs it
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> Any:
        import asyncio

        async with asyncio.timeout(self._timeout):
            return await self._function(*self._args)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        result = outcome.capture(task.result)
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._resume, result)
