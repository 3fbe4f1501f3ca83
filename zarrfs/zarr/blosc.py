"""Decompression of C-Blosc 1 frames.

Headers are checked before anything is allocated, because the package blosc trusts the sizes in them. The package
includes C-Blosc 1.21 without snappy, and a zstd that rejects the frames of zstd 0.7, which Blosc wrote in 2016. Frames
of either kind are decoded here block by block, with zarrfs.zarr.snappy or with the system's libzstd, which usually
still supports zstd 0.7. Source: C-Blosc 1, README_HEADER.rst, and frames that its releases wrote.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.zarr.errors import CodecError

if TYPE_CHECKING:
    import ctypes

    import numpy as np

    from zarrfs.system.buffers import Buffer

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

InnerCodec = Callable[[memoryview, int], "Buffer"]  # (compressed bytes, decompressed size) -> decompressed bytes

_HEADER = struct.Struct("<BBBBIII")
_SHUFFLED, _STORED, _BIT_SHUFFLED, _NOT_SPLIT = 1, 2, 4, 16  # flags
_COMPRESSORS = ("blosclz", "lz4", "snappy", "zlib", "zstd")  # by their number in the flags; lz4hc shares that of lz4
_VERSIONS = (1, 2)
_BLOSC2 = (3, 4, 5)  # format versions of Blosc 2 chunks
_SPLITS_MAX = 16  # a block has one split per byte of an item, but a single split if items have more bytes than this
_SPLIT_MIN = 128  # bytes; a block has a single split if its splits would be smaller than this
_ZSTD_7 = b"\x27\xb5\x2f\xfd"  # magic number of zstd 0.7
_LIBZSTD = ("libzstd.so.1", "libzstd.1.dylib")
_PLANES_MAX = 8  # bytes; for items up to this size, copying plane by plane is faster (four times for two bytes)
_TRANSPOSE = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))  # transposes 8 x 8 bits


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
    if compressor == "snappy":
        from zarrfs.zarr import snappy

        return decode_blocks(frame, body, snappy.decompress)
    blosc = _library()
    try:
        found: bytes = blosc.decompress(body)
    except blosc.blosc_extension.error as exc:
        if compressor == "zstd" and _ZSTD_7 in bytes(body):
            return decode_blocks(frame, body, _old_zstd)
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


def decode_blocks(frame: Frame, data: memoryview, inner: InnerCodec) -> Buffer:
    """Decompress a frame block by block with the codec `inner`. Raise CodecError if a block is damaged."""
    import numpy as np

    starts = np.frombuffer(data, "<u4", frame.blocks, _HEADER.size).tolist()
    out = np.empty(frame.size, np.uint8)
    for number, start in enumerate(starts):
        target = out[number * frame.block_size : (number + 1) * frame.block_size]
        block = _block(frame, data, start, len(target), inner)
        if frame.flags & _SHUFFLED and frame.itemsize > 1:
            unshuffle(block, target, frame.itemsize)
        elif frame.flags & _BIT_SHUFFLED and (len(target) // frame.itemsize) % 8 == 0:
            _unshuffle_bits(block, target, frame.itemsize)
        else:
            target[:] = block
    return out.data


def _block(frame: Frame, source: memoryview, at: int, size: int, inner: InnerCodec) -> Bytes:
    """Decompress the splits of the block of `size` bytes that begins at `at`. The result is still shuffled."""
    import numpy as np

    splits = 1
    if not frame.flags & _NOT_SPLIT and frame.itemsize <= _SPLITS_MAX and size == frame.block_size:
        splits = frame.itemsize if size // frame.itemsize >= _SPLIT_MIN else 1
    each = size // splits
    if splits * each != size:
        raise CodecError("blosc", f"a block of {size} bytes in {splits} parts")
    block = np.empty(size, np.uint8)
    for split in range(splits):
        coded, at = _split(source, at)
        whole = coded if len(coded) == each else inner(coded, each)
        block[split * each : (split + 1) * each] = np.frombuffer(whole, np.uint8)
    return block


def _split(source: memoryview, at: int) -> tuple[memoryview, int]:
    """Return the compressed bytes of the split at `at`, and where it ends. A split begins with its compressed size."""
    if at + 4 > len(source):
        raise CodecError("blosc", "a block begins beyond the end of the frame")
    end = at + 4 + int.from_bytes(source[at : at + 4], "little")
    if end > len(source):
        raise CodecError("blosc", "a block ends beyond the end of the frame")
    return source[at + 4 : end], end


def unshuffle(coded: Bytes, target: Bytes, itemsize: int) -> None:
    """Undo byte shuffle: `coded` has the first bytes of all items, then the second ones, and so on.

    Bytes after the last whole item are copied.
    """
    whole = len(coded) // itemsize * itemsize
    items, planes = target[:whole].reshape(-1, itemsize), coded[:whole].reshape(itemsize, -1)
    if itemsize <= _PLANES_MAX:
        for at, plane in enumerate(planes):
            items[:, at] = plane
    else:
        items[:] = planes.T
    target[whole:] = coded[whole:]


def _unshuffle_bits(coded: Bytes, target: Bytes, itemsize: int) -> None:
    """Undo bit shuffle: `coded` has the first bits of all items, then the second ones, and so on.

    Each byte holds one bit of each of eight items, with the first item in the lowest bit.
    """
    import numpy as np

    items = len(coded) // itemsize
    whole = items * itemsize
    rows, wide = coded[:whole].reshape(itemsize, 8, items // 8), target[:whole].reshape(items, itemsize)
    for at, bits in enumerate(rows):
        # a 64-bit number holds one byte of each of eight items, bit by bit: transpose this square of 8 x 8 bits
        squares = np.ascontiguousarray(bits.T).view("<u8").reshape(-1)
        for distance, mask in _TRANSPOSE:
            swapped = (squares ^ (squares >> np.uint64(distance))) & np.uint64(mask)
            squares ^= swapped ^ (swapped << np.uint64(distance))
        wide[:, at] = squares.view(np.uint8)
    target[whole:] = coded[whole:]


def _old_zstd(coded: memoryview, size: int) -> Buffer:
    """Decompress a frame of zstd 0.7 with the system's libzstd."""
    import numpy as np

    library = _libzstd()
    if library is None:
        raise CodecError("blosc", "written by zstd 0.7, which only the system's libzstd reads: there is none")
    out = np.empty(size, np.uint8)
    found = library.ZSTD_decompress(out.ctypes.data, size, np.frombuffer(coded, np.uint8).ctypes.data, len(coded))
    if found != size:
        raise CodecError("blosc", "a damaged frame of zstd 0.7, or a libzstd that does not read it")
    return out.data


@functools.cache
def _libzstd() -> ctypes.CDLL | None:
    """Return the system's libzstd, which the dynamic loader finds by its soname; None if it is not installed."""
    import ctypes

    for name in _LIBZSTD:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.ZSTD_decompress.restype = ctypes.c_size_t
        library.ZSTD_decompress.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
        return library
    return None
