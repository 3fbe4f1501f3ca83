"""The decompressed size of the columns of a Parquet file, computed from the headers of their pages.

The footer is not trusted, because pyarrow allocates as much memory for a page as the page's header says, without a
limit. The headers are parsed here, because pyarrow aborts the process when asked for the metadata of a damaged column.
Source: Apache Parquet format, parquet.thrift (FileMetaData, PageHeader), and the Thrift compact protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any

_DEPTH = 8  # levels of nested structs; a footer has six
_VALUES = 1 << 18  # values in one header; a footer has some 40 for each column of a row group
_TRUE, _FALSE, _BYTE, _DOUBLE, _BYTES, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12  # field types
_SHARED_PREFIXES = 7  # the encoding DELTA_BYTE_ARRAY: no header bounds its decoded size
_END = struct.Struct("<I4s")  # length of the footer, "PAR1"


def expanded_size(data: memoryview, columns: Collection[str]) -> tuple[int, int]:
    """Return (rows, decompressed bytes of all pages of `columns`) of the Parquet file `data`.

    Raise ValueError if a header is damaged, or a page has an encoding whose decoded size has no known bound.
    """
    length, _magic = _END.unpack(data[-_END.size :])
    stop = len(data) - _END.size
    if length > stop:
        raise ValueError("a footer longer than the file")
    footer = _Thrift(data, stop - length, stop).struct(0)
    rows = total = stored = 0
    for group in _structs(footer.get(4)):
        rows += max(0, _integer(group, 3))
        for chunk in _structs(group.get(1)):
            column = chunk.get(3)
            if not isinstance(column, dict):
                raise ValueError("a column without metadata")  # noqa: TRY004
            if _path(column.get(3)) in columns:
                total += max(_integer(column, 6), _pages(data, column))
                stored += _integer(column, 7)
                if stored > len(data):  # otherwise, thousands of columns might share thousands of pages
                    raise ValueError("columns that overlap")
    return rows, total


def _structs(found: Any) -> list[dict[int, Any]]:
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("a footer without its lists")
    return found


def _path(found: Any) -> str:
    if not isinstance(found, list) or not all(isinstance(part, bytes) for part in found):
        raise ValueError("a column without a name")
    return b".".join(found).decode(errors="replace")


def _integer(found: dict[int, Any], field: int) -> int:
    number = found.get(field)
    if not isinstance(number, int):
        raise ValueError("a footer without its numbers")  # noqa: TRY004
    return number


def _pages(data: memoryview, column: dict[int, Any]) -> int:
    start, first = _integer(column, 9), column.get(11)
    if isinstance(first, int) and 0 < first < start:
        start = first
    stop = start + _integer(column, 7)
    if not 0 <= start <= stop <= len(data):
        raise ValueError("a column beyond the end")
    total = 0
    while start < stop:
        header = _Thrift(data, start, stop)
        found = header.struct(0)
        size, stored = found.get(2), found.get(3)
        if not isinstance(size, int) or not isinstance(stored, int) or size < 0 or stored < 0:
            raise ValueError("a page without sizes")
        for member, encoding in ((5, 2), (8, 4)):  # DataPageHeader, DataPageHeaderV2
            page = found.get(member)
            if isinstance(page, dict) and page.get(encoding) == _SHARED_PREFIXES:
                raise ValueError("the encoding DELTA_BYTE_ARRAY is not supported")
        total += size
        start = header.at + stored
    return total


class _Thrift:
    """A reader of structs in the Thrift compact protocol, at position `at`."""

    def __init__(self, data: memoryview, at: int, stop: int) -> None:
        self._data, self.at, self._stop = data, at, stop
        self._left = _VALUES

    def struct(self, depth: int) -> dict[int, Any]:
        """Read a struct as {field number: value}, with None for values other than integers, bytes, structs, lists."""
        if depth > _DEPTH:
            raise ValueError("a header nested too deeply")
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            self._count(1)
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            found[number] = None if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            return self._integer()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind == _BYTES:
            count = self._varint()
            start = self.at
            self._skip(count)
            return bytes(self._data[start : self.at])
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind not in (_DOUBLE, _BYTE, _TRUE, _FALSE):  # Parquet has no maps
            raise ValueError("a damaged header")
        self._skip(8 if kind == _DOUBLE else 1)
        return None

    def _list(self, depth: int) -> list[Any]:
        if depth > _DEPTH:
            raise ValueError("a header nested too deeply")
        head = self._byte()
        count = self._varint() if head >> 4 == 15 else head >> 4
        if count > self._stop - self.at:
            raise ValueError("a list beyond the end of its header")
        self._count(count)
        return [self._value(head & 15, depth + 1) for _ in range(count)]

    def _count(self, more: int) -> None:
        self._left -= more
        if self._left < 0:  # a value takes up to a hundred times the memory of the bytes it is read from
            raise ValueError(f"a header of more than {_VALUES} values")

    def _byte(self) -> int:
        if self.at >= self._stop:
            raise ValueError("a header is cut off")
        self.at += 1
        return self._data[self.at - 1]

    def _skip(self, count: int) -> None:
        if count > self._stop - self.at:
            raise ValueError("a header is cut off")
        self.at += count

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a damaged header")

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
