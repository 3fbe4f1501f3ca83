"""The session loop of one of several processes that answer the same mount: who of them reads the next request."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pyfuse3
import trio

from zarrfs.fuse.sessionloop import AT_ONCE, Lock, Waiting
from zarrfs.fuse.shared import PARKED, Shared

_IN_VAIN = 8  # times that a process finds no request before it is parked
_IDLE, _PARKED = 0.05, 0.25  # seconds: without a request until it is parked, and until a parked one looks by itself


class Front:
    """The object that pyfuse3 calls: it passes each request to `operations`, which may be set after the fork.

    A process gives the turn to read requests up when a request begins.
    """

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self) -> None:
        self.operations: Any = None
        self.give_up_turn: Callable[[], None] = lambda: None
        self.begun = trio.Event()

    def init(self) -> None:
        """Note that the kernel has begun the session."""
        self.begun.set()

    def __getattr__(self, name: str) -> Any:
        self.give_up_turn()
        return getattr(self.operations, name)


async def begin(front: Front) -> None:
    """Answer the request that begins the session, and no other: those wait for the processes that will answer them."""
    waiting = pyfuse3.trio = _Beginning(front)  # type: ignore[attr-defined]
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main, 1, 1)
            await waiting.answered.wait()
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]


class _Beginning(Waiting):
    """Waits for one request."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front
        self.answered = trio.Event()

    async def wait_readable(self, descriptor: int) -> None:
        if self._front.begun.is_set():
            self.answered.set()
            await trio.sleep_forever()
        await trio.lowlevel.wait_readable(descriptor)


class _SharedLock(Lock):
    """Gives the turn up first, after a request that no method of Front answers."""

    def __init__(self, waiting: SharedWaiting) -> None:
        super().__init__(waiting)
        self._turns = waiting.turns

    async def __aenter__(self) -> None:
        self._turns.release()
        await super().__aenter__()


class SharedWaiting(Waiting):
    """The waiting of one of several processes: only the one whose turn it is reads a request.

    The first process always waits for requests. The others are parked, as all that wait would be woken by each
    request, and one reader would then be slower than with one process. A process that does not get ahead of the
    requests wakes another; one that is woken in vain parks again.
    """

    def __init__(self, shared: Shared, process: int) -> None:
        super().__init__()
        self.turns = shared.new_turns()
        self._shared, self._process = shared, process
        self._vain = 0
        self._bell = shared.bells[process]

    def Lock(self) -> Lock:
        return _SharedLock(self)

    def close(self) -> None:
        self.turns.release()

    async def wait_readable(self, descriptor: int) -> None:
        self.turns.release()
        poll = self.poll_of(descriptor)
        while True:
            if self.taken >= AT_ONCE:
                self._shared.wake_one(self._process)
                self.taken = 0
                await trio.lowlevel.checkpoint()
            if self.turns.take():
                if found := poll.poll(0):
                    self.look(found)
                    self.taken += 1
                    self._vain = max(0, self._vain - 1)
                    return
                self.turns.release()
                self._vain += 1
            self.taken = 0
            if self._process:
                if self._vain > _IN_VAIN:
                    await self._park()
                    continue
                with trio.move_on_after(_IDLE) as scope:
                    await trio.lowlevel.wait_readable(descriptor)
                if scope.cancelled_caught:
                    await self._park()
            else:
                await trio.lowlevel.wait_readable(descriptor)

    async def _park(self) -> None:
        """Wait until another process calls; look for requests from time to time, as that one may be stuck."""
        self._vain = 0
        self._shared.put(self._process, PARKED, 1)
        with trio.move_on_after(_PARKED):
            await trio.lowlevel.wait_readable(self._bell)
        self._shared.put(self._process, PARKED, 0)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
