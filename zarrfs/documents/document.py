"""A fetched document: bytes, or the descriptor of a file, readable from the beginning as often as needed."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import time
from typing import IO, Any

from zarrfs.errors import SourceError, reason_of
from zarrfs.system.beneath import keeps_ctime

_SETTLED_NS = 2_000_000_000  # two changes less than a clock tick apart have equal times
_PIECE = 1 << 20  # bytes hashed or read at once


@dataclasses.dataclass(frozen=True)
class Document:
    """A fetched document. Readers share its descriptor; none of them holds the whole document in memory."""

    source: str
    data: bytes | int  # bytes, or the descriptor of a regular file
    base: str
    mtime_ns: int | None
    origin: str = ""  # as Plan.origin
    version: str = ""  # what stamp() returns for a document that was fetched
    blobs: tuple[str, ...] = ()  # places of an archive's blobs unless -o blobs= names others
    known: tuple[str, dict[str, str]] | None = None  # its index, from IndexCache.recall(); `data` is then empty

    @property
    def size(self) -> int:
        """Size in bytes as fetched, which may be compressed."""
        return len(self.data) if isinstance(self.data, bytes) else os.fstat(self.data).st_size

    @property
    def fetched(self) -> bool:
        """Whether the data is a private copy, which no other program changes."""
        return bool(self.origin) or isinstance(self.data, bytes)

    def close(self) -> None:
        """Close the descriptor, if there is one."""
        if not isinstance(self.data, bytes):
            os.close(self.data)

    def open(self) -> IO[bytes]:
        """Open a reader with a position of its own, at the beginning. Its reads raise SourceError."""
        if isinstance(self.data, bytes):
            return io.BytesIO(self.data)
        return io.BufferedReader(_Positioned(self.data, self.source), _PIECE)

    def stamp(self) -> str:
        """Return a name for this version, or "" if nothing identifies it.

        For a local file it is a hash of the attributes that stat(2) shows.
        """
        if self.origin or isinstance(self.data, bytes):
            return self.version
        status = os.fstat(self.data)
        parts = (self.source, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()

    def settled(self) -> bool:
        """Return whether a further change would alter stamp().

        Changes within one clock tick have equal times, and not every file system has a ctime that no program can set.
        """
        if self.origin or isinstance(self.data, bytes):
            return bool(self.version)
        status = os.fstat(self.data)
        late = time.time_ns() - max(status.st_ctime_ns, status.st_mtime_ns) > _SETTLED_NS
        return late and keeps_ctime(self.data)

    def digest(self) -> bytes:
        """Return the SHA-256 of the bytes as fetched."""
        hashed = hashlib.sha256()
        with self.open() as file:
            while piece := file.read(_PIECE):
                hashed.update(piece)
        return hashed.digest()


class _Positioned(io.RawIOBase):
    """A reader with a position of its own, whose only error is SourceError; readers may share the descriptor."""

    def __init__(self, descriptor: int, source: str) -> None:
        self._descriptor, self._source, self._at = descriptor, source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, os.fstat(self._descriptor).st_size)
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        try:
            count = os.preadv(self._descriptor, [buffer], self._at)
        except OSError as exc:
            raise SourceError(self._source, reason_of(exc)) from exc
        self._at += count
        return count
