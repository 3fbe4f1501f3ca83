"""The session loop of one of several processes that answer the same mount: who of them reads the next request."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import pyfuse3
import trio

from zarrfs.fuse.sessionloop import AT_ONCE, Waiting
from zarrfs.fuse.shared import NEW, PARKED, USES, Shared

_EVERY = 7  # requests between two looks for another one; no multiple of four, as a file may be four requests
_MANY, _FEW = 0.6, 0.3  # parts of the looks that find one: above the first, a process wakes another
_ENOUGH = 0.7  # the part of the time that the others may have to answer after one is parked
_QUIET = 0.05  # the part of the time up to which the first process waits as if it were alone
_WINDOW = 0.01  # seconds of one measurement of that
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
        self.requests, self.at = 0, 0.0  # the last one came at that time
        self.look: Callable[[], None] | None = None  # called for some requests
        self.begun = trio.Event()

    def init(self) -> None:
        """Note that the kernel has begun the session."""
        self.begun.set()

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        self.at = time.monotonic()
        if not self.requests % _EVERY and self.look is not None:
            self.look()
        return getattr(self.operations, name)


class Load(trio.abc.Instrument):
    """The load of a process in the last moments.

    `share` is the part of the time in which it has requests to answer, `backlog` how often another request waits when
    one is taken. With one reader a process is busy, too, as they may share a core: but nothing waits.
    """

    def __init__(self, front: Front, replied: Callable[[], None]) -> None:
        """`replied` is called when the handlers that have returned have also replied."""
        self._front, self._replied = front, replied
        self.share = self.backlog = 0.0
        self._waited = 0.0  # seconds since `_since`
        self._since = time.monotonic()
        self._begun = 0.0  # when the present wait began; 0 outside one

    def begin_wait(self) -> None:
        """Begin a wait in read(2)."""
        self._begun = time.monotonic()

    def end_wait(self, now: float) -> None:
        """End it: with an interruption, or when the request had come."""
        if self._begun:
            self._waited += max(0.0, now - self._begun)
            self._begun = 0.0

    def look(self, poll: select.poll) -> None:
        """See whether another request waits at the moment that one has been taken."""
        self.backlog += (bool(poll.poll(0)) - self.backlog) / 16

    def before_io_wait(self, timeout: float) -> None:
        """Implement trio.abc.Instrument."""
        self._replied()
        if timeout and not self._front.operations.working:
            self.begin_wait()

    def after_io_wait(self, timeout: float) -> None:
        """Implement trio.abc.Instrument."""
        self.end_wait(time.monotonic())

    def woken(self) -> None:
        """Begin anew, after a wait that says nothing about the requests to come."""
        self.share, self.backlog, self._waited, self._since = 1.0, 1.0, 0.0, time.monotonic()

    def measure(self) -> None:
        """Bring `share` up to date."""
        passed = time.monotonic() - self._since
        if passed >= _WINDOW:
            self.share += (1 - min(1.0, self._waited / passed) - self.share) / 4
            self._since += passed
            self._waited = 0.0


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
    request, and what one reader asks would go to each in turn, none of which has its code in the caches of a core. A
    process that does not get ahead of the requests wakes another; one is parked again when the others have time for
    its requests.

    pyfuse3 reads a request without asking whether it is still there: where another process has taken it, the read
    waits for the next one, and the whole process with it. A timer interrupts it, after which pyfuse3 waits again. A
    process that has nothing else to do reads at once: of those that wait in read(2) the kernel wakes one alone.
    """

    def __init__(self, shared: Shared, process: int, front: Front) -> None:
        super().__init__()
        self._shared, self._process, self._front = shared, process, front
        # a handle that a handler opens after a wait is sent while this process waits for the next request already
        self._load = Load(front, functools.partial(shared.put, process, NEW, 0))
        self._vain = self._answered = 0
        self._bell = shared.bells[process]
        self._cells, self._new = shared.cells, shared.at(process, NEW)
        self._ticking = self._stopped = False
        self._stuck: int | None = None  # answers of the others when they were found to be stuck
        _let_alarms_interrupt()

    def open(self) -> None:
        trio.lowlevel.add_instrument(self._load)

    async def wait_readable(self, descriptor: int) -> None:
        self._cells[self._new] = 0  # a handler that has opened a handle has replied before anybody waits here
        poll, load = self.poll_of(descriptor), self._load
        if self._front.look is None:
            self._front.look = functools.partial(load.look, poll)
        got = self._front.requests != self._answered  # else the last read was interrupted
        self._answered = self._front.requests
        self._vain = max(0, self._vain - 1) if got else self._vain + 1
        load.end_wait(self._front.at if got else time.monotonic())
        while True:
            if self.taken >= AT_ONCE or not got:
                load.measure()
                if not got:
                    load.look(poll)
                if load.backlog > _MANY:
                    self._shared.wake_one(self._process)
                self.taken, got = 0, True
                self._tick(self._shared.others_run(self._process))
                await trio.lowlevel.checkpoint()
            spare = self._is_spare()
            if self._ticking and not spare and not self._front.operations.working:
                self.taken += 1  # nothing else to do: the read itself waits, and wakes no other process
                load.begin_wait()
                return
            if found := poll.poll(0):
                self.look(found)
                self.taken += 1
                self._tick(self._ticking or self._shared.others_run(self._process))
                return
            self.taken = 0
            if self._process and (spare or self._vain > _IN_VAIN):
                await self._park(poll)
                continue
            with trio.move_on_after(_IDLE) as scope:
                await trio.lowlevel.wait_readable(descriptor)
            load.measure()
            if not scope.cancelled_caught:
                self._vain += not poll.poll(0)
            elif self._process:
                await self._park(poll)
            else:
                self._tick(False)
                await trio.lowlevel.wait_readable(descriptor)

    def _is_spare(self) -> bool:
        """Return whether the other processes that wait for requests have time for those of this one."""
        if self._stuck is not None:
            if self._stuck == self._answers_elsewhere():
                return False  # else each request would wait until this process looks for requests again
            self._stuck = None
        if not self._process:
            return self._load.share < _QUIET
        active = self._shared.active()
        return self._load.backlog < _FEW and self._load.share * active < _ENOUGH * (active - 1)

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
        with contextlib.suppress(KeyError, RuntimeError):
            trio.lowlevel.remove_instrument(self._load)

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
            if not scope.cancelled_caught or await self._are_others_stuck(poll):
                break
        self._shared.put(self._process, PARKED, 0)
        self._load.woken()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    async def _are_others_stuck(self, poll: select.poll) -> bool:
        """Return whether a request waits, and no other process has answered one for a moment."""
        if not poll.poll(0):
            return False
        answered = self._answers_elsewhere()
        await trio.sleep(_STUCK)
        if not poll.poll(0) or self._answers_elsewhere() != answered:
            return False
        self._stuck = answered
        return True

    def _answers_elsewhere(self) -> int:
        return self._shared.total(USES) - self._shared.cell(self._process, USES)


def _let_alarms_interrupt() -> None:
    """Let SIGALRM end a system call and do nothing else: a handler in Python would also wake the loop each time."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    libc.signal(signal.SIGALRM, ctypes.cast(libc.abs, ctypes.c_void_p))  # a function of an int without effects
    signal.siginterrupt(signal.SIGALRM, True)
