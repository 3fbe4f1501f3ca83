"""The session loop of one of several processes that answer the same mount. It decides which process takes requests."""

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

# Requests between two polls for another pending request. Not a multiple of four, because a client may send the same
# four requests for each file.
_EVERY = 7
# Fractions of the polls that find a pending request: above _MANY a process wakes another one, below _FEW it may park.
_MANY, _FEW = 0.6, 0.3
_ENOUGH = 0.7  # a process parks only if the others are then busy for less than this fraction of the time
_QUIET = 0.05  # busy fraction of the time below which the first process waits in epoll, not in read(2)
_WINDOW = 0.01  # seconds of one measurement of the busy fraction
_IN_VAIN = 8  # times that a process is woken and finds no request before it is parked
# Seconds without a request after which a process is parked; seconds between the checks of a parked one for requests.
_IDLE, _PARKED = 0.05, 0.25
_LOOK = 0.5  # seconds between two checks for an unmount
_STUCK = 0.005  # seconds for which read(2) may block because another process has taken the request


class Front:
    """The object whose handlers pyfuse3 calls. It passes requests to `operations`, which may be set after the fork."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self) -> None:
        self.operations: Any = None
        self.requests, self.at = 0, 0.0  # number of requests; when the last one came
        self.look: Callable[[], None] | None = None  # called at every _EVERY-th request
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
    """The recent load of a process: moving averages between 0 and 1.

    `share` is the fraction of the time in which the process has requests to answer. `backlog` is how often another
    request is pending when one is taken. `share` alone is no sign of load: with a single reader on the same core a
    process is busy, too, but no request is pending.
    """

    def __init__(self, front: Front, replied: Callable[[], None]) -> None:
        """`replied` is called at times when every handler that has returned has also sent its reply."""
        self._front, self._replied = front, replied
        self.share = self.backlog = 0.0
        self._waited = 0.0  # seconds of waiting since `_since`
        self._since = time.monotonic()
        self._begun = 0.0  # when the present wait began; 0: the process does not wait

    def begin_wait(self) -> None:
        """Note that the process begins to wait for a request."""
        self._begun = time.monotonic()

    def end_wait(self, now: float) -> None:
        """End a wait, if there is one, at the time `now`: when the request came, or when the wait was interrupted."""
        if self._begun:
            self._waited += max(0.0, now - self._begun)
            self._begun = 0.0

    def look(self, poll: select.poll) -> None:
        """Update `backlog`: poll whether another request is pending now."""
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
        """Reset the averages to full load, because the time for which the process was parked says nothing."""
        self.share, self.backlog, self._waited, self._since = 1.0, 1.0, 0.0, time.monotonic()

    def measure(self) -> None:
        """Update `share`."""
        passed = time.monotonic() - self._since
        if passed >= _WINDOW:
            self.share += (1 - min(1.0, self._waited / passed) - self.share) / 4
            self._since += passed
            self._waited = 0.0


async def begin(front: Front) -> None:
    """Answer INIT, the first request of the session, and no other. Later requests wait for the session loops."""
    waiting = pyfuse3.trio = _Beginning(front)  # type: ignore[attr-defined]
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main, 1, 1)
            await waiting.answered.wait()
            nursery.cancel_scope.cancel()
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]


class _Beginning(Waiting):
    """Wait for one request, then block."""

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
    """Waiting for requests in one of several processes.

    The first process always waits for requests. The others are parked unless they are needed, because each request
    wakes all processes that wait in epoll, and the requests of one reader would go to one process after the other,
    whose code is not in the caches of its core. A process that cannot keep up with the requests wakes another one. A
    process parks again when the others have time for its requests.

    pyfuse3 calls read(2) without checking that the request is still pending. If another process has taken it, read(2)
    blocks until the next request, and with it the whole process. A timer interrupts the call, and pyfuse3 waits again.
    A process that has no other work calls read(2) without polling first, because the kernel wakes only one of the
    processes that wait in read(2).
    """

    def __init__(self, shared: Shared, process: int, front: Front) -> None:
        super().__init__()
        self._shared, self._process, self._front = shared, process, front
        # A handler that has awaited something sends a new handle while another task is already in wait_readable(). So
        # the cell NEW is also cleared whenever the event loop waits.
        self._load = Load(front, functools.partial(shared.put, process, NEW, 0))
        self._vain = self._answered = 0
        self._bell = shared.bells[process]
        self._cells, self._new = shared.cells, shared.at(process, NEW)
        self._ticking = self._stopped = False
        self._stuck: int | None = None  # number of answers of the others when they were found to be stuck
        _let_alarms_interrupt()

    def open(self) -> None:
        trio.lowlevel.add_instrument(self._load)

    async def wait_readable(self, descriptor: int) -> None:
        self._cells[self._new] = 0  # a handler that has not awaited anything has replied before a task comes here
        poll, load = self.poll_of(descriptor), self._load
        if self._front.look is None:
            self._front.look = functools.partial(load.look, poll)
        got = self._front.requests != self._answered  # otherwise the last read was interrupted
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
                self.taken += 1  # no other work: wait in read(2), where a request wakes only one process
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
        """Return whether this process may park because the others have time for its requests.

        For the first process, which never parks: whether it is so idle that it waits in epoll.
        """
        if self._stuck is not None:
            if self._stuck == self._answers_elsewhere():
                return False  # otherwise each request would wait for the next check of this process while parked
            self._stuck = None
        if not self._process:
            return self._load.share < _QUIET
        active = self._shared.active()
        return self._load.backlog < _FEW and self._load.share * active < _ENOUGH * (active - 1)

    def stop(self) -> None:
        """Take no more requests. Only for a parked process, which has taken no request that it has not answered."""
        self._stopped = True

    async def watch(self, descriptor: int) -> None:
        """Poll for the unmount until cancelled.

        A process that calls read(2) without polling would not notice the unmount while requests are in flight.
        """
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
        """Wait until another process wakes this one, or until requests are pending and the others are stuck."""
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
        """Return whether a request is pending and no other process has taken one for a moment."""
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
    """Let SIGALRM interrupt a system call and do nothing else. A handler in Python would also wake the event loop."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    libc.signal(signal.SIGALRM, ctypes.cast(libc.abs, ctypes.c_void_p))  # abs(int) as a handler without effects
    signal.siginterrupt(signal.SIGALRM, True)
