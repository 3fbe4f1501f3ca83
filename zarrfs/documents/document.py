"""A document that was fetched, or opened if it is local: bytes or a file descriptor, which can be read repeatedly."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import time
from typing import IO, Any

from zarrfs.errors import SourceError, reason_of
from zarrfs.system.beneath import keeps_ctime

_SETTLED_NS = 2_000_000_000  # a file changed less than this ago may change again with equal times
_PIECE = 1 << 20  # bytes hashed or read at a time


@dataclasses.dataclass(frozen=True)
class Document:
    """A document that was fetched, or opened if it is local. Its readers share the bytes or the descriptor."""

    source: str
    data: bytes | int  # bytes, or the descriptor of a regular file
    base: str
    mtime_ns: int | None
    origin: str = ""  # as Plan.origin
    version: str = ""  # of a fetched document: the result of stamp()
    blobs: tuple[str, ...] = ()  # sources of an archive's blobs, unless -o blobs= names others

    @property
    def fetched(self) -> bool:
        """Return whether the data is a private copy that no other program can change."""
        return bool(self.origin) or isinstance(self.data, bytes)

    def close(self) -> None:
        """Close the descriptor, if there is one."""
        if not isinstance(self.data, bytes):
            os.close(self.data)

    def open(self) -> IO[bytes]:
        """Return a new reader at the beginning, with its own position. Its reads raise SourceError."""
        if isinstance(self.data, bytes):
            return io.BytesIO(self.data)
        return io.BufferedReader(_Positioned(self.data, self.source), _PIECE)

    def stamp(self) -> str:
        """Return a name for this version, or "" if nothing identifies it.

        For a local file, it is a hash of the path and of attributes from stat(2).
        """
        if self.origin or isinstance(self.data, bytes):
            return self.version
        status = os.fstat(self.data)
        parts = (self.source, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()

    def settled(self) -> bool:
        """Return whether any further change is certain to alter stamp().

        It is not certain soon after a change, because changes within one clock tick have equal times, nor on a file
        system where a change of the file may leave the ctime as it is.
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
    """A reader with its own position in a descriptor that readers may share; its only error is SourceError."""

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
