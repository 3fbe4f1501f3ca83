"""Count failed requests, and limit their lines in the log.

Readers of one chunk, or of a million chunks, may cause the same failure thousands of times a minute. In each minute, a
failure is logged when it first happens, up to LINES different ones; a line at the end of the minute counts the others.
"""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger(__name__)

PERIOD = 60.0  # seconds
LINES = 100  # in a period
_NAMED = 5  # kinds of failures named in the line about those that were not logged


class Failures:
    """The failures of one process. Not thread-safe: all handlers of requests run in one thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by the name of their errno
        self._logged: set[tuple[str, ...]] = set()  # in this period
        self._others: Counter[tuple[str, str]] = Counter()  # by operation and errno, in this period

    def add(self, operation: str, key: str, errno: str, kind: str, text: str) -> bool:
        """Count a failure, and log `text` unless it is suppressed; return whether it was logged.

        `errno` is the name of the errno, `kind` the exception type.
        """
        self.counts[errno] += 1
        which = operation, key, errno, kind
        if which in self._logged or len(self._logged) >= LINES:
            self._others[operation, errno] += 1
            return False
        self._logged.add(which)
        log.error("%s", text)
        return True

    def end_period(self) -> None:
        """Log the number of failures that were not logged, and begin a new period."""
        if self._others:
            kinds = ", ".join(f"{number:,} {' '.join(of)}" for of, number in self._others.most_common(_NAMED))
            more = ", ..." if len(self._others) > _NAMED else ""
            log.error("further failures, not logged one by one: %s%s", kinds, more)
        self._logged.clear()
        self._others.clear()


FAILURES = Failures()


async def log_suppressed() -> None:
    """End the periods, the last one when cancelled."""
    import trio  # not at the top, because the command line imports this module

    try:
        while True:
            await trio.sleep(PERIOD)
            FAILURES.end_period()
    finally:
        FAILURES.end_period()
