"""One thread that runs trio, for callers that block or run on another event loop.

The first acquire() starts the thread and the last release() ends it. Threads do not survive a fork: a child process
starts a loop of its own, and recognises objects that belong to its parent's loop by their generation().
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from zarrfs.errors import UsageError, first_cause

T = TypeVar("T")


class LoopThread:
    """A thread that runs trio until stop()."""

    def __init__(self) -> None:
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery
        self._stop = trio.Event()
        self._thread = threading.Thread(target=self._run, name="zarrfs", daemon=True)
        self._thread.start()
        self._started.result()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as exc:  # for example, too many open files
            if self._started.done():
                raise
            self._started.set_exception(exc)

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()
            self._started.set_result(None)
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    def submit(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> concurrent.futures.Future[T]:
        """Start a call on the loop, from any thread. Cancelling the future cancels the call."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            self._token.run_sync_soon(self._begin, future, function, arguments)
        except trio.RunFinishedError:
            future.set_exception(_ended())
        return future

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a call on the loop, and wait for its result. Ctrl-C cancels it."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking call within the loop that would answer it")
        future = self.submit(function, *arguments)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop, and wait for its thread unless called from it. Calls in progress raise UsageError."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _begin(
        self, future: concurrent.futures.Future[T], function: Callable[..., Awaitable[T]], arguments: tuple[Any, ...]
    ) -> None:
        scope = trio.CancelScope()

        def cancel(future: concurrent.futures.Future[T]) -> None:
            if future.cancelled():
                with contextlib.suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(scope.cancel)

        future.add_done_callback(cancel)
        if not future.done():
            try:
                self._nursery.start_soon(_answer, scope, future, function, arguments)
            except RuntimeError:  # the nursery has ended meanwhile
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_exception(_ended())


async def _answer(
    scope: trio.CancelScope, future: concurrent.futures.Future[T], function: Callable[..., Awaitable[T]],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled meanwhile
        try:
            with scope:
                value = await function(*arguments)
                future.set_result(value)
        except Exception as exc:
            future.set_exception(first_cause(exc))
        finally:
            if not future.done():  # the loop is ending
                future.set_exception(_ended())


def _ended() -> UsageError:
    return UsageError("the store was closed while it was read")


_lock = threading.RLock()  # reentrant: a finaliser may run while this thread holds it
_loop: LoopThread | None = None
_users = 0
_generation = 0  # number of forks between the first process and this one


def acquire() -> LoopThread:
    """Return the loop of this process; start it if there is none. Each call needs a release()."""
    global _loop, _users
    with _lock:
        if _loop is None:
            _loop = LoopThread()
        _users += 1
        return _loop


def release() -> None:
    """Undo one acquire(). The last release() ends the loop."""
    global _loop, _users
    with _lock:
        _users -= 1
        ended, _loop = (None, _loop) if _users else (_loop, None)
    if ended is not None:
        ended.stop()


def generation() -> int:
    """Return a number that differs between a process and its forked children."""
    return _generation


def _forget() -> None:
    """Reset the state in a forked child: the thread and a holder of the lock exist only in the parent."""
    global _lock, _loop, _users, _generation
    _lock, _loop, _users = threading.RLock(), None, 0
    _generation += 1


os.register_at_fork(after_in_child=_forget)
