"""Exceptions raised by signal handlers, made reliable: one that Python drops is raised again.

Python drops an exception that is raised in a weak reference callback or in __del__, and goes on; importlib has such a
callback for each module. Some C code clears exceptions, as io.BufferedReader does in its constructor. A signal handler
may run there as anywhere, and then Ctrl-C had no effect. Source: sys.unraisablehook in the Python library reference.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from zarrfs.errors import TimedOut

_LATER = 0.001  # seconds: by then Python has usually left the code that dropped it
ALARM_AGAIN = 0.01  # seconds: an alarm that comes just before a system call does not interrupt it, so that more follow


class End(SystemExit):
    """The end of this process, raised by a signal handler. Code that catches it ends the process by os._exit().

    If Python drops it, SIGALRM raises it again, whose handler it replaces.
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
    """Let SIGTERM, and SIGHUP unless that is ignored, end what is inside as Ctrl-C does."""
    ends = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup(1) has it
        ends.append(signal.SIGHUP)
    came = False

    def end(*_: object) -> None:
        nonlocal came
        came = True
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, end) for number in ends}
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.SIG_IGN:  # as scripts start what goes on behind them (cmd &): SIGTERM would be, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except Exception as exc:  # what code made of the signal's exception, or a consequence of it
        if came:
            raise KeyboardInterrupt from exc
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGINT, interrupt)


def raise_again() -> None:
    """Install a hook that raises KeyboardInterrupt and TimedOut again when Python reports that it dropped them.

    The hook then uses SIGALRM, replacing the handler of a deadline.
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
        if _is_hook(frame):  # Python would drop what is raised here, and call no hook
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(lost, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # trio's handler knows where it may raise
        else:
            raise lost

    try:
        signal.signal(signal.SIGALRM, raise_anew)
        signal.setitimer(signal.ITIMER_REAL, _LATER, ALARM_AGAIN)
    except ValueError:  # not the main thread: handlers run only there, so this came from no handler
        sys.__unraisablehook__(dropped)


def _is_hook(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _hook.__code__:
        frame = frame.f_back
    return frame is not None
