"""Blobrefs and the places of blobs, without reading any: what compiling an archive needs.

Source: RFC 10 (blobrefs). Apart from blobs.py, so that the child that compiles imports no event loop.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable

from zarrfs.errors import UsageError

_BLOBREF = re.compile(r"sha1-[0-9a-f]{40}|sha256-[0-9a-f]{64}")


def canonical(text: str) -> str | None:
    """The blobref `text` in lower case, or None: nothing else ever becomes part of a path."""
    text = text.lower()
    return text if _BLOBREF.fullmatch(text) else None


def sized(blobref: str, length: int) -> str:
    """The url of a blob that must be `length` bytes long, as indexes hold it and BlobReader takes it."""
    return f"{blobref}:{length}"


def check_places(directories: Iterable[str]) -> None:
    """Raise UsageError for a place of blobs that is not a directory."""
    for directory in directories:
        try:
            if not stat.S_ISDIR(os.stat(directory).st_mode):
                raise UsageError(f"option blobs={directory}: not a directory")
        except OSError as exc:
            raise UsageError(f"option blobs={directory}: {(exc.strerror or str(exc)).lower()}") from None
