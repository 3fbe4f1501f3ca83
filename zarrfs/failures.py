"""Failures of requests: how many there were, and which of them get a line in the log.

One failure may be met thousands of times a minute, by the readers of one chunk or of a million: each is told at once,
then once a minute with how often it came, and all of them together never more than a bounded number of lines.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("zarrfs")

SILENCE = 60.0  # seconds between two lines about the same failure, and between two about what got none
REMEMBERED = 1024  # failures
BURST, RATE = 100, 1.0  # lines at once, lines per second
_NAMED = 5  # kinds of failures in the line about what got none

Facts = Mapping[str, Any]


@dataclasses.dataclass(slots=True)
class _Told:
    """A failure that has a line, and how often it came since then."""

    since: float
    text: str
    facts: Facts
    more: int = 0


class Failures:
    """The failures of one process. Not for threads: handlers of requests run in one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()  # by the name of their errno
        self._clock = clock
        self._told: OrderedDict[tuple[str, str, str], _Told] = OrderedDict()  # the latest line last
        self._lines, self._filled = float(BURST), clock()  # how many may be written, as of when
        self._untold: Counter[tuple[str, str]] = Counter()  # by operation and errno
        self._untold_since = 0.0

    def add(self, kind: str, text: str, facts: Facts) -> bool:
        """Count a failure; whether it got a line. `text` is all of that, `facts` have operation, key and errno."""
        self.counts[facts["errno"]] += 1
        which = facts["operation"], facts["key"], kind
        told, now = self._told.get(which), self._clock()
        if told is not None and now - told.since < SILENCE:
            told.more += 1
            return False
        if not self._may_write(now):
            self._leave_out(facts, 1, now)
            return False
        self._tell(which, _Told(now, text, facts, told.more if told else 0))
        while len(self._told) > REMEMBERED:
            _, gone = self._told.popitem(last=False)
            self._leave_out(gone.facts, gone.more, now)
        return True

    def flush(self, end: bool = False) -> None:
        """Tell what came again more than a minute ago, with nothing after it; at the `end` all that was not told."""
        now = self._clock()
        for which, told in list(self._told.items()):
            if not end and now - told.since < SILENCE:
                break
            if told.more and self._may_write(now):
                self._tell(which, dataclasses.replace(told, since=now))
            else:
                self._leave_out(told.facts, told.more, now)
                del self._told[which]
        if self._untold and (end or now - self._untold_since >= SILENCE):
            kinds = ", ".join(f"{number:,} {' '.join(of)}" for of, number in self._untold.most_common(_NAMED))
            more = ", ..." if len(self._untold) > _NAMED else ""
            number = self._untold.total()
            self._untold.clear()
            log.error("%s failures without a line of their own: %s%s", f"{number:,}", kinds, more, extra={
                "facts": {"more": number}})  # fmt: skip

    def _tell(self, which: tuple[str, str, str], told: _Told) -> None:
        """Write the line, with how often the failure came since the one before."""
        facts, text = told.facts, told.text
        if told.more:
            facts, text = {**facts, "more": told.more}, f"{text} ({told.more:,} more like it since the last line)"
        log.error("%s", text, extra={"facts": facts})
        told.more = 0
        self._told[which] = told
        self._told.move_to_end(which)

    def _leave_out(self, facts: Facts, number: int, now: float) -> None:
        if number:
            self._untold_since = self._untold_since if self._untold else now
            self._untold[facts["operation"], facts["errno"]] += number

    def _may_write(self, now: float) -> bool:
        """Whether there may be a line; then it counts as written."""
        self._lines, self._filled = min(BURST, self._lines + (now - self._filled) * RATE), now
        if self._lines < 1:
            return False
        self._lines -= 1
        return True


FAILURES = Failures()
