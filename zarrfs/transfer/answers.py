"""What the far side answers: entries, bytes, and failures that may pass."""

from __future__ import annotations

from typing import NamedTuple

from zarrfs.errors import ReadError
from zarrfs.transfer.api import Buffer


class Entry(NamedTuple):
    """What a server tells of one name."""

    name: str
    directory: bool
    size: int | None = None  # bytes; None: not told
    mtime_ns: int | None = None
    tag: str | None = None  # what changes with the value: an ETag, a checksum, a time
    html: bool = False  # an HTML page: it may be a directory's listing
    strong: bool = False  # the tag is an ETag that is another one whenever any byte is


class Fetched(NamedTuple):
    """Bytes of a value, cut at its end, and what came with them."""

    data: Buffer
    tag: str | None = None
    total: int | None = None  # size of the value where it is known
    ranged: bool = True  # whether the server sent but the bytes that it was asked for
    part: bool = False  # these are a small part of what was fetched for many


def too_large(where: str, limit: int) -> ReadError:
    """The error of a value that is to be fetched whole, and is no smaller when asked for again."""
    return ReadError(where, f"more than {limit} bytes (-o document_limit=)")


class Transient(Exception):
    """A failure that a repetition may cure; `after`: seconds to wait that the server asked for."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.after = reason, after
