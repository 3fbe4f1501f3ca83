"""SIGTERM and SIGHUP as Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


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
