"""Reader of a mount's counters, from the extended attribute user.zarrfs.stats of its root."""

from __future__ import annotations

import errno
import json
import os
from typing import Any, NamedTuple

from zarrfs.errors import MountError, reason_of
from zarrfs.system import mounts

_ANSWER = 10.0  # seconds that a daemon under load has to answer
_DIED = (errno.ENOTCONN, errno.ECONNABORTED)


class Statistics(NamedTuple):
    """A snapshot of the counters of one mount."""

    mountpoint: str
    source: str  # without credentials
    kind: str  # of the source
    pid: int  # of the daemon
    counters: dict[str, Any]  # as the daemon reports them


def statistics(path: str) -> Statistics:
    """Return the counters of the mount that `path` is in.

    Raise MountError if `path` is in no mount of zarrfs, or if its daemon does not report counters. Blocks until the
    daemon has answered two requests, for up to 10 s each.
    """
    mountpoint = mount_of(path)
    try:
        about = json.loads(mounts.ask(mountpoint, "user.zarrfs.mount", _ANSWER))
        counters = json.loads(mounts.ask(mountpoint, "user.zarrfs.stats", _ANSWER))
    except OSError as exc:
        raise MountError(f"{mountpoint}: {why(mountpoint, exc)}") from None
    return Statistics(mountpoint, about["source"], about["kind"], about["pid"], counters)


def statistics_of_all() -> tuple[list[Statistics], dict[str, str]]:
    """Return the counters of all mounts of this machine, and why a mount does not report them, by mount point."""
    found: list[Statistics] = []
    failed: dict[str, str] = {}
    for mountpoint in dict.fromkeys(each.mountpoint for each in mounts.mounts() if each.fstype == mounts.FSTYPE):
        try:
            found.append(statistics(mountpoint))
        except MountError as exc:
            failed[mountpoint] = str(exc)
    return found, failed


def is_mounted(mountpoint: str) -> bool:
    """Return whether a zarrfs mount exists at exactly `mountpoint`."""
    mount = mounts.mount_at(mountpoint)
    return mount is not None and mount.fstype == mounts.FSTYPE


def mount_of(path: str) -> str:
    """Return the mount point of the zarrfs mount that `path` is in. Raise MountError if it is in no such mount."""
    if not path:  # such as "$UNSET" in a script; abspath() would return the working directory
        raise MountError("an empty name of a mount point (a variable that is not set?)")
    text = os.path.abspath(path)
    above = mounts.mount_around(text)  # without resolving links first, which would need a live daemon
    if above.fstype != mounts.FSTYPE:
        try:
            above = mounts.mount_around(os.path.realpath(text, strict=True))
        except OSError as exc:
            raise MountError(f"{path}: {reason_of(exc)}") from None
    if above.fstype != mounts.FSTYPE:
        raise MountError(f"{path}: not in a mount of zarrfs, but in one of type {above.fstype}")
    return above.mountpoint


def why(mountpoint: str, exc: OSError) -> str:
    """Return why a daemon does not answer, as text for a message."""
    if not is_mounted(mountpoint):
        return "no longer mounted"
    return "its daemon has died" if exc.errno in _DIED else reason_of(exc)
