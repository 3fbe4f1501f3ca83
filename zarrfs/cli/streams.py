"""Replacement of standard streams that the parent process has closed (`<&-`, `>&-`).

Otherwise a file opened later would get the descriptor of a standard stream, and be used as that stream.
"""

from __future__ import annotations

import os
import sys


def open_closed() -> None:
    """Open a replacement for each closed standard stream.

    Reading from the replacement of standard input fails with EBADF, writing to that of standard output fails with
    EPIPE, as for a closed pipe, and text written to that of standard error is lost.
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
    """Move a descriptor to the number of a standard stream, and let child processes inherit it."""
    os.dup2(descriptor, number)
    if descriptor != number:
        os.close(descriptor)
    os.set_inheritable(number, True)
