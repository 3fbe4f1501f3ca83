"""Versions of targets: tag and size, which distinguish one content of a target from another."""

from __future__ import annotations

import logging
from typing import NamedTuple

from zarrfs.net.responses import Entry, Fetched

log = logging.getLogger(__name__)

_HOSTS = 1024  # number of hosts that are noted
_unversioned: dict[str, None] = {}  # hosts, in the order of their first responses


class TargetVersion(NamedTuple):
    """The version of a target, which differs between two contents of it."""

    tag: str  # ETag, Last-Modified or mtime, as the server gave it; never empty
    size: int  # bytes


def version_from(tag: str | None, size: int | None) -> TargetVersion | None:
    """Return the version given by `tag` and `size`; None if one is missing."""
    return TargetVersion(tag, size) if tag and size is not None else None


def tag_of(entry: Entry) -> str | None:
    """Return the tag of an entry, or its mtime as one; None if its server sent neither."""
    mtime = None if entry.mtime_ns is None or entry.rough else f"mtime {entry.mtime_ns}"
    return entry.tag or mtime


def version_of(entry: Entry) -> TargetVersion | None:
    """Return the version of an entry; None if its server sent none."""
    return version_from(tag_of(entry), entry.size)


def differs(tag: str | None, size: int | None, found: Fetched) -> bool:
    """Return whether bytes are of another version, as far as both versions are known."""
    return any(a != b and None not in (a, b) for a, b in ((tag, found.tag), (size, found.total)))


def note_unversioned(host: str, where: str) -> None:
    """Log once for each server that it sends no versions; `where` is one of its values."""
    if host not in _unversioned and len(_unversioned) < _HOSTS:
        _unversioned[host] = None
        log.warning(
            "%s: its server sends no version (neither ETag nor Last-Modified): a value that is replaced by another of "
            "the same size is not noticed", where,
        )  # fmt: skip


def unversioned() -> list[str]:
    """Return the servers that note_unversioned() has logged."""
    return list(_unversioned)
