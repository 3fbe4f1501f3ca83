"""Reader of FlatBuffers: tables, vectors, strings and structs of an untrusted buffer.

Every offset is checked by struct or by slicing, so that a damaged or hostile buffer raises an exception and never
reads other memory. The exception is Damaged, or one of struct or of a decoder, which files.py turns into Damaged.
Source: https://flatbuffers.dev/internals/ (little-endian; the vtable of a table locates its fields).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

U8 = struct.Struct("<B").unpack_from
U16 = struct.Struct("<H").unpack_from
U32 = struct.Struct("<I").unpack_from
I32 = struct.Struct("<i").unpack_from
U64 = struct.Struct("<Q").unpack_from


class DamagedBuffer(Exception):
    """A buffer that breaks the format."""


def layout(buffer: bytes, vtable: int, count: int) -> tuple[int, ...]:
    """Return the offsets of the first `count` fields, relative to their table; 0 for an absent field."""
    if vtable < 0:
        raise DamagedBuffer("a vtable outside the file")
    (size,) = U16(buffer, vtable)
    return tuple(U16(buffer, vtable + 4 + 2 * slot)[0] if 6 + 2 * slot <= size else 0 for slot in range(count))


class Table:
    """A table at offset `at` of a buffer. Methods take the number of a field in the schema, its slot."""

    __slots__ = ("_vtable", "at", "buffer")

    def __init__(self, buffer: bytes, at: int) -> None:
        self.buffer, self.at = buffer, at
        self._vtable = at - I32(buffer, at)[0]

    @classmethod
    def root(cls, buffer: bytes) -> Table:
        """Return the root table of a buffer."""
        return cls(buffer, U32(buffer, 0)[0])

    def field(self, slot: int) -> int:
        """Return the position of a field in the buffer; 0 if it is absent."""
        (offset,) = layout(self.buffer, self._vtable, slot + 1)[slot:]
        return self.at + offset if offset else 0

    def number(self, slot: int, unpack: Callable[[bytes, int], tuple[int, ...]]) -> int:
        """Return a number; 0 if it is absent."""
        at = self.field(slot)
        return unpack(self.buffer, at)[0] if at else 0

    def fixed(self, slot: int, size: int) -> bytes | None:
        """Return the bytes of a struct, such as an id; None if it is absent."""
        at = self.field(slot)
        return cut(self.buffer, at, size) if at else None

    def table(self, slot: int) -> Table | None:
        """Return the table that a field refers to; None if it is absent."""
        at = self.field(slot)
        return Table(self.buffer, at + U32(self.buffer, at)[0]) if at else None

    def vector(self, slot: int, width: int) -> tuple[int, int]:
        """Return (position of the first item, count) of a vector whose items have `width` bytes; (0, 0) if absent."""
        at = self.field(slot)
        return vector_at(self.buffer, at, width) if at else (0, 0)

    def data(self, slot: int) -> bytes | None:
        """Return the bytes of a vector of bytes, or of a string; None if it is absent."""
        at = self.field(slot)
        if not at:
            return None
        start, count = vector_at(self.buffer, at, 1)
        return self.buffer[start : start + count]

    def text(self, slot: int) -> str | None:
        """Return a string; None if it is absent."""
        data = self.data(slot)
        return None if data is None else data.decode()

    def tables(self, slot: int) -> Iterator[Table]:
        """Yield the tables of a vector; none if it is absent."""
        start, count = self.vector(slot, 4)
        for at in range(start, start + 4 * count, 4):
            yield Table(self.buffer, at + U32(self.buffer, at)[0])


def vector_at(buffer: bytes, at: int, width: int) -> tuple[int, int]:
    """Return (position of the first item, count) of the vector to which the offset stored at `at` points."""
    start = at + U32(buffer, at)[0]
    (count,) = U32(buffer, start)
    if start + 4 + count * width > len(buffer):
        raise DamagedBuffer("a vector that ends outside the file")
    return start + 4, count


def cut(buffer: bytes, at: int, size: int) -> bytes:
    """Return `size` bytes from `at` on. Raise DamagedBuffer if the buffer ends earlier."""
    found = buffer[at : at + size]
    if len(found) != size:
        raise DamagedBuffer("a field outside the file")
    return found
