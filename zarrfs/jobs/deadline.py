"""A deadline for a whole command (--timeout)."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from zarrfs.errors import TimedOut, ZarrfsError, behind

_AGAIN = 0.01  # seconds between alarms; they repeat because one just before a system call does not interrupt it


class Deadline:
    """A deadline `seconds` from now, or no deadline if that is None. Code that runs longer gets TimedOut."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else time.monotonic() + seconds

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Raise TimedOut in blocking code of the main thread, by means of SIGALRM."""
        if self._at is None:
            yield
            return
        before = signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self._at - time.monotonic()), _AGAIN)
        try:
            yield
        except Exception as exc:
            late = None if isinstance(exc, ZarrfsError | OSError) else behind(exc)
            if late is None:
                raise
            raise late from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @contextlib.contextmanager
    def on_trio(self) -> Iterator[None]:
        """Raise TimedOut in trio code within armed(). Stops the alarm for good, as it would break the event loop."""
        if self._at is None:
            yield
            return
        import trio

        signal.setitimer(signal.ITIMER_REAL, 0)
        with trio.move_on_after(max(0.0, self._at - time.monotonic())) as scope:
            yield
        if scope.cancelled_caught:
            raise self._timed_out()

    def _on_alarm(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise self._timed_out()

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"not done after {self._seconds:g} s (--timeout)")
