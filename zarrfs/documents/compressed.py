"""Compressed documents: detect gzip, zstd, xz and bzip2 by their first bytes, and decompress them up to a limit.

Tar and zip files are detected here, too.
"""

from __future__ import annotations

import importlib
import io
from typing import IO, Any, cast

from zarrfs.errors import SourceError

_MAGIC = 6  # bytes needed to recognise a format


_FORMATS = {  # first bytes: the module that reads it
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"\x50\x2a\x4d\x18": "zstandard",  # a skippable frame; the output of pzstd begins with one
    b"\xfd7zXZ\0": "lzma",
    b"BZh": "bz2",
}


def is_compressed(head: bytes) -> bool:
    """Return whether data that begins with `head` is in one of the formats."""
    return head.startswith(tuple(_FORMATS))


def expanding(file: IO[bytes], limit: int, source: str) -> IO[bytes]:
    """Return a reader that decompresses `file`, or `file` itself if it is not compressed.

    `file` must be seekable and at its beginning. read() of the decompressing reader raises SourceError if the data is
    damaged or truncated, or expands to more than `limit` bytes.
    """
    head = file.read(_MAGIC)
    file.seek(0)
    for magic, name in _FORMATS.items():
        if head.startswith(magic):
            module = importlib.import_module(name)
            if name == "zstandard":
                reader = module.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            else:
                reader = module.open(file)
            return cast(IO[bytes], io.BufferedReader(_Expanding(reader, limit, source, name)))
    return file


class _Expanding(io.RawIOBase):
    """A decompressing reader with a limit on its output; its only error is SourceError."""

    def __init__(self, reader: IO[bytes], limit: int, source: str, name: str) -> None:
        self._reader, self._left, self._limit = reader, limit, limit
        self._source, self._name = source, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._reader.read(min(len(buffer), self._left + 1))
        except SourceError:  # from reading `file`
            raise
        except Exception as exc:  # each format has its own exceptions
            raise SourceError(self._source, f"damaged {self._name} data: {exc}") from exc
        self._left -= len(data)
        if self._left < 0:
            raise SourceError(self._source, f"expands to more than {self._limit} bytes")
        buffer[: len(data)] = data
        return len(data)


def is_zip(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a zip file, possibly an empty one."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def is_tar(head: bytes) -> bool:
    """Return whether a file that begins with these 512 bytes is a tar (POSIX.1, "ustar Interchange Format")."""
    return head[257:262] == b"ustar"
