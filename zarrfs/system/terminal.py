"""Whether standard error can show lines that change, such as those of progress."""

from __future__ import annotations

import os
import sys


def shows_progress() -> bool:
    """Return whether standard error is a terminal that can erase a line; TERM=dumb cannot."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
