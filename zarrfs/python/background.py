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
_token: trio.lowlevel.TrioToken | None = None


def submit(function: Callable[..., Awaitable[T]], *arguments: Any) -> concurrent.futures.Future[T]:
    """Start a call on trio, from any other thread. Cancelling the future cancels the call."""
    global _token
    with _lock:
        if _token is None:
            started: concurrent.futures.Future[trio.lowlevel.TrioToken] = concurrent.futures.Future()
            threading.Thread(target=_run, args=(started,), name="zarrfs", daemon=True).start()
            _token = started.result()
        token = _token
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    scope = trio.CancelScope()

    async def answer() -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled meanwhile
            try:
                with scope:
                    future.set_result(await function(*arguments))
            except Exception as exc:
                future.set_exception(first_cause(exc))

    future.add_done_callback(lambda future: token.run_sync_soon(scope.cancel) if future.cancelled() else None)
    token.run_sync_soon(trio.lowlevel.spawn_system_task, answer)
    return future


def call(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run a call on trio, and wait for its result. Ctrl-C cancels it."""
    future = submit(function, *arguments)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _run(started: concurrent.futures.Future[trio.lowlevel.TrioToken]) -> None:
    async def main() -> None:
        started.set_result(trio.lowlevel.current_trio_token())
        await trio.sleep_forever()

    try:
        trio.run(main)
    except BaseException as exc:  # for example, too many open files
        if started.done():
            raise
        started.set_exception(exc)


def _forget() -> None:
    """Start another thread in a forked process, which has no thread of its parent."""
    global _lock, _token
    _lock, _token = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
