"""What ps(1) shows of this process: its command line, with the secrets in it overwritten.

Others can read a command line as long as the process lives, and a daemon lives long. What they may see in the moment
before this ran is the reason for zarrfs.toml and "@/path" (docs/configuration.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from zarrfs.config.redaction import HIDDEN, cleaned, shown_item

_OPTIONS = re.compile(r"-[A-Za-np-z]*o|--option")  # the next word is a list of options
_ATTACHED = re.compile(r"(-[A-Za-np-z]*o=?|--option=)(.+)", re.DOTALL)  # or they are in the same one


def hide_secrets() -> None:
    """Overwrite the secrets in the command line of this process; what cannot be done is left."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            given = file.read()
        if b"=" not in given and b"://" not in given and b"--storage-options" not in given:
            return
        shown = b"\0".join(map(os.fsencode, shown_arguments(list(map(os.fsdecode, given.rstrip(b"\0").split(b"\0"))))))
        if shown != given.rstrip(b"\0"):
            _overwrite(shown)
    except OSError:  # no /proc: nobody sees it either
        pass


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line as others may see it, behind "--" too: sources are there, or a command that is ours again."""
    found: list[str] = []
    before = ""
    for word in arguments:
        attached = _ATTACHED.fullmatch(word)
        if before == "--storage-options":
            found.append(HIDDEN)
        elif _OPTIONS.fullmatch(before):
            found.append(_shown_list(word))
        elif attached:
            found.append(attached[1] + _shown_list(attached[2]))
        elif word.startswith("--"):
            found.append(cleaned(shown_item(word)))
        else:
            found.append(cleaned(word))
        before = word
    return found


def _shown_list(text: str) -> str:
    """The items of one -o; what follows a storage option and is no option may be the rest of its value."""
    from zarrfs.config.options import TABLE

    found: list[str] = []
    hiding = False
    for item in re.findall(r"(?:[^,\\]|\\.|\\$)+", text, re.DOTALL):
        name = item.partition("=")[0].replace("-", "_")
        hidden = hiding and name not in TABLE and "." not in name
        found.append(HIDDEN if hidden else shown_item(item))
        hiding = hidden or "." in name or name == "storage_options"
    return ",".join(found)


def _overwrite(shown: bytes) -> None:
    """Put `shown` where the kernel takes the command line from (proc_pid_cmdline(5)), as far as there is room."""
    import ctypes

    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: 48 and 49 of proc_pid_stat(5)
    room = end - start
    if start and 0 < room < 1 << 24:
        # the last byte stays 0: another one tells the kernel that the text goes on behind it
        ctypes.memmove(start, shown[: room - 1].ljust(room, b"\0"), room)
