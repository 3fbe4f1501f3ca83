"""Append-only maps from 64-bit numbers to bytes, in memory shared by processes forked from one.

A table has one writer and any number of readers, and uses no locks: the writer completes a record before it stores the
cell that points to it, and readers only look up numbers that they got from the writer through the kernel. A writer
that is killed leaves at most one record without a cell. The next writer appends after that record.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

_HEADER = mmap.PAGESIZE  # bytes before the segments: their number, the end of each log, records of each segment
_FIRST = 1024  # records of the first segment; each further segment has twice as many as the one before
_RECORD = 96  # bytes of the log per record, on average
_HEAD = struct.Struct("<QH")  # head of a record: number, length of the value
_OFFSET = (1 << 40) - 1  # low bits of a cell: offset of the record plus 1; the high bits equal those of the number
_LONGEST = (1 << 16) - 1


def _size(records: int) -> int:
    """Return the bytes of a segment: whole pages, because the next segment is mapped after it."""
    return -(-records * (16 + _RECORD) // mmap.PAGESIZE) * mmap.PAGESIZE


class _Segment:
    """A log of records, with a hash table (open addressing) whose cells point into it."""

    def __init__(self, file: int, at: int, index: int) -> None:
        records = _FIRST << index
        self.room, self._mask = records * _RECORD, 2 * records - 1
        self.size = _size(records)
        self._map = mmap.mmap(file, self.size, offset=at)
        self._cells = memoryview(self._map)[: 16 * records].cast("Q")
        self._log = memoryview(self._map)[16 * records :]
        self.most = records

    def find(self, number: int) -> bytes | None:
        cells, mask, log, tag = self._cells, self._mask, self._log, number & ~_OFFSET
        at = number & mask
        while cell := cells[at]:
            if cell & ~_OFFSET == tag:
                start = (cell & _OFFSET) - 1
                found, length = _HEAD.unpack_from(log, start)
                if found == number:
                    return bytes(log[start + 10 : start + 10 + length])
            at = (at + 1) & mask
        return None

    def write(self, number: int, value: bytes, start: int) -> int:
        """Write a record at offset `start` of the log; return the offset after it."""
        end = start + 10 + len(value)
        _HEAD.pack_into(self._log, start, number, len(value))
        self._log[start + 10 : end] = value
        return end

    def enter(self, number: int, start: int) -> None:
        cells, at = self._cells, number & self._mask
        while cells[at]:
            at = (at + 1) & self._mask
        cells[at] = (number & ~_OFFSET) | (start + 1)

    def records(self, end: int) -> Iterator[tuple[int, bytes]]:
        start = 0
        while start < end:
            number, length = _HEAD.unpack_from(self._log, start)
            yield number, bytes(self._log[start + 10 : start + 10 + length])
            start += 10 + length


class SharedTable:
    """A table, which must be made before the fork. Only one process at a time may call put()."""

    def __init__(self) -> None:
        self._file = os.memfd_create("zarrfs-names")
        os.ftruncate(self._file, _HEADER)
        self._ends = memoryview(mmap.mmap(self._file, _HEADER)).cast("Q")  # [0]: segments; [1 + i]: end of log i
        self._counts = self._ends[256:]  # [i]: number of records in segment i
        self._segments: list[_Segment] = []

    @property
    def descriptor(self) -> int:
        """The descriptor of the memory, which every process must keep open."""
        return self._file

    def get(self, number: int) -> bytes | None:
        """Return the value of `number`; None if there is none."""
        if len(self._segments) != self._ends[0]:
            self._map()
        for segment in reversed(self._segments):
            found = segment.find(number)
            if found is not None:
                return found
        return None

    def put(self, number: int, value: bytes) -> None:
        """Add a value of at most 65,535 bytes under a number that has none yet. Raise OSError if memory runs out."""
        assert len(value) <= _LONGEST
        if len(self._segments) != self._ends[0]:
            self._map()
        last = len(self._segments) - 1
        if last < 0 or self._counts[last] >= self._segments[last].most or (
            self._ends[1 + last] + 10 + len(value) > self._segments[last].room
        ):  # fmt: skip
            self._grow()
            last += 1
        segment, start = self._segments[last], self._ends[1 + last]
        self._ends[1 + last] = segment.write(number, value, start)
        self._counts[last] += 1
        segment.enter(number, start)

    def items(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, value) of all records so far."""
        self._map()
        for index, segment in enumerate(self._segments):
            yield from segment.records(self._ends[1 + index])

    def __len__(self) -> int:
        return sum(self._counts[: self._ends[0]])

    def _map(self) -> None:
        while len(self._segments) < self._ends[0]:
            at = _HEADER + sum(segment.size for segment in self._segments)
            self._segments.append(_Segment(self._file, at, len(self._segments)))

    def _grow(self) -> None:
        at, index = _HEADER + sum(segment.size for segment in self._segments), len(self._segments)
        # allocate the pages, so that a lack of memory raises here and not as SIGBUS at a later access to the map
        os.posix_fallocate(self._file, at, _size(_FIRST << index))
        self._segments.append(_Segment(self._file, at, index))
        self._ends[0] = index + 1
