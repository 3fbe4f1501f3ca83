"""One thread that runs trio for a whole process, for callers that block or run on another event loop."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from zarrfs.errors import first_cause

T = TypeVar("T")

_lock = threading.Lock()
_nursery: tuple[trio.Nursery, trio.lowlevel.TrioToken] | None = None


def submit(function: Callable[..., Awaitable[T]], *arguments: Any) -> concurrent.futures.Future[T]:
    """Start a call on trio, from any other thread. Cancelling the future cancels the call."""
    global _nursery
    with _lock:
        if _nursery is None:
            started: concurrent.futures.Future[tuple[trio.Nursery, trio.lowlevel.TrioToken]]
            started = concurrent.futures.Future()
            threading.Thread(target=_run, args=(started,), name="zarrfs", daemon=True).start()
            _nursery = started.result()
        nursery, token = _nursery
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    scope = trio.CancelScope()

    def cancel(future: concurrent.futures.Future[T]) -> None:
        if future.cancelled():
            token.run_sync_soon(scope.cancel)

    future.add_done_callback(cancel)
    token.run_sync_soon(nursery.start_soon, _answer, scope, future, function, arguments)
    return future


def call(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run a call on trio, and wait for its result. Ctrl-C cancels it."""
    future = submit(function, *arguments)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _run(started: concurrent.futures.Future[tuple[trio.Nursery, trio.lowlevel.TrioToken]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            started.set_result((nursery, trio.lowlevel.current_trio_token()))
            await trio.sleep_forever()

    try:
        trio.run(main)
    except BaseException as exc:  # for example, too many open files
        if started.done():
            raise
        started.set_exception(exc)


async def _answer(
    scope: trio.CancelScope, future: concurrent.futures.Future[T], function: Callable[..., Awaitable[T]],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled meanwhile
        try:
            with scope:
                future.set_result(await function(*arguments))
        except Exception as exc:
            future.set_exception(first_cause(exc))


def _forget() -> None:
    """Start another thread in a forked process, which has no thread of its parent."""
    global _lock, _nursery
    _lock, _nursery = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
