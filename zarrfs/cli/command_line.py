"""Redaction of the command line that ps(1) shows of this process.

Other users can read a command line as long as the process lives, and a daemon lives long. They may also see it in the
moment before this code runs; zarrfs.toml and "@/path" avoid that (docs/options.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from zarrfs.config.redaction import HIDDEN, redact_text

_STORAGE = re.compile(r"(\.[\w-]+\s*:?=).*", re.DOTALL)


def hide_secrets() -> None:
    """Overwrite the secrets in the command line of this process, as far as the system permits. Never raises."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            given = file.read()
        if b"=" not in given and b"://" not in given:
            return
        given = given.rstrip(b"\0")
        visible = b"\0".join(map(os.fsencode, redacted_arguments(list(map(os.fsdecode, given.split(b"\0"))))))
        if visible != given:
            _overwrite(visible)
    except OSError:  # without /proc other users cannot see the command line either
        pass


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets: hide each word after the name of its first storage option.

    Words after "--" are redacted, too: they may be a zarrfs command.
    """
    return [redact_text(_STORAGE.sub(rf"\1{HIDDEN}", word)) for word in arguments]


def _overwrite(visible: bytes) -> None:
    """Write `visible` to the memory from which the kernel reads the command line (proc_pid_cmdline(5)), cut to fit."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: 48 and 49 of proc_pid_stat(5)
    room = end - start
    if start and 0 < room < 1 << 24:
        # the last byte stays 0: for any other value the kernel would continue into the environment
        ctypes.memmove(start, visible[: room - 1].ljust(room, b"\0"), room)
