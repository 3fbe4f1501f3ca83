"""The standard streams of a command: errors of standard output name it, and closed streams are replaced."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any

from zarrfs.errors import SourceError, reason_of


class _Output(io.FileIO):
    """Standard output. After a failed or interrupted write all further output is discarded, also that at exit."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            while (count := super().write(data)) is None:  # a full pipe that another program made non-blocking
                select.select((), (self,), ())
        except BaseException as exc:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if isinstance(exc, OSError) and not isinstance(exc, BrokenPipeError):
                raise SourceError("standard output", f"cannot be written: {reason_of(exc)}") from exc
            raise
        return count


def name_output() -> None:
    """Make errors of sys.stdout name it."""
    now = sys.stdout
    if isinstance(now, io.TextIOWrapper):
        now.flush()
        lines = now.line_buffering or now.write_through
        raw: Any = _Output(now.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), now.encoding, now.errors, line_buffering=lines)


def open_closed() -> None:
    """Replace each closed standard stream: input and output fail with EBADF, text for standard error is lost.

    Otherwise a file opened later would get the descriptor of the stream, and be used as that stream.
    """
    for number, name, flags in (0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            os.dup2(descriptor, number)
            if descriptor != number:
                os.close(descriptor)
            os.set_inheritable(number, True)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False, errors="backslashreplace"))  # noqa: SIM115
