"""Outages: while a server does not answer, one request at a time tries it again, and its other requests wait.

An outage begins when a request fails and the server has answered no other request since that was sent. It ends with
any answer. Requests take turns to try, because one of them may fail for reasons that do not affect the next.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import trio

from zarrfs.config.redaction import redact_text

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts, doubled each time
_LOGGED = 1.0  # seconds after which an outage is logged: a single broken connection is not an outage
_REASON = 200  # characters of the reason that are kept
_PATIENCE = 5.0  # seconds that the first attempt may take, doubled after each attempt without an answer


class Outage:
    """The outage of one server, since the time `began` when `path` was requested.

    `waited`: number of requests of readers that have waited for its end so far.
    """

    def __init__(self, server: str, path: str, began: float, waited: int) -> None:
        self.server, self.began, self.waited, self.reason = server, began, waited, ""
        self.since = time.time() - self.seconds
        self.turn = trio.Lock()  # held by the request that tries next; the others wait for it in order
        self.patience = _PATIENCE
        self._logged = False
        self._failed_path: str | None = path  # the only path that has been requested so far, else None
        self._pause, self._next = _FIRST_PAUSE, 0.0
        self._over = trio.Event()

    @property
    def seconds(self) -> float:
        """The duration so far."""
        return trio.current_time() - self.began

    def lets_pass(self, path: str) -> bool:
        """Return True for one request for another path than the failed one: perhaps only the first path fails."""
        passes = self._failed_path not in (None, path)
        if passes:
            self._failed_path = None
        return passes

    async def next_attempt(self) -> bool:
        """Wait until the next attempt is due; return False if the outage is over. The caller must hold `turn`."""
        with trio.CancelScope(deadline=self._next):
            await self._over.wait()
        return not self._over.is_set()

    def failed(self, path: str, reason: str, after: float, in_turn: bool) -> None:
        """Note a failure, of a request that had its turn or of another one.

        `after`: seconds that the server asked to wait.
        """
        self.lets_pass(path)
        self.reason = redact_text(reason)[:_REASON]
        if in_turn:
            after = max(after, self._pause * random.uniform(0.75, 1.25))
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._next = max(self._next, trio.current_time() + after)
        if self._logged or self.seconds < _LOGGED:
            return
        self._logged = True
        log.warning("%s is out: %s: its requests wait, and one at a time tries again", self.server, self.reason)

    def end(self) -> None:
        """Let all requests go on: the server has answered."""
        self._over.set()
        if self._logged:
            count = f"{self.waited:,} request{'' if self.waited == 1 else 's'}"
            log.warning("%s answers again: it was out for %.1f s, and %s waited for it", self.server, self.seconds,
                        count)  # fmt: skip

    def described(self) -> str:
        """Return which server is out, for how long, and why."""
        return f"{self.server} has been out for {self.seconds:.1f} s: {self.reason}"

    def facts(self, readers: int) -> dict[str, Any]:
        """Return what `zarrfs stats` reports; `readers` requests wait."""
        return {
            "since": round(self.since, 3), "seconds": round(self.seconds, 3), "reason": self.reason, "waiting": readers
        }  # fmt: skip
