"""Versions of targets: what tells one content from another."""

from __future__ import annotations

from typing import NamedTuple

from zarrfs.transfer.answers import Entry, Fetched


class Version(NamedTuple):
    """What tells one content of a target from another."""

    tag: str  # ETag, Last-Modified or mtime, as the server gave it; never empty
    size: int  # bytes


def version_from(tag: str | None, size: int | None) -> Version | None:
    """The version that `tag` and `size` make, None where they tell too little."""
    return Version(tag, size) if tag and size is not None else None


def version_of(entry: Entry) -> Version | None:
    """The version of an entry; None where its server says too little."""
    mtime = None if entry.mtime_ns is None else f"mtime {entry.mtime_ns}"
    return version_from(entry.tag or mtime, entry.size)


def differs(tag: str | None, size: int | None, found: Fetched) -> bool:
    """Whether bytes are of another version, as far as both sides tell theirs."""
    return any(a != b and None not in (a, b) for a, b in ((tag, found.tag), (size, found.total)))
