"""Replacement of standard streams that the parent process has closed (`<&-`, `>&-`).

Otherwise a file opened later would get the descriptor of a standard stream, and be used as that stream.
"""

from __future__ import annotations

import os
import sys


def open_closed() -> None:
    """Replace each closed standard stream: input and output fail with EBADF, text for standard error is lost."""
    for number, name, flags in (0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            os.dup2(descriptor, number)
            if descriptor != number:
                os.close(descriptor)
            os.set_inheritable(number, True)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False, errors="backslashreplace"))  # noqa: SIM115
