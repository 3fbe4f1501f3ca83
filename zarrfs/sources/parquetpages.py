"""What the columns of a Parquet file expand to, as the headers of their pages say: the footer is not believed.

Source: Apache Parquet format, parquet.thrift (PageHeader) and the Thrift compact protocol. pyarrow gets memory
for a page by its header, and has no bound of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_DEPTH = 8  # structs within structs; a page header has two
_TRUE, _FALSE, _BYTE, _DOUBLE, _BYTES, _STRUCT = 1, 2, 3, 7, 8, 12  # types of fields
_SHARED_PREFIXES = 7  # the encoding DELTA_BYTE_ARRAY: what it expands to no header tells


def expanded_size(data: memoryview, about: Any, columns: Collection[str]) -> int:
    """Bytes of all pages of `columns` once decompressed; `about`: pyarrow's metadata of the file `data`.

    ValueError where a header is damaged, or a page has an encoding that no bound is known for.
    """
    total = 0
    for group in range(about.num_row_groups):
        group = about.row_group(group)
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema in columns:
                total += max(column.total_uncompressed_size, _pages(data, column))
    return total


def _pages(data: memoryview, column: Any) -> int:
    start: int = column.data_page_offset
    first: int | None = column.dictionary_page_offset
    if first is not None and 0 < first < start:
        start = first
    stop = start + column.total_compressed_size
    if not 0 <= start <= stop <= len(data):
        raise ValueError("a column beyond the end")
    total = 0
    while start < stop:
        header = _Header(data, start, stop)
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


class _Header:
    """A struct in the Thrift compact protocol, from `at` on."""

    def __init__(self, data: memoryview, at: int, stop: int) -> None:
        self._data, self.at, self._stop = data, at, stop

    def struct(self, depth: int) -> dict[int, Any]:
        """Its fields by number: integers and structs; others as None."""
        if depth > _DEPTH:
            raise ValueError("a page header nested too deeply")
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            found[number] = None if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (4, 5, 6):  # of 16, 32 and 64 bits
            return self._integer()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind == _BYTES:
            self._skip(self._varint())
        elif kind in (_DOUBLE, _BYTE):
            self._skip(8 if kind == _DOUBLE else 1)
        else:  # no page header has lists, sets or maps
            raise ValueError("a damaged page header")
        return None

    def _byte(self) -> int:
        if self.at >= self._stop:
            raise ValueError("a page header is cut off")
        self.at += 1
        return self._data[self.at - 1]

    def _skip(self, count: int) -> None:
        if count > self._stop - self.at:
            raise ValueError("a page header is cut off")
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
                raise ValueError("a damaged page header")

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
