"""Outages: while a server does not answer, one request at a time probes it, and its other requests wait.

An outage begins when a request fails and the server has answered no other request since that was sent. It ends with
any answer. Requests take turns as the probe, because one of them may fail for reasons that do not affect the next.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Hashable
from typing import Any

import trio

from zarrfs.config.redaction import redact_text

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between probes, doubled each time
_TOLD = 1.0  # seconds after which an outage is logged: a single broken connection is not an outage
_SAME, _LATE = 1.0, 1024  # seconds in which the kernel repeats a read that failed; number of remembered reads
_REASON = 200  # characters of the reason that are kept
_PROBE = 5.0  # seconds that the first probe may take, doubled after each probe without an answer


class Outage:
    """The outage of one server."""

    def __init__(self, server: str, reason: str, path: str, after: float) -> None:
        self.server, self.reason = server, redact_text(reason)[:_REASON]
        self.began, self.since = trio.current_time(), time.time()
        self.waited = 0  # requests of readers that have waited for the end so far
        self.waiting = 0  # requests of readers that wait now, without those that have not been sent at all
        self.over = False
        self.probe_timeout = _PROBE  # seconds that a probe may take
        self._path: str | None = path  # the only path that has been requested so far, else None
        self._pause = _FIRST_PAUSE
        self._next = 0.0
        self._taken = False  # whether a request has the turn to probe; the next one is the first in the queue
        self._queue = trio.lowlevel.ParkingLot()
        self._ended = trio.Event()
        self._logged = False
        self._late: dict[Hashable, tuple[float, str]] = {}
        self._delay(after)

    @property
    def seconds(self) -> float:
        """The duration so far."""
        return trio.current_time() - self.began

    async def turn(self, path: str) -> bool:
        """Wait until the outage is over (return False) or it is the caller's turn to probe (return True).

        After its probe, the caller must call pass_on(). One request for another path than the failed one does not
        wait, and gets False, because perhaps only the first path fails.
        """
        if self._path is not None and self._path != path:
            self._path = None
            return False
        if self._taken:
            await self._queue.park()
            if self.over:
                return False
        self._taken = True
        try:
            with trio.CancelScope(deadline=self._next):
                await self._ended.wait()
        except BaseException:
            self.pass_on()
            raise
        return not self.over

    def fail(self, reason: str, after: float, path: str, probe: bool) -> bool:
        """Note a failure, of a `probe` or of another request; return whether this call has logged the outage."""
        self.reason = redact_text(reason)[:_REASON]
        if self._path != path:
            self._path = None
        if probe:
            self._delay(after)
        elif after:
            self._next = max(self._next, trio.current_time() + after)
        if self._logged or self.seconds < _TOLD:
            return False
        self._logged = True
        facts = {"host": self.server}
        log.warning("%s is out: %s: its requests wait, and one at a time tries again", self.server, self.reason,
                    extra={"facts": facts})  # fmt: skip
        return True

    def pass_on(self) -> None:
        """Pass the turn to probe to the request that has waited longest."""
        self._taken = bool(self._queue.unpark())

    def end(self) -> None:
        """Release all requests that wait: the server has answered."""
        self.over = True
        self._ended.set()
        self._queue.unpark_all()
        if self._logged:
            lasted, count = self.seconds, f"{self.waited:,} request{'' if self.waited == 1 else 's'}"
            facts: dict[str, Any] = {"host": self.server, "seconds": round(lasted, 3), "waited": self.waited}
            log.warning("%s answers again: it was out for %.1f s, and %s waited for it", self.server, lasted, count,
                        extra={"facts": facts})  # fmt: skip

    def note_late(self, key: Hashable, reason: str) -> None:
        """Note that the read `key` has reached its deadline, and the reason in its error."""
        self._late[key] = trio.current_time(), reason
        while len(self._late) > _LATE:
            del self._late[next(iter(self._late))]

    def late(self, key: Hashable) -> str:
        """Return the reason with which the same read has failed less than _SAME seconds ago; "" for other reads."""
        at, reason = self._late.get(key, (-math.inf, ""))
        return reason if trio.current_time() - at < _SAME else ""

    def described(self) -> str:
        """Return which server is out, for how long, and why."""
        return f"{self.server} has been out for {self.seconds:.1f} s: {self.reason}"

    def stats(self, queued: int) -> dict[str, Any]:
        """Return facts for `zarrfs stats`; `queued` requests wait to be sent."""
        return {
            "since": round(self.since, 3), "seconds": round(self.seconds, 3), "reason": self.reason,
            "waiting": self.waiting + queued,
        }  # fmt: skip

    def _delay(self, after: float) -> None:
        """Delay the next probe, at least for the `after` seconds that the server asked for."""
        self._next = trio.current_time() + max(after, self._pause * random.uniform(0.75, 1.25))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
