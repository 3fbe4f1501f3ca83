"""Decompression of raw Snappy blocks, which old Blosc frames contain. Source: Snappy's format_description.txt.

This is pure Python, because no maintained wheel reads such blocks; it takes about a microsecond per element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarrfs.zarr.errors import CodecError

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_NAME = "snappy"


def decompress(data: Buffer, size: int) -> bytearray:
    """Decompress a raw block to `size` bytes. Raise CodecError if it is damaged or has another size."""
    source = bytes(data)
    claimed, at = _varint(source)
    if claimed != size:
        raise CodecError(_NAME, f"holds {claimed} bytes where {size} are expected")
    out = bytearray()
    end, have = len(source), 0
    while at < end:
        tag = source[at]
        kind = tag & 3
        if kind == 0:
            length, at = (tag >> 2) + 1, at + 1
            if length > 60:
                extra = length - 60  # the number of bytes that encode length - 1
                length = int.from_bytes(source[at : at + extra], "little") + 1
                at += extra
            if length > end - at or length > size - have:
                raise CodecError(_NAME, "a literal goes beyond the end")
            out += source[at : at + length]
            at, have = at + length, have + length
            continue
        width = _WIDTHS[kind]
        if at + width > end:
            raise CodecError(_NAME, "the block ends early")
        if kind == 1:
            length, offset = 4 + (tag >> 2 & 7), (tag & 0xE0) << 3 | source[at + 1]
        elif kind == 2:
            length, offset = 1 + (tag >> 2), source[at + 1] | source[at + 2] << 8
        else:
            length, offset = 1 + (tag >> 2), int.from_bytes(source[at + 1 : at + 5], "little")
        if not 0 < offset <= have or length > size - have:
            raise CodecError(_NAME, "a copy goes beyond the output")
        at, start, have = at + width, have - offset, have + length
        if length <= offset:
            out += out[start : start + length]
        else:  # the copy overlaps its own output: it repeats a pattern
            out += (out[start:] * (length // offset + 1))[:length]
    if have != size:
        raise CodecError(_NAME, "the block ends early")
    return out


_WIDTHS = (0, 2, 3, 5)  # bytes of a copy element, by its tag


def _varint(source: bytes) -> tuple[int, int]:
    """Return the varint at the start of `source`, and the position after it."""
    value = 0
    for at, byte in enumerate(source[:5]):
        value |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            return value, at + 1
    raise CodecError(_NAME, "no length")
