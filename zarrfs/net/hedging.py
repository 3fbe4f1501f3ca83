"""Hedged requests: a range whose response is slow, for its server and size, is requested a second time.

The first response wins and the other request is cancelled. One task for each server finds slow requests; its timer is
set to the earliest time at which a request in flight counts as slow. A request that can be cancelled needs a cancel
scope, which costs some 5 us, so requests are watched only if one of the server's latest responses was slow. The first
slow request is therefore not sent again.
Source: Dean, Barroso: The Tail at Scale (CACM 56(2), 2013), hedged requests.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable

import trio

from zarrfs.concurrency.tasks import in_background
from zarrfs.net.responses import Fetched

log = logging.getLogger(__name__)

# The usual time is that of the last _TIMES responses, at least _LEAST, and is computed after every _EVERY responses.
_TIMES, _LEAST, _EVERY = 256, 100, 64
_WATCHED = 10_000  # requests that are watched after a slow one
_USUAL, _FACTOR = 0.95, 2.0  # a response is slow if it takes longer than this quantile times this factor
_FLOOR = 0.05  # seconds; a faster response is never slow
_SHARE, _SAVED = 0.05, 8.0  # second requests that each response allows; how many may be saved up
_AGAIN = 0.05  # seconds until the next attempt, if a slow request cannot be sent again yet
_IDLE = 1.0  # seconds without a request after which the task ends


class Pace:
    """The usual time of responses of similar size from one server."""

    __slots__ = ("_new", "_times", "slow")

    def __init__(self) -> None:
        self.slow = math.inf  # seconds after which a request is slow
        self._times: deque[float] = deque(maxlen=_TIMES)
        self._new = 0

    def add(self, seconds: float) -> bool:
        """Note the time of a response; return whether it was slow.

        The limit is twice the 95th percentile. The 99th would be useless if two of a hundred responses are slow,
        because it is then the time of a slow one.
        """
        self._times.append(seconds)
        self._new += 1
        if self._new >= _EVERY and len(self._times) >= _LEAST:
            self._new = 0
            times = sorted(self._times)
            self.slow = max(_FLOOR, _FACTOR * times[math.ceil(_USUAL * len(times)) - 1])
        return seconds > self.slow


def _size_class(size: int) -> int:
    """Return the number of the class of `size`; sizes within a class differ by less than a factor of four."""
    return size.bit_length() >> 1


class _Race:
    """A request in flight that may be sent a second time."""

    __slots__ = ("done", "due", "found", "request", "scope", "second", "size")

    def __init__(self, request: Callable[[], Awaitable[Fetched]], size: int, due: float) -> None:
        self.request, self.size, self.due = request, size, due
        self.scope = trio.CancelScope()
        self.second: trio.CancelScope | None = None  # of the second request
        self.done: trio.Event | None = None  # set at the end of the second request
        self.found: Fetched | None = None  # the first answer


class Hedges:
    """The hedged requests of one server.

    `take(size)` reserves a slot for one more request of `size` bytes, or returns False if there is none; `leave(size)`
    releases the slot.
    """

    __slots__ = ("_credit", "_leave", "_paces", "_races", "_take", "_timer", "_watched", "sent", "watches", "won")

    def __init__(self, take: Callable[[int], bool], leave: Callable[[int], None]) -> None:
        self.sent = self.won = self.watches = 0  # watches: how many of the next requests to watch
        self._take, self._leave = take, leave
        self._paces: dict[int, Pace] = {}
        self._races: dict[_Race, None] = {}
        self._credit = 0.0
        self._timer = trio.CancelScope()
        self._watched = False

    async def fetch(self, request: Callable[[], Awaitable[Fetched]], size: int) -> Fetched:
        """Send `request`, for `size` bytes, and send it a second time if it is slow.

        Raise the exception of the first request if it fails and there is no successful second one.
        """
        pace = self._paces.get(_size_class(size))
        if pace is None or pace.slow == math.inf:
            return await request()
        self.watches -= 1
        race = _Race(request, size, trio.current_time() + pace.slow)
        self._begin(race)
        try:
            with race.scope:
                race.found = await request()
        except Exception:
            if race.done is None:
                raise
            await race.done.wait()  # the second one may succeed
            if race.found is None:
                raise
        finally:
            del self._races[race]
            if race.second is not None:
                race.second.cancel()
        assert race.found is not None
        return race.found

    def note(self, size: int, seconds: float) -> None:
        """Note how many seconds a response of `size` bytes has taken."""
        size_class = _size_class(size)
        pace = self._paces.get(size_class)
        if pace is None:
            pace = self._paces[size_class] = Pace()
        if pace.add(seconds):
            self.watches = _WATCHED
        if self._credit < _SAVED:
            self._credit += _SHARE

    def _begin(self, race: _Race) -> None:
        self._races[race] = None
        if not self._watched:
            self._watched = True
            in_background(self._watch)
        elif race.due < self._timer.deadline:
            self._timer.deadline = race.due

    async def _watch(self) -> None:
        """Send slow requests again. End when no request has been in flight for _IDLE seconds."""
        idle = False
        try:
            while self._races or not idle:
                idle = not self._races
                due = min((race.due for race in self._races), default=math.inf)
                self._timer = trio.CancelScope(deadline=min(due, trio.current_time() + _IDLE))
                with self._timer:
                    await trio.sleep_forever()
                now = trio.current_time()
                for race in [race for race in self._races if race.due <= now]:
                    self._send_again(race, now)
        finally:
            self._watched = False

    def _send_again(self, race: _Race, now: float) -> None:
        if self._credit < 1 or not self._take(race.size):
            race.due = now + _AGAIN
            return
        self._credit -= 1
        race.due = math.inf
        self.sent += 1
        race.second, race.done = trio.CancelScope(), trio.Event()
        in_background(self._second, race, race.second, race.done)

    async def _second(self, race: _Race, scope: trio.CancelScope, done: trio.Event) -> None:
        try:
            with scope:
                found = await race.request()
                if race.found is None:
                    race.found = found
                    self.won += 1
                    race.scope.cancel()
        except Exception as exc:  # the first one may succeed; if not, its error is reported
            log.debug("a request that was sent a second time failed: %s", exc)
        finally:
            self._leave(race.size)
            done.set()
