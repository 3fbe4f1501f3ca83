"""Signals that let a command tidy up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM, and SIGHUP unless it is ignored, raise KeyboardInterrupt in the body."""
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
    # __main__ makes SIGINT end the process, and shells ignore it in background commands of scripts (cmd &)
    if not callable(interrupt):
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
