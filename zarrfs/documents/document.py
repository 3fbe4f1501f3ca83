"""A fetched document: bytes, or the descriptor of a file, read as often as needed."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import time
from typing import IO, Any

_SETTLED_NS = 2_000_000_000
_PIECE = 1 << 20  # bytes hashed or read at once


@dataclasses.dataclass(frozen=True)
class Document:
    """A fetched document."""

    source: str
    data: bytes | int  # or the descriptor of a regular file
    base: str
    mtime_ns: int | None
    origin: str = ""  # as Plan.origin
    version: str = ""  # stamp() of one that was fetched
    blobs: tuple[str, ...] = ()  # where the blobs of an archive lie if -o blobs= does not say
    known: tuple[str, dict[str, str]] | None = None  # its index, as IndexCache.recall() gives it: `data` is empty

    @property
    def size(self) -> int:
        """Bytes, as fetched: perhaps compressed."""
        return len(self.data) if isinstance(self.data, bytes) else os.fstat(self.data).st_size

    @property
    def fetched(self) -> bool:
        """Whether it is a copy of our own, which nobody changes."""
        return bool(self.origin) or isinstance(self.data, bytes)

    def close(self) -> None:
        """Give the descriptor back, if it has one."""
        if not isinstance(self.data, bytes):
            os.close(self.data)

    def open(self) -> IO[bytes]:
        """A reader of its own from the beginning."""
        if isinstance(self.data, bytes):
            return io.BytesIO(self.data)
        return io.BufferedReader(_Positioned(self.data), _PIECE)

    def stamp(self) -> str:
        """What names this version: of a local file what stat(2) shows of it; "" where there is no such name."""
        if self.origin or isinstance(self.data, bytes):
            return self.version
        status = os.fstat(self.data)
        parts = (self.source, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()

    def settled(self) -> bool:
        """Whether the next change will show in stamp(): two within one tick of the clock have the same times."""
        if self.origin or isinstance(self.data, bytes):
            return bool(self.version)
        status = os.fstat(self.data)
        return time.time_ns() - max(status.st_ctime_ns, status.st_mtime_ns) > _SETTLED_NS

    def digest(self) -> bytes:
        """The SHA-256 of its bytes."""
        hashed = hashlib.sha256()
        with self.open() as file:
            while piece := file.read(_PIECE):
                hashed.update(piece)
        return hashed.digest()


class _Positioned(io.RawIOBase):
    """A file read with a position of its own, however many readers share its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at = descriptor, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, os.fstat(self._descriptor).st_size)
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._descriptor, [buffer], self._at)
        self._at += count
        return count
