"""How far reading a document has come, told on a terminal."""

from __future__ import annotations

import os
import sys
import time

_QUIET_FOR = 1.0  # seconds before anything is shown,
_EVERY = 0.2  # and between one line and the next


class Progress:
    """A line on standard error, if that is a terminal, for what takes longer than a second.

    A context manager, which takes the line away; called with the position (bytes of `total`) now and then.
    """

    def __init__(self, source: str, total: int, quiet: bool) -> None:
        self._name, self._total = os.path.basename(source) or source, total
        self._began = time.monotonic()
        self._next = float("inf") if quiet or not sys.stderr.isatty() else self._began + _QUIET_FOR
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def __call__(self, position: int) -> None:
        """Show it, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._shown = now + _EVERY, True
        part = min(position / self._total, 1.0) if self._total else 1.0
        left = f", {(now - self._began) * (1 - part) / part:.0f} s left" if 0.02 < part < 1 else ""
        bar = "#" * int(part * 30)
        sys.stderr.write(f"\r\033[Kzarrfs: reading {self._name} [{bar:30}] {part:4.0%} of {self._total:,} bytes{left}")
        sys.stderr.flush()
