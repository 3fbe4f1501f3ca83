"""Decompression with a bound on the size of the output.

Every function takes the compressed bytes and `limit`, and returns at most `limit` bytes. If the stream holds more, or
is truncated, the function raises CodecError, or the library's own error, which the pipeline converts to CodecError.
Libraries need little memory besides the output, except for the window that a stream may request: up to 128 MiB for
zstd and 256 MiB for lzma, of which only pages that are written become resident.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from zarrfs.zarr.errors import CodecError
from zarrfs.zarr.jsontext import JSON

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_GZIP = 16 + 15  # wbits of zlib: gzip's header and trailer
_FIRST_PIECE = 4 << 10  # bytes of the first input to each further member; small, because unconsumed input is copied
_ZSTD_PIECE = 256  # bytes; a block of 4 bytes can hold 128 KiB, so a piece exceeds the limit by at most 8 MiB
_LZMA_MEMORY = 256 << 20
_LZ4_MAX = (1 << 31) - 1  # bytes


class _Decompressor(Protocol):
    """The interface of decompressors in zlib, bz2 and lzma."""

    @property
    def eof(self) -> bool:
        """True after the end of the stream."""

    @property
    def unused_data(self) -> bytes:
        """The input after the end of the stream."""

    def decompress(self, data: memoryview, room: int, /) -> bytes:
        """Return the next bytes, at most `room`."""


def zlib(data: Buffer, limit: int) -> bytes:
    """Decompress a zlib stream. Ignore bytes after its end, as all readers do."""
    import zlib

    return _members("zlib", data, limit, zlib.decompressobj, lambda _: False)


def gzip(data: Buffer, limit: int) -> bytes:
    """Decompress consecutive members of gzip. Zeros may follow the last one."""
    import zlib

    def more(rest: memoryview) -> bool:
        if bytes(rest[:2]) != b"\x1f\x8b":
            raise CodecError("gzip", "bytes after the last member")
        return True

    return _members("gzip", data, limit, lambda: zlib.decompressobj(_GZIP), more)


def bz2(data: Buffer, limit: int) -> bytes:
    """Decompress consecutive streams of bzip2."""
    import bz2

    return _members("bz2", data, limit, bz2.BZ2Decompressor, lambda rest: bytes(rest[:3]) == b"BZh")


def lzma(data: Buffer, limit: int, configuration: Mapping[str, JSON]) -> bytes:
    """Decompress consecutive xz streams, an lzma stream, or the output of raw `filters` (`format` 3)."""
    import lzma

    form = configuration.get("format", lzma.FORMAT_XZ)

    def stream() -> lzma.LZMADecompressor:
        if form != lzma.FORMAT_RAW:
            return lzma.LZMADecompressor(form, _LZMA_MEMORY)
        filters = [dict(step) for step in configuration["filters"]]
        for step in filters:
            if "dict_size" in step:  # the library allocates all of it, but needs no more than the output
                step["dict_size"] = min(step["dict_size"], max(limit, 4096))
        return lzma.LZMADecompressor(form, None, filters)

    return _members("lzma", data, limit, stream, lambda rest: bytes(rest[:6]) == b"\xfd7zXZ\0")


def _members(
    name: str, data: Buffer, limit: int, make: Callable[[], _Decompressor], more: Callable[[memoryview], bool]
) -> bytes:
    """Decompress consecutive members, each with a new decompressor, as long as `more` accepts the rest of the data."""
    view = memoryview(data).cast("B")
    parts: list[bytes] = []
    room = limit + 1  # one more, to notice a stream that exceeds the limit
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
    """Decompress consecutive Zstandard frames, some of which may be skippable."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    claimed = zstandard.frame_content_size(data)  # -1: unknown; 0 also for a skippable frame
    if claimed > limit:
        raise CodecError("zstd", f"holds {claimed} bytes where at most {limit} are expected")
    if claimed > 0:
        try:
            return decompressor.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError:
            pass  # the loop below finds out if more frames follow or this one is damaged
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
    """Decompress a block of LZ4 that follows its decompressed size in four bytes, as numcodecs writes it."""
    import numcodecs.lz4

    if len(data) < 4:
        raise CodecError("lz4", "shorter than its header")
    (size,) = struct.unpack_from("<I", data)
    if size > min(limit, _LZ4_MAX):
        raise CodecError("lz4", f"holds {size} bytes where at most {limit} are expected")
    found: bytes = numcodecs.lz4.decompress(data)
    return found
