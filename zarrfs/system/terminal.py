"""A line on standard error that is replaced in place, such as a progress line."""

from __future__ import annotations

import os
import sys


def shows_progress() -> bool:
    """Return whether standard error is a terminal that can erase a line; TERM=dumb cannot."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def replace_line(text: str = "") -> None:
    """Replace the current progress line with `text`; without `text`, erase it."""
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()
