"""Compressed streams, decoded no further than the bytes that a chunk may have.

Every function takes the compressed bytes and `limit`, and returns at most `limit` bytes; where the stream holds more,
or ends early, it raises (CodecError, or the error of the library, which the pipeline turns into one). What a library
needs beside its output is small, but for the windows that a stream may ask for: 128 MiB of zstd, 256 MiB of lzma,
which become memory only where they are written to.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from zarrfs.zarr.errors import JSON, CodecError

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_GZIP = 16 + 15  # wbits of zlib: gzip's header and trailer
_FIRST_PIECE = 4 << 10  # bytes fed to a further member at first: what it leaves over is copied
_ZSTD_PIECE = 256  # bytes; at 128 KiB to a block of 4 bytes no piece goes further than 8 MiB beyond the limit
_LZMA_MEMORY = 256 << 20
_LZ4_LARGEST = (1 << 31) - 1


class _Stream(Protocol):
    """A decompressor of the standard library: of zlib, bz2 or lzma."""

    @property
    def eof(self) -> bool:
        """Whether the end was seen."""

    @property
    def unused_data(self) -> bytes:
        """What came after it."""

    def decompress(self, data: memoryview, room: int, /) -> bytes:
        """At most `room` bytes."""


def zlib(data: Buffer, limit: int) -> bytes:
    """A zlib stream; bytes after its end are not looked at, as by every reader."""
    import zlib

    return _members("zlib", data, limit, zlib.decompressobj, lambda _: False)


def gzip(data: Buffer, limit: int) -> bytes:
    """Members of gzip one after another, and zeros after the last."""
    import zlib

    def more(rest: memoryview) -> bool:
        if bytes(rest[:2]) != b"\x1f\x8b":
            raise CodecError("gzip", "bytes after the last member")
        return True

    return _members("gzip", data, limit, lambda: zlib.decompressobj(_GZIP), more)


def bz2(data: Buffer, limit: int) -> bytes:
    """Streams of bzip2 one after another."""
    import bz2

    return _members("bz2", data, limit, bz2.BZ2Decompressor, lambda rest: bytes(rest[:3]) == b"BZh")


def lzma(data: Buffer, limit: int, configuration: Mapping[str, JSON]) -> bytes:
    """Streams of xz one after another, a stream of lzma, or what raw `filters` left (`format` 3)."""
    import lzma

    form = configuration.get("format", lzma.FORMAT_XZ)

    def stream() -> lzma.LZMADecompressor:
        if form != lzma.FORMAT_RAW:
            return lzma.LZMADecompressor(form, _LZMA_MEMORY)
        filters = [dict(step) for step in configuration["filters"]]
        for step in filters:
            if "dict_size" in step:  # allocated whole, and never used beyond what was written
                step["dict_size"] = min(step["dict_size"], max(limit, 4096))
        return lzma.LZMADecompressor(form, None, filters)

    return _members("lzma", data, limit, stream, lambda rest: bytes(rest[:6]) == b"\xfd7zXZ\0")


def _members(
    name: str, data: Buffer, limit: int, make: Callable[[], _Stream], more: Callable[[memoryview], bool]
) -> bytes:
    """Decode members until none is left, or `more` says of what follows that it is not one."""
    view = memoryview(data).cast("B")
    parts: list[bytes] = []
    room = limit + 1  # one more: the byte that is too many
    at, piece = 0, max(len(view), 1)
    while True:
        stream = make()
        while not stream.eof:
            if at >= len(view):
                raise CodecError(name, "the stream ends early")
            parts.append(stream.decompress(view[at : at + piece], room))
            room -= len(parts[-1])
            if room <= 0:
                raise CodecError(name, f"holds more than {limit} bytes")
            at += min(piece, len(view) - at)
            piece *= 2
        at -= len(stream.unused_data)
        while at < len(view) and not view[at]:  # padding
            zeros = bytes(view[at : at + _FIRST_PIECE])
            at += len(zeros) - len(zeros.lstrip(b"\0"))
        if at == len(view) or not more(view[at:]):
            return parts[0] if len(parts) == 1 else b"".join(parts)
        piece = _FIRST_PIECE


def zstd(data: Buffer, limit: int) -> bytes:
    """Frames of Zstandard one after another, skippable ones among them."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    claimed = zstandard.frame_content_size(data)  # -1: the frame does not say; 0 also of a skippable one
    if claimed > limit:
        raise CodecError("zstd", f"holds {claimed} bytes where at most {limit} are expected")
    if claimed > 0:
        try:
            return decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError:
            pass  # more frames follow, or it is damaged: below it will be seen which
    view = memoryview(data).cast("B")
    parts, room, at = [], limit, 0
    while at < len(view):
        stream = decompressor.decompressobj()
        while not stream.eof:
            if at >= len(view):
                raise CodecError("zstd", "the frame ends early")
            parts.append(stream.decompress(view[at : at + _ZSTD_PIECE]))
            at += _ZSTD_PIECE
            room -= len(parts[-1])
            if room < 0:
                raise CodecError("zstd", f"holds more than {limit} bytes")
        at = min(at, len(view)) - len(stream.unused_data)
    return b"".join(parts)


def lz4(data: Buffer, limit: int) -> bytes:
    """A block of LZ4 after its size in four bytes, as numcodecs writes it."""
    import numcodecs.lz4

    if len(data) < 4:
        raise CodecError("lz4", "shorter than its header")
    (size,) = struct.unpack_from("<I", data)
    if size > min(limit, _LZ4_LARGEST):
        raise CodecError("lz4", f"holds {size} bytes where at most {limit} are expected")
    found: bytes = numcodecs.lz4.decompress(data)
    return found
