"""One deadline for all that a command does."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from zarrfs.errors import TimedOut


class Deadline:
    """`seconds` from now, or None for never; TimedOut is raised where that is over."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else time.monotonic() + seconds

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """For code that blocks, in the main thread."""
        if self._at is None:
            yield
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self._at - time.monotonic()))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @contextlib.contextmanager
    def on_trio(self) -> Iterator[None]:
        """For code on trio, within armed(): an exception out of a signal handler would harm its loop."""
        if self._at is None:
            yield
            return
        import trio

        signal.setitimer(signal.ITIMER_REAL, 0)
        with trio.move_on_after(max(0.0, self._at - time.monotonic())) as scope:
            yield
        if scope.cancelled_caught:
            raise self._over()

    def _ring(self, *_: object) -> None:
        raise self._over()

    def _over(self) -> TimedOut:
        return TimedOut(f"not done after {self._seconds:g} s (--timeout)")
