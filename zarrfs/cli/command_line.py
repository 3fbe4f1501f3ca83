"""Redaction of the command line that ps(1) shows of this process.

Other users can read a command line as long as the process lives, and a daemon lives long. They may also see it in the
moment before this code runs; zarrfs.toml and "@/path" avoid that (docs/options.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from zarrfs.config.redaction import HIDDEN, redact_text, redacted_item

_OPTIONS = re.compile(r"-[A-Za-np-z]*o|--option")  # the next word is a list of options
_ATTACHED = re.compile(r"(-[A-Za-np-z]*o=?|--option=)(.+)", re.DOTALL)  # the list is in the same word


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
    """Return a command line without secrets. Words after "--" are redacted, too: they may be a zarrfs command."""
    found: list[str] = []
    before = ""
    for word in arguments:
        attached = _ATTACHED.fullmatch(word)
        if _OPTIONS.fullmatch(before):
            found.append(_redacted_list(word))
        elif attached:
            found.append(attached[1] + _redacted_list(attached[2]))
        elif word.startswith("--"):
            found.append(redact_text(redacted_item(word)))
        else:
            found.append(redact_text(word))
        before = word
    return found


def _redacted_list(text: str) -> str:
    """Redact the items of one -o. Hide unknown items after a storage option: they may be part of its value."""
    from zarrfs.config.options import TABLE
    from zarrfs.config.storage import is_option

    found: list[str] = []
    hiding = False
    for item in re.findall(r"(?:[^,\\]|\\.|\\$)+", text, re.DOTALL):
        name = item.partition("=")[0].strip().replace("-", "_")
        hidden = hiding and name not in TABLE and not is_option(*name.rpartition(".")[::2])
        found.append(HIDDEN if hidden else redacted_item(item))
        hiding = hidden or "." in name or name == "storage_options"  # of earlier versions
    return ",".join(found)


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
