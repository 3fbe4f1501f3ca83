"""The session loop of one of several processes that answer the same mount: who of them reads the next request."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from typing import Any

import pyfuse3
import trio

from zarrfs.fuse.sessionloop import AT_ONCE, Waiting
from zarrfs.fuse.shared import PARKED, Shared

_IN_VAIN = 8  # times that a process finds no request before it is parked
_IDLE, _PARKED = 0.05, 0.25  # seconds: without a request until it is parked, and until a parked one looks by itself
_LOOK = 0.5  # seconds between two looks for an unmount
_STUCK = 0.005  # seconds that a read of a request that another process has taken may wait


class Front:
    """The object that pyfuse3 calls: it passes each request to `operations`, which may be set after the fork."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self) -> None:
        self.operations: Any = None
        self.requests = 0
        self.begun = trio.Event()

    def init(self) -> None:
        """Note that the kernel has begun the session."""
        self.begun.set()

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
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


class SharedWaiting(Waiting):
    """The waiting of one of several processes.

    The first process always waits for requests. The others are parked, as all that wait would be woken by each
    request, and one reader would then be slower than with one process. A process that does not get ahead of the
    requests wakes another; one that is woken in vain parks again.

    pyfuse3 reads a request without asking whether it is still there: where another process has taken it, the read
    waits for the next one, and the whole process with it. A timer interrupts it, after which pyfuse3 waits again. A
    process that has nothing else to do reads at once: of those that wait in read(2) the kernel wakes one alone.
    """

    def __init__(self, shared: Shared, process: int, front: Front) -> None:
        super().__init__()
        self._shared, self._process, self._front = shared, process, front
        self._vain = self._answered = 0
        self._bell = shared.bells[process]
        self._ticking = self._stopped = False
        _let_alarms_interrupt()

    async def wait_readable(self, descriptor: int) -> None:
        poll, got = self.poll_of(descriptor), self._front.requests != self._answered
        self._answered = self._front.requests
        self._vain = max(0, self._vain - 1) if got else self._vain + 1  # the last read was interrupted
        while True:
            if self.taken >= AT_ONCE:
                if poll.poll(0):
                    self._shared.wake_one(self._process)
                self.taken = 0
                self._tick(self._shared.others_run(self._process))
                await trio.lowlevel.checkpoint()
            if got and self._ticking and not self._front.operations.working:
                self.taken += 1  # nothing else to do: the read itself waits, and wakes no other process
                return
            if found := poll.poll(0):
                self.look(found)
                self.taken += 1
                self._tick(self._ticking or self._shared.others_run(self._process))
                return
            self.taken = 0
            if self._vain > _IN_VAIN and self._process:
                await self._park(poll)
                continue
            with trio.move_on_after(_IDLE) as scope:
                await trio.lowlevel.wait_readable(descriptor)
            if not scope.cancelled_caught:
                self._vain += not poll.poll(0)
            elif self._process:
                await self._park(poll)
            else:
                self._tick(False)
                await trio.lowlevel.wait_readable(descriptor)

    def stop(self) -> None:
        """Take no more requests. For a process that is parked: the kernel has given it none."""
        self._stopped = True

    async def watch(self, descriptor: int) -> None:
        """Look for an unmount, for ever: a process that reads at once does not see it beside requests under way."""
        poll = self.poll_of(descriptor)
        while True:
            await trio.sleep(_LOOK)
            self.look(poll.poll(0))

    def close(self) -> None:
        self._tick(False)

    def _tick(self, ticking: bool) -> None:
        if ticking != self._ticking:
            self._ticking = ticking
            signal.setitimer(signal.ITIMER_REAL, *((_STUCK, _STUCK) if ticking else (0.0, 0.0)))

    async def _park(self, poll: select.poll) -> None:
        """Wait until another process calls; look for requests from time to time, as that one may be stuck."""
        self._vain = 0
        self._tick(False)
        self._shared.put(self._process, PARKED, 1)
        while True:
            with trio.move_on_after(_PARKED) as scope:
                await trio.lowlevel.wait_readable(self._bell)
            if self._stopped:
                await trio.sleep_forever()
            if not scope.cancelled_caught or poll.poll(0):
                break
        self._shared.put(self._process, PARKED, 0)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)


def _let_alarms_interrupt() -> None:
    """Let SIGALRM end a system call and do nothing else: a handler in Python would also wake the loop each time."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    libc.signal(signal.SIGALRM, ctypes.cast(libc.abs, ctypes.c_void_p))  # a function of an int without effects
    signal.siginterrupt(signal.SIGALRM, True)
