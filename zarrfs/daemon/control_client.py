"""Client of a running mount's control interface: refresh it. The server is fuse/xattrs.py."""

from __future__ import annotations

import errno
import json
import secrets
import time
from typing import Any

from zarrfs.errors import MountError
from zarrfs.fuse.xattrs import REFRESH
from zarrfs.metrics.statistics import why
from zarrfs.system import mounts

_ANSWER = 10.0  # seconds for a daemon under load to answer
_FIRST, _LONGEST = 0.01, 0.5  # seconds between polls


def refresh(mountpoint: str, force: bool = False) -> dict[str, Any]:
    """Refresh a mount and wait until that is done; return {"result": "refreshed" or "unchanged", "seconds"}.

    Raise MountError if the refresh fails or the mount does not answer.
    """
    answer = _poll(mountpoint, f"{REFRESH}{secrets.token_hex(8)}{':force' if force else ''}")
    if "error" in answer:
        raise MountError(f"{mountpoint}: {answer['error']}")
    return answer


def _poll(mountpoint: str, name: str) -> dict[str, Any]:
    """Repeat a request, with increasing pauses, until the mount has finished the work; return its answer."""
    pause = _FIRST
    while (answer := _request(mountpoint, name)).get("state") == "running":
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return answer


def _request(mountpoint: str, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(mounts.ask(mountpoint, name, _ANSWER)))
    except PermissionError as exc:
        text = str(exc.strerror) if exc.errno == errno.EACCES else "only its user and root may do that"
        raise MountError(f"{mountpoint}: {text}") from None
    except OSError as exc:
        raise MountError(f"{mountpoint}: {why(mountpoint, exc)}") from None
