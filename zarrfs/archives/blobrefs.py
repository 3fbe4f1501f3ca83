"""Blobrefs, the names of blobs by the hash of their bytes; and the limits of archives. Sources: RFC 10, RFC 37.

This module does not import trio, because the child process that compiles archives imports it.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from zarrfs.errors import OutOfRange

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

PATH_MAX = 4095  # bytes of a path or of a symlink's target; system calls take no more
MAX_SIZE = 2**62  # bytes of one file; an archive may declare a size without holding that many bytes
_BLOBREF = re.compile(r"sha1-[0-9a-f]{40}|sha256-[0-9a-f]{64}")
_HASHES = {"sha1": hashlib.sha1, "sha256": hashlib.sha256}  # hashlib.new() would search by name each time


def canonical(text: str) -> str | None:
    """Return the blobref `text` in lower case, or None if it is invalid. Only its result may be used in a path."""
    text = text.lower()
    return text if _BLOBREF.fullmatch(text) else None


def blobref_of(data: Buffer, algorithm: str) -> str:
    """Return the blobref of `data`; `algorithm` is sha1 or sha256."""
    return f"{algorithm}-{_HASHES[algorithm](data, usedforsecurity=False).hexdigest()}"


def hash_of(data: Buffer, blobref: str) -> str:
    """Return the blobref of `data`, with the same hash algorithm as `blobref`."""
    return blobref_of(data, blobref.partition("-")[0])


def sized(blobref: str, length: int) -> str:
    """Return the URL of a blob that must be `length` bytes long. Indexes store such URLs; BlobReader reads them."""
    return f"{blobref}:{length}"


def wrong_length(shown: str, size: int, declared: int) -> OutOfRange:
    """Return the error about a blob of another length than the archive declares."""
    return OutOfRange(shown, f"a blob of {size} bytes, where the archive says {declared}")
