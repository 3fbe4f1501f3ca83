"""Decompression of C-Blosc 1 frames.

Headers are checked before anything is allocated, because the package blosc trusts the sizes in them. The package
includes C-Blosc 1.21 without snappy, and a zstd that rejects the frames of zstd 0.7, which Blosc wrote in 2016.
Source: C-Blosc 1, README_HEADER.rst, and frames that its releases wrote.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.zarr.errors import CodecError

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_HEADER = struct.Struct("<BBBBIII")
_STORED = 2  # a flag
_COMPRESSORS = ("blosclz", "lz4", "snappy", "zlib", "zstd")  # by their number in the flags; lz4hc shares that of lz4
_VERSIONS = (1, 2)
_BLOSC2 = (3, 4, 5)  # format versions of Blosc 2 chunks
_ZSTD_7 = b"\x27\xb5\x2f\xfd"  # magic number of zstd 0.7


class Frame(NamedTuple):
    """The header of a frame; sizes in bytes."""

    flags: int
    itemsize: int
    size: int  # decoded
    block_size: int  # decoded
    length: int  # of the whole frame, as stored

    @property
    def stored(self) -> bool:
        """True if the frame holds uncompressed bytes."""
        return bool(self.flags & _STORED)

    @property
    def blocks(self) -> int:
        """The number of blocks; the last may be shorter than the others."""
        return -(-self.size // self.block_size) if self.size else 0

    @property
    def compressor(self) -> str:
        """The name of the inner codec. Raise CodecError if it is unknown."""
        number = self.flags >> 5
        if number >= len(_COMPRESSORS):
            raise CodecError("blosc", f"inner codec {number} is not known")
        return _COMPRESSORS[number]


def parse_header(data: Buffer, limit: int) -> Frame:
    """Return the header of the frame at the start of `data`.

    Raise CodecError if the header is invalid, the frame is truncated, or it decodes to more than `limit` bytes.
    """
    if len(data) < _HEADER.size:
        raise CodecError("blosc", f"{len(data)} bytes are shorter than a frame's header")
    version, _, flags, itemsize, size, block_size, length = _HEADER.unpack_from(data)
    frame = Frame(flags, itemsize, size, block_size, length)
    if version not in _VERSIONS:
        writer = ", which Blosc 2 writes" if version in _BLOSC2 else ""
        raise CodecError(
            "blosc", f"a frame of format {version}{writer}: only {_VERSIONS[0]} and {_VERSIONS[1]} are known"
        )
    if not _HEADER.size <= length <= len(data):
        raise CodecError("blosc", f"a frame of {length} bytes in {len(data)}")
    if size > limit:
        raise CodecError("blosc", f"holds {size} bytes where at most {limit} are expected")
    if not itemsize or (size and not 0 < block_size <= size):
        raise CodecError("blosc", f"items of {itemsize} bytes in blocks of {block_size} of {size} bytes")
    if frame.stored and length < _HEADER.size + size:
        raise CodecError("blosc", f"a frame of {length} bytes cannot store {size}")
    if not frame.stored and length < _HEADER.size + 4 * frame.blocks:
        raise CodecError("blosc", f"a frame of {length} bytes cannot hold {frame.blocks} blocks")
    return frame


def decompress(data: Buffer, limit: int) -> Buffer:
    """Decompress the frame at the start of `data` to at most `limit` bytes. Raise CodecError.

    Inner codecs may need additional memory of four times the size of a block.
    """
    frame = parse_header(data, limit)
    body = memoryview(data).cast("B")[: frame.length]
    if frame.stored:
        return body[_HEADER.size : _HEADER.size + frame.size]
    if not frame.size:
        return b""
    compressor = frame.compressor
    blosc = _library()
    try:
        found: bytes = blosc.decompress(body)
    except blosc.blosc_extension.error as exc:
        if compressor == "zstd" and _ZSTD_7 in bytes(body):
            raise CodecError("blosc", "a frame of zstd 0.7, which the package blosc does not read") from exc
        if compressor not in blosc.cnames:
            raise CodecError("blosc", f"the package blosc is built without {compressor}") from exc
        raise CodecError("blosc", f"a damaged frame of {compressor}") from exc
    return found


@functools.cache
def _library() -> Any:
    """Import the package blosc, and make it decode in the calling thread alone and release the GIL."""
    import blosc

    blosc.set_nthreads(1)  # otherwise each call starts as many threads as there are cores
    blosc.set_releasegil(True)
    return blosc
