"""Replacement of standard streams that our parent has closed (`<&-`, `>&-`) by streams that fail when used.

Otherwise a file opened later would get the descriptor of a standard stream, and be used as one.
"""

from __future__ import annotations

import os
import sys


def open_closed() -> None:
    """Open those of the three standard streams that are closed.

    Reading standard input then fails with EBADF, writing standard output with EPIPE, as of a closed pipe; text to
    standard error is lost.
    """
    if sys.stdin is None:
        _take(0, os.open(os.devnull, os.O_WRONLY))
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        read_end, write_end = os.pipe()
        if read_end == 1:
            read_end = os.dup(read_end)
        _take(1, write_end)
        os.close(read_end)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        _take(2, os.open(os.devnull, os.O_WRONLY))
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def _take(number: int, descriptor: int) -> None:
    """Move an open file to the number of a standard stream, and let children inherit it."""
    os.dup2(descriptor, number)
    if descriptor != number:
        os.close(descriptor)
    os.set_inheritable(number, True)
