"""Decompression with a bound on the size of the output.

Every function takes the compressed bytes and `limit`, and returns at most `limit` bytes. If the stream holds more, or
is truncated, the function raises CodecError, or the library's own error, which the pipeline converts to CodecError.
Libraries need little memory besides the output, except for the window that a stream may request: up to 128 MiB for
zstd and 256 MiB for lzma, of which only pages that are written become resident; Blosc's up to four times a block.

The package blosc includes C-Blosc 1.21 without snappy, and a zstd that rejects the frames of zstd 0.7, which Blosc
wrote in 2016. Source: C-Blosc 1, README_HEADER.rst; numcodecs; frames that releases of Blosc wrote.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from zarrfs.zarr.errors import CodecError
from zarrfs.zarr.jsontext import JSON

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_GZIP = 16 + 15  # wbits of zlib: gzip's header and trailer
_FIRST_PIECE = 4 << 10  # bytes of the first input to each further member; small, because unconsumed input is copied
_ZSTD_PIECE = 256  # bytes; a block of 4 bytes can hold 128 KiB, so a piece exceeds the limit by at most 8 MiB
_LZMA_MEMORY = 256 << 20
_LZ4_MAX = (1 << 31) - 1  # bytes
_BLOSC = struct.Struct("<BBBBIII")
_BLOSC_STORED = 2  # a flag: the frame holds uncompressed bytes
_BLOSC_CODECS = dict(enumerate(("blosclz", "lz4", "snappy", "zlib", "zstd")))  # in the flags; lz4hc shares that of lz4
_ZSTD_7 = b"\x27\xb5\x2f\xfd"  # magic number of zstd 0.7


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
    name: str, data: Buffer, limit: int, make: Callable[[], Any], more: Callable[[memoryview], bool]
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


def blosc(data: Buffer, limit: int) -> Buffer:
    """Decompress the frame of Blosc at the start of `data`. Its header is checked, because the package trusts it."""
    if len(data) < _BLOSC.size:
        raise CodecError("blosc", f"{len(data)} bytes are shorter than a frame's header")
    version, _, flags, itemsize, size, block, length = _BLOSC.unpack_from(data)
    stored, inner = bool(flags & _BLOSC_STORED), _BLOSC_CODECS.get(flags >> 5)
    if version not in (1, 2):
        writer = ", which Blosc 2 writes" if version in (3, 4, 5) else ""
        raise CodecError("blosc", f"a frame of format {version}{writer}: only 1 and 2 are known")
    if size > limit:
        raise CodecError("blosc", f"holds {size} bytes where at most {limit} are expected")
    least = _BLOSC.size + (size if stored else 4 * -(-size // (block or 1)))
    if not itemsize or not least <= length <= len(data) or (size and not (0 < block <= size and (stored or inner))):
        raise CodecError("blosc", f"a damaged header, or a frame that was cut: {length} bytes in {len(data)}")
    body = memoryview(data).cast("B")[:length]
    if stored or not size:
        return body[_BLOSC.size : _BLOSC.size + size]
    package = _blosc_package()
    try:
        found: bytes = package.decompress(body)
    except package.blosc_extension.error as exc:
        if inner == "zstd" and _ZSTD_7 in bytes(body):
            raise CodecError("blosc", "a frame of zstd 0.7, which the package blosc does not read") from exc
        if inner not in package.cnames:
            raise CodecError("blosc", f"the package blosc is built without {inner}") from exc
        raise CodecError("blosc", f"a damaged frame of {inner}") from exc
    return found


@functools.cache
def _blosc_package() -> Any:
    """Import the package blosc, and make it decode in the calling thread alone and release the GIL."""
    import blosc

    blosc.set_nthreads(1)  # otherwise each call starts as many threads as there are cores
    blosc.set_releasegil(True)
    return blosc
