"""Reliable exceptions from signal handlers: an exception that Python drops is raised again.

Python reports and drops an exception that is raised in a weak reference callback or in __del__; importlib has such a
callback for each module. Some C code clears exceptions, for example the constructor of io.BufferedReader. A signal
handler may run in any of these places, and then Ctrl-C would have no effect. Source: sys.unraisablehook in the Python
library reference.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from zarrfs.errors import TimedOut

_LATER = 0.001  # seconds, after which Python has usually left the code that dropped the exception
ALARM_AGAIN = 0.01  # seconds between alarms; they repeat because one just before a system call does not interrupt it


class End(SystemExit):
    """The end of this process, raised by a signal handler. Code that catches it must call os._exit().

    If Python drops the exception, SIGALRM raises it again. For that, the constructor replaces the handler of SIGALRM.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)

        def raise_anew(number: int, frame: FrameType | None) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise End(code)

        signal.signal(signal.SIGALRM, raise_anew)

    def __del__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, _LATER, ALARM_AGAIN)


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP unless it is ignored, interrupt the body as Ctrl-C does."""
    ends = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup(1)
        ends.append(signal.SIGHUP)
    came = False

    def end(*_: object) -> None:
        nonlocal came
        came = True
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, end) for number in ends}
    interrupt = signal.getsignal(signal.SIGINT)
    # shells ignore SIGINT in background commands of scripts (cmd &), and end() raises SIGINT for SIGTERM
    if interrupt is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except Exception as exc:  # code may have turned the KeyboardInterrupt into another exception
        if came:
            raise KeyboardInterrupt from exc
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGINT, interrupt)


def raise_again() -> None:
    """Install a hook that raises KeyboardInterrupt and TimedOut again when Python reports that it dropped them.

    The hook uses SIGALRM for that, and replaces the handler that a deadline may have set.
    """
    sys.unraisablehook = _hook


def _hook(dropped: sys.UnraisableHookArgs) -> None:
    lost = dropped.exc_value
    if isinstance(lost, End):
        return
    if not isinstance(lost, KeyboardInterrupt | TimedOut):
        sys.__unraisablehook__(dropped)
        return

    def raise_anew(number: int, frame: FrameType | None) -> None:
        if _is_hook(frame):  # Python would drop an exception raised now, without calling the hook again
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(lost, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # trio's handler knows where it may raise
        else:
            raise lost

    try:
        signal.signal(signal.SIGALRM, raise_anew)
        signal.setitimer(signal.ITIMER_REAL, _LATER, ALARM_AGAIN)
    except ValueError:  # not in the main thread, so no signal handler raised the exception
        sys.__unraisablehook__(dropped)


def _is_hook(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _hook.__code__:
        frame = frame.f_back
    return frame is not None
