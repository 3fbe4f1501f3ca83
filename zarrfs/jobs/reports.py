"""Reports of commands (--report): one JSON object each."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from zarrfs.errors import UsageError, ZarrfsError, reason_of


def place(path: str | None) -> str | None:
    """Return the absolute path of a report; None and "-" unchanged. Raise UsageError if it cannot be written."""
    if path is None or path == "-":
        return path
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        raise UsageError(f"--report {path}: no such directory")
    if os.path.isdir(path):
        raise UsageError(f"--report {path}: is a directory")
    if not os.access(path if os.path.exists(path) else parent, os.W_OK, effective_ids=True):
        raise UsageError(f"--report {path}: permission denied")
    return os.path.abspath(path)


def write(path: str | None, report: dict[str, Any]) -> None:
    """Write a report to a file, or for "-" to standard output; do nothing for None. Raise UsageError.

    A regular file appears whole or not at all.
    """
    if path is None:
        return
    text = json.dumps({"node": os.uname().nodename, **report}) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        _write(path, text)
    except OSError as exc:
        raise UsageError(f"--report {path}: {reason_of(exc)}") from None
    except ZarrfsError as exc:
        raise UsageError(f"--report {exc}") from None


def _write(path: str, text: str) -> None:
    from zarrfs.store.destination import placed

    if os.path.islink(path) and os.lstat(path).st_uid not in (0, os.geteuid()):
        raise UsageError(f"{path}: is a link that another user has made")  # any user can do so in /tmp
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w") as file:  # a terminal, a pipe, /dev/null
            file.write(text)
        return
    with placed(path, "report", True) as place, open(place.new, "x") as file:
        file.write(text)
