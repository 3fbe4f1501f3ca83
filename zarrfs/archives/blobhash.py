"""The hashes that name blobs. Source: RFC 10."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_HASHES = {"sha1": hashlib.sha1, "sha256": hashlib.sha256}  # new() would look for them each time
_PIECE = 1 << 20  # bytes hashed at a time


def hash_of(data: Buffer, blobref: str) -> str:
    """The blobref of `data`, with the algorithm of `blobref`."""
    return blobref_of(data, blobref.partition("-")[0])


def blobref_of(data: Buffer, algorithm: str) -> str:
    """What a blob of these bytes is called."""
    return f"{algorithm}-{_HASHES[algorithm](data, usedforsecurity=False).hexdigest()}"


def digest(fd: int, blobref: str, size: int, start: int = 0) -> str:
    """The blobref of the `size` bytes from `start` on, with the algorithm of `blobref`; in a worker thread of trio."""
    import trio  # not above: who makes archives needs the names alone

    algorithm = blobref.partition("-")[0]
    hashed = hashlib.new(algorithm, usedforsecurity=False)
    piece = memoryview(bytearray(min(size, _PIECE)))
    at = 0
    while at < size:
        trio.from_thread.check_cancelled()
        count = os.preadv(fd, [piece[: size - at]], start + at)
        if not count:
            break
        hashed.update(piece[:count])
        at += count
    return f"{algorithm}-{hashed.hexdigest()}"
