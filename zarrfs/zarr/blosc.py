"""Decompression of C-Blosc 1 frames.

Headers are checked before anything is allocated, because the package blosc trusts the sizes in them. The package
includes C-Blosc 1.21 without snappy, and a zstd that rejects the frames of zstd 0.7, which Blosc wrote in 2016.
Source: C-Blosc 1, README_HEADER.rst, and frames that its releases wrote.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

from zarrfs.zarr.errors import CodecError

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_HEADER = struct.Struct("<BBBBIII")
_STORED = 2  # a flag: the frame holds uncompressed bytes
_COMPRESSORS = dict(enumerate(("blosclz", "lz4", "snappy", "zlib", "zstd")))  # in the flags; lz4hc shares that of lz4
_ZSTD_7 = b"\x27\xb5\x2f\xfd"  # magic number of zstd 0.7


def decompress(data: Buffer, limit: int) -> Buffer:
    """Decompress the frame at the start of `data` to at most `limit` bytes. Raise CodecError.

    Inner codecs may need additional memory of four times the size of a block.
    """
    if len(data) < _HEADER.size:
        raise CodecError("blosc", f"{len(data)} bytes are shorter than a frame's header")
    version, _, flags, itemsize, size, block, length = _HEADER.unpack_from(data)
    stored, inner = bool(flags & _STORED), _COMPRESSORS.get(flags >> 5)
    blocks = -(-size // (block or 1))
    for wrong, reason in (
        (version not in (1, 2), f"a frame of format {version}{_writer(version)}: only 1 and 2 are known"),
        (not _HEADER.size <= length <= len(data), f"a frame of {length} bytes in {len(data)}"),
        (size > limit, f"holds {size} bytes where at most {limit} are expected"),
        (not itemsize, f"items of {itemsize} bytes"),
        (size and not 0 < block <= size, f"in blocks of {block} of {size} bytes"),
        (stored and length < _HEADER.size + size, f"a frame of {length} bytes cannot store {size}"),
        (not stored and length < _HEADER.size + 4 * blocks, f"a frame of {length} bytes cannot hold {blocks} blocks"),
        (not stored and size and inner is None, f"inner codec {flags >> 5} is not known"),
    ):
        if wrong:
            raise CodecError("blosc", reason)
    body = memoryview(data).cast("B")[:length]
    if stored or not size:
        return body[_HEADER.size : _HEADER.size + size]
    blosc = _library()
    try:
        found: bytes = blosc.decompress(body)
    except blosc.blosc_extension.error as exc:
        if inner == "zstd" and _ZSTD_7 in bytes(body):
            raise CodecError("blosc", "a frame of zstd 0.7, which the package blosc does not read") from exc
        if inner not in blosc.cnames:
            raise CodecError("blosc", f"the package blosc is built without {inner}") from exc
        raise CodecError("blosc", f"a damaged frame of {inner}") from exc
    return found


def _writer(version: int) -> str:
    return ", which Blosc 2 writes" if version in (3, 4, 5) else ""


@functools.cache
def _library() -> Any:
    """Import the package blosc, and make it decode in the calling thread alone and release the GIL."""
    import blosc

    blosc.set_nthreads(1)  # otherwise each call starts as many threads as there are cores
    blosc.set_releasegil(True)
    return blosc
