"""What was done, as one JSON object."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from zarrfs.errors import UsageError


def absolute(path: str | None) -> str | None:
    """Where a report goes, whatever the working directory is by then."""
    return path if path in (None, "-") else os.path.abspath(str(path))


def write(path: str | None, report: dict[str, Any]) -> None:
    """Write a report to the file `path`, whole or not at all; "-" is standard output, None nowhere. UsageError."""
    if path is None:
        return
    text = json.dumps({"node": os.uname().nodename, **report}) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    new = f"{path}.{os.getpid()}.tmp"
    try:
        with open(new, "w") as file:
            file.write(text)
        os.rename(new, path)
    except OSError as exc:
        raise UsageError(f"--report {path}: {(exc.strerror or str(exc)).lower()}") from None
