"""Telling a running mount something, from outside: the other side of fuse/xattrs.py."""

from __future__ import annotations

import errno
import json
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from zarrfs.errors import MountError, UsageError
from zarrfs.fuse.xattrs import PART, REFRESH, SET
from zarrfs.metrics.statistics import why
from zarrfs.system import mounts

_ANSWER = 10.0  # seconds that a daemon under load has to answer
_FIRST, _LONGEST = 0.01, 0.5  # seconds between questions


def refresh(mountpoint: str, force: bool = False) -> dict[str, Any]:
    """Refresh a mount and wait until it is: {"result": "refreshed" or "unchanged", "seconds"}. MountError."""
    answer = _asked(mountpoint, f"{REFRESH}{secrets.token_hex(8)}{':force' if force else ''}")
    if "error" in answer:
        raise MountError(f"{mountpoint}: {answer['error']}")
    return answer


def change(mountpoint: str, items: Iterable[str]) -> dict[str, Any]:
    """Change options of a mount to what `items`, as of -o, say: {"changed": {name: value}}.

    UsageError for an option that may not change, or not so; then nothing has. MountError where the mount is silent.
    """
    token, text = secrets.token_hex(8), ",".join(re.sub(r"([,\\])", r"\\\1", item) for item in items)
    parts = [text[at : at + PART // 4] for at in range(0, len(text), PART // 4)]  # a character is up to four bytes
    for number, part in enumerate(parts):
        _ask(mountpoint, f"{SET}{token}:{number}:{part}")
    answer = _asked(mountpoint, f"{SET}{token}:{len(parts)}")
    if "error" in answer:
        raise UsageError(f"{mountpoint}: {answer['error']}")
    return answer


def _asked(mountpoint: str, name: str) -> dict[str, Any]:
    """The answer to a request, asked for until there is one."""
    pause = _FIRST
    while (answer := _ask(mountpoint, name)).get("state") == "running":
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return answer


def _ask(mountpoint: str, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(mounts.ask(mountpoint, name, _ANSWER)))
    except PermissionError as exc:
        text = str(exc.strerror) if exc.errno == errno.EACCES else "only who has mounted it, and root, may do that"
        raise MountError(f"{mountpoint}: {text}") from None
    except OSError as exc:
        raise MountError(f"{mountpoint}: {why(mountpoint, exc)}") from None
