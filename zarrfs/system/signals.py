"""Exceptions that signal handlers raise, in a process of our own: none of them is lost.

Python drops an exception that it meets in a callback of a weak reference or in __del__, and goes on; importlib has
such a callback for each module. C code clears some, as io.BufferedReader does while it is made. A handler's may come
there as anywhere, and Ctrl-C did nothing then. Source: sys.unraisablehook in the Python library reference.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from zarrfs.errors import TimedOut

_LATER = 0.001  # seconds: by then Python is out of what dropped it, or this is done once more


class End(SystemExit):
    """The end of this process, raised by a signal handler. Who catches it ends the process, by os._exit().

    Where it is dropped, it is raised once more. It takes SIGALRM.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)

        def once_more(number: int, frame: FrameType | None) -> None:
            raise End(code)

        signal.signal(signal.SIGALRM, once_more)

    def __del__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, _LATER)


def raise_again() -> None:
    """Let Ctrl-C and the end of a deadline, where they are told to be dropped, come once more.

    It takes SIGALRM then, also from a deadline.
    """
    sys.unraisablehook = _hook


def _hook(dropped: sys.UnraisableHookArgs) -> None:
    lost = dropped.exc_value
    if isinstance(lost, End):
        return
    if not isinstance(lost, KeyboardInterrupt | TimedOut):
        sys.__unraisablehook__(dropped)
        return

    def once_more(number: int, frame: FrameType | None) -> None:
        if isinstance(lost, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # trio has a handler that knows where it may be raised
        else:
            raise lost

    try:
        signal.signal(signal.SIGALRM, once_more)
        signal.setitimer(signal.ITIMER_REAL, _LATER)
    except ValueError:  # a thread: handlers run in the main one only, so this was nobody's wish
        sys.__unraisablehook__(dropped)
