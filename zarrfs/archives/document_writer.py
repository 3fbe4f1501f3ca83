"""The document: entries as JSON, in a list or in a dictionary. Source: RFC 37 (file archive format)."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

import orjson


def inline_content(data: bytes) -> dict[str, str]:
    """`encoding` and `data` of a file that is in the document itself."""
    if b"\0" not in data:  # RFC 37 allows it in text, but the reader of Flux gives up the whole archive
        with contextlib.suppress(UnicodeDecodeError):
            return {"encoding": "utf-8", "data": data.decode()}
    return {"encoding": "base64", "data": base64.b64encode(data).decode()}


def cut(extents: Iterable[tuple[int, int]], region: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the regions of up to `region` bytes of a file that has data in `extents`.

    As Flux cuts them, from the start of each extent: equal files have equal blobs, whoever writes them.
    """
    for start, stop in extents:
        for at in range(start, stop, region):
            yield at, min(at + region, stop)


def encoded(path: str, fields: dict[str, Any], dictionary: bool) -> bytes:
    """One entry of a list, or of a dictionary. `path` is UTF-8."""
    if dictionary:
        return orjson.dumps(path) + b":" + orjson.dumps(fields)
    return orjson.dumps({"path": path, **fields})


def joined(entries: list[bytes]) -> bytes:
    """Some entries, as Writer.add() takes one."""
    return b",\n".join(entries)


def encoded_around(path: str, fields: dict[str, Any], dictionary: bool) -> tuple[bytes, bytes]:
    """What comes before the first character of a field `data` that is written in pieces, and what after the last."""
    whole = encoded(path, fields | {"data": 0}, dictionary)
    return whole[:-2], whole[-1:]


def blobs_rule(size: int) -> str:
    """What to do about a file of `size` bytes without a place for blobs."""
    return f"{size:,} bytes, which go to a blob: name a directory for it (--blobs), or a larger --inline-threshold"


class Writer:
    """Writes an archive to `file`; close() makes it whole."""

    def __init__(self, file: IO[bytes], dictionary: bool = False) -> None:
        self._write = file.write
        self._marks = (b"{", b"}") if dictionary else (b"[", b"]")
        self._empty = True

    def add(self, entry: bytes) -> None:
        """Write an entry, as encoded() makes them, or its beginning."""
        self._write(self._marks[0] + b"\n" if self._empty else b",\n")
        self._write(entry)
        self._empty = False

    def go_on(self, more: bytes) -> None:
        """Write what follows the beginning of an entry."""
        self._write(more)

    def close(self) -> None:
        """Write the end."""
        self._write(self._marks[0] + self._marks[1] + b"\n" if self._empty else b"\n" + self._marks[1] + b"\n")
