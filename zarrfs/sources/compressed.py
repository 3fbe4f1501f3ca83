"""Compressed documents: gzip, zstd, xz and bzip2, told by their first bytes, expanded up to a bound."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, cast

from zarrfs.errors import SourceError

_PIECE = 16 << 20  # bytes expanded at a time


def _gzip(file: IO[bytes]) -> IO[bytes]:
    import gzip

    return cast(IO[bytes], gzip.GzipFile(fileobj=file))


def _bzip2(file: IO[bytes]) -> IO[bytes]:
    import bz2

    return bz2.BZ2File(file)


def _xz(file: IO[bytes]) -> IO[bytes]:
    import lzma

    return lzma.LZMAFile(file)


def _zstd(file: IO[bytes]) -> IO[bytes]:
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


# first bytes: (name, how to open)
_FORMATS: dict[bytes, tuple[str, Callable[[IO[bytes]], IO[bytes]]]] = {
    b"\x1f\x8b": ("gzip", _gzip),
    b"\x28\xb5\x2f\xfd": ("zstd", _zstd),
    b"\xfd7zXZ\0": ("xz", _xz),
    b"BZh": ("bzip2", _bzip2),
}


def is_compressed(head: bytes) -> bool:
    """Whether data that begins with `head` is in one of the formats."""
    return head.startswith(tuple(_FORMATS))


def expanded(data: bytes, limit: int, source: str) -> bytes | bytearray:
    """`data` without its compression, itself where it has none.

    SourceError where it is damaged or cut, or expands to more than `limit` bytes (-o document_limit=).
    """
    for magic, (name, opened) in _FORMATS.items():
        if data.startswith(magic):
            return _expanded(opened(io.BytesIO(data)), limit, source, name)
    return data


def _expanded(reader: IO[bytes], limit: int, source: str, name: str) -> bytearray:
    out = bytearray()
    with reader:
        while True:
            try:
                piece = reader.read(min(_PIECE, limit + 1 - len(out)))
            except Exception as exc:  # each format has errors of its own
                raise SourceError(source, f"damaged {name} data: {exc}") from exc
            out += piece
            if len(out) > limit:
                raise SourceError(source, f"expands to more than {limit} bytes (-o document_limit=)")
            if not piece:
                return out
