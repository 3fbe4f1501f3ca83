"""Outages of servers: one request at a time is sent as a probe, while the others wait.

An outage begins when a request fails and the server has answered no other request meanwhile. Any answer ends it.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import trio

from zarrfs.config.redaction import redact_text

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between probes, doubled each time
_AFTER_OTHERS = 0.01  # seconds by which a request that has failed lets others go first
_LOGGED = 1.0  # seconds after which an outage is logged: a single broken connection is not an outage
_REASON = 200  # characters of the reason that are kept
_PATIENCE = 5.0  # seconds that a probe may always take


class Outage:
    """The outage of one server, since the time `began` of trio's clock."""

    def __init__(self, server: str, began: float) -> None:
        self.server, self.began, self.reason = server, began, ""
        self.since = time.time() - self.seconds
        self._pause, self._next = _FIRST_PAUSE, trio.current_time() + _FIRST_PAUSE
        self._logged, self._over = False, trio.Event()

    @property
    def seconds(self) -> float:
        """The duration so far."""
        return trio.current_time() - self.began

    @property
    def patience(self) -> float:
        """The seconds that a probe may take now."""
        return max(_PATIENCE, self.seconds / 2)

    async def may_probe(self, again: bool) -> bool:
        """Wait until the caller may send the next probe, and return True; return False once the outage is over.

        `again`: the request of the caller has failed before. Others, which may be for another value, go first.
        """
        while not self._over.is_set():
            now, due = trio.current_time(), self._next + _AFTER_OTHERS * again
            if now >= due:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                self._next = now + self._pause * random.uniform(0.75, 1.25)
                return True
            with trio.CancelScope(deadline=due):
                await self._over.wait()
        return False

    def failed(self, reason: str, after: float) -> None:
        """Note a failure. `after`: seconds that the server asked to wait."""
        self.reason = redact_text(reason)[:_REASON]
        self._next = max(self._next, trio.current_time() + after)
        if not self._logged and self.seconds >= _LOGGED:
            self._logged = True
            log.warning("%s is out: %s: its requests wait, and one at a time tries again", self.server, self.reason)

    def end(self) -> None:
        """Let all requests go on: the server has answered."""
        self._over.set()
        if self._logged:
            log.warning("%s answers again: it was out for %.1f s", self.server, self.seconds)

    def described(self) -> str:
        """Return which server is out, for how long, and why."""
        return f"{self.server} has been out for {self.seconds:.1f} s: {self.reason}"

    def facts(self, readers: int) -> dict[str, Any]:
        """Return what `zarrfs stats` reports; `readers` requests wait."""
        return {
            "since": round(self.since, 3), "seconds": round(self.seconds, 3), "reason": self.reason, "waiting": readers
        }  # fmt: skip
