"""Count failed requests, and limit their lines in the log.

Readers of one chunk, or of a million chunks, may cause the same failure thousands of times a minute. A failure is
logged immediately, and then at most once a minute with the number of repetitions. All failures share a token bucket
of lines.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger(__name__)

SILENCE = 60.0  # seconds between two lines about the same failure, and between two about suppressed ones
REMEMBERED = 1024  # failures whose repetitions are counted
BURST, RATE = 100, 1.0  # of the token bucket: lines in a burst, lines per second
_FLUSH_EVERY = 10.0  # seconds
_NAMED = 5  # kinds of failures named in the line about suppressed failures


class _Which(NamedTuple):
    """The operation, key, errno and exception type of a failure. Failures that agree in all four are the same."""

    operation: str
    key: str
    errno: str
    kind: str


@dataclasses.dataclass(slots=True)
class _Logged:
    """A failure with a line in the log, and the number of repetitions since that line."""

    since: float
    text: str
    more: int = 0


class Failures:
    """The failures of one process. Not thread-safe: all handlers of requests run in one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()  # by the name of their errno
        self._clock = clock
        self._logged: OrderedDict[_Which, _Logged] = OrderedDict()  # the latest line last
        self._lines, self._filled = float(BURST), clock()  # the token bucket: lines left, and when they were counted
        self._suppressed: Counter[tuple[str, str]] = Counter()  # by operation and errno
        self._suppressed_since = 0.0

    def add(self, operation: str, key: str, errno: str, kind: str, text: str) -> bool:
        """Count a failure, and log `text` unless it is suppressed; return whether it was logged.

        `errno` is the name of the errno, `kind` the exception type.
        """
        self.counts[errno] += 1
        which = _Which(operation, key, errno, kind)
        last, now = self._logged.get(which), self._clock()
        if last is not None and now - last.since < SILENCE:
            last.more += 1
            return False
        if not self._take_token(now):
            self._suppress(which, 1, now)
            return False
        self._write(which, _Logged(now, text, last.more + 1 if last and last.more else 0))
        while len(self._logged) > REMEMBERED:
            oldest, evicted = self._logged.popitem(last=False)
            self._suppress(oldest, evicted.more, now)
        return True

    def flush(self, end: bool = False) -> None:
        """Log repetitions and suppressed failures that have waited for SILENCE; with `end`, all of them."""
        now = self._clock()
        for which, last in list(self._logged.items()):
            if not end and now - last.since < SILENCE:
                break
            if last.more and self._take_token(now):
                self._write(which, dataclasses.replace(last, since=now))
            else:
                self._suppress(which, last.more, now)
                del self._logged[which]
        if self._suppressed and (end or now - self._suppressed_since >= SILENCE):
            kinds = ", ".join(f"{number:,} {' '.join(of)}" for of, number in self._suppressed.most_common(_NAMED))
            more = ", ..." if len(self._suppressed) > _NAMED else ""
            number = self._suppressed.total()
            self._suppressed.clear()
            log.error("%s failures were not logged one by one: %s%s", f"{number:,}", kinds, more)

    def _write(self, which: _Which, failure: _Logged) -> None:
        """Log the failure, with the number of repetitions since its last line, if any."""
        more = f" ({failure.more:,} more like it since the last line)" if failure.more else ""
        log.error("%s%s", failure.text, more)
        failure.more = 0
        self._logged[which] = failure
        self._logged.move_to_end(which)

    def _suppress(self, which: _Which, number: int, now: float) -> None:
        if number:
            self._suppressed_since = self._suppressed_since if self._suppressed else now
            self._suppressed[which.operation, which.errno] += number

    def _take_token(self, now: float) -> bool:
        """Take a line from the token bucket; return False if it is empty."""
        self._lines, self._filled = min(BURST, self._lines + (now - self._filled) * RATE), now
        if self._lines < 1:
            return False
        self._lines -= 1
        return True


FAILURES = Failures()


async def log_suppressed() -> None:
    """Log repetitions and suppressed failures from time to time, and all of them when cancelled."""
    import trio  # not at the top, because the command line imports this module

    try:
        while True:
            await trio.sleep(_FLUSH_EVERY)
            FAILURES.flush()
    finally:
        FAILURES.flush(end=True)
