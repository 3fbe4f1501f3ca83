"""Writer of archive documents: entries as JSON, in a list or a dictionary. Source: RFC 37 (file archive format)."""

from __future__ import annotations

import base64
import contextlib
import stat
from collections.abc import Iterable, Iterator
from typing import IO, Any

import orjson

PATH_MAX = 4095  # bytes of a path or of a symlink's target; system calls take no more
MAX_SIZE = 2**62  # bytes of one file; an archive may declare a size without holding that many bytes
SPECIAL_FILES = {  # file types that no archive can hold
    stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}  # fmt: skip


def inline_content(data: bytes) -> dict[str, str]:
    """Return the fields `encoding` and `data` of a file whose content is in the document itself."""
    if b"\0" not in data:  # RFC 37 allows NUL in text, but Flux then refuses the whole archive
        with contextlib.suppress(UnicodeDecodeError):
            return {"encoding": "utf-8", "data": data.decode()}
    return {"encoding": "base64", "data": base64.b64encode(data).decode()}


def cut(extents: Iterable[tuple[int, int]], region: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of regions of up to `region` bytes that cover the `extents` of a file.

    Regions are cut from the start of each extent, as Flux does, so that archives of zarrfs and of Flux have the same
    blobs for the same files.
    """
    for start, stop in extents:
        for at in range(start, stop, region):
            yield at, min(at + region, stop)


def encoded(path: str, fields: dict[str, Any], dictionary: bool) -> bytes:
    """Encode an entry of a list, or of a dictionary. `path` must be encodable as UTF-8."""
    if dictionary:
        return orjson.dumps(path) + b":" + orjson.dumps(fields)
    return orjson.dumps({"path": path, **fields})


def encoded_around(path: str, fields: dict[str, Any], dictionary: bool) -> tuple[bytes, bytes]:
    """Encode an entry without the value of its field `data`; return the bytes before that value and after it."""
    whole = encoded(path, fields | {"data": 0}, dictionary)
    return whole[:-2], whole[-1:]


def blobs_rule(size: int) -> str:
    """Return the message about a file of `size` bytes that needs a blob, if no directory for blobs was given."""
    return f"{size:,} bytes, which go to a blob: name a directory for it (--blobs), or a larger --inline-threshold"


class DocumentWriter:
    """A writer of a document to `file`, which is valid JSON only after close()."""

    def __init__(self, file: IO[bytes], dictionary: bool = False) -> None:
        self._write = file.write
        self._marks = (b"{", b"}") if dictionary else (b"[", b"]")
        self._empty = True

    def add(self, entry: bytes) -> None:
        """Write an encoded entry, or the bytes before the value of its field `data` (encoded_around)."""
        self._write(self._marks[0] + b"\n" if self._empty else b",\n")
        self._write(entry)
        self._empty = False

    def append(self, more: bytes) -> None:
        """Write more bytes of the entry that add() began."""
        self._write(more)

    def close(self) -> None:
        """Write the closing bracket."""
        self._write(self._marks[0] + self._marks[1] + b"\n" if self._empty else b"\n" + self._marks[1] + b"\n")
