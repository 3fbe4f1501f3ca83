"""The index of the disk cache: one file that maps keys of blocks to places in segments.

The file is a hash table of buckets of 4 KiB, each with 64 rows of 64 bytes. A row has its own checksum and is written
by one pwrite(2), so that a reader sees a whole row or none, whenever a writer is killed. If a row is lost, its block
is fetched again. Data do not depend on rows being correct, because the bytes that a row leads to are verified, too.

If a bucket is full, the table becomes four times as large. The bucket of a key is a residue of its hash, so the larger
table is the old one repeated four times. Copies of a row outside the bucket of its key are never found, and are
overwritten first. A process that still uses the old size finds the rows that were there before. A copy that is not
complete does not count as part of the table.

Writers hold the write lock (diskspace.py). Without locks two writers may take the same row, and one block is lost.
"""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import xxhash

from zarrfs.cache.diskfiles import Handle
from zarrfs.system.buffers import write_all
from zarrfs.system.localfiles import read_cached

BUCKET = 4096  # bytes
FIRST = 4 * BUCKET  # bytes of a new index
GROWTH = 4
PIECE_KEY = 12  # bytes at the beginning of a key that all pieces of a unit have in common
_ROW = struct.Struct("<16s8sQQIIQQ")  # the fields of IndexRow, and XXH3-64 of them
_ROWS = BUCKET // _ROW.size
_NOBODY = bytes(16)  # the key of a free row


class IndexRow(NamedTuple):
    """The place, length and checksum of a block."""

    key: bytes  # 16 bytes; that of a version record begins with its `target`
    target: bytes  # the first 8 bytes of the hash of the target
    segment: int
    start: int  # offset of the block in the target; for a version record, when it was confirmed (ns since 1970)
    offset: int  # in the segment
    length: int
    check: int  # XXH3-64 of the bytes

    @property
    def stop(self) -> int:
        """The end of a piece in its target."""
        return self.start + self.length


class Index:
    """The table in `file`, an open descriptor. Reads are thread-safe. Methods raise OSError."""

    def __init__(self, file: Handle) -> None:
        self.file = file
        self._mask = -1  # number of buckets - 1; -1: not known yet, or the file has no bucket

    def find(self, key: bytes, now: bool = False) -> IndexRow | None:
        """Return the row of `key`, if any. `now`: raise BlockingIOError instead of waiting for the disk."""
        return next(self._search(key, now), None)

    def pieces(self, key: bytes, now: bool = False) -> list[IndexRow]:
        """Return the rows whose key begins with the first PIECE_KEY bytes of `key`. `now` as for find()."""
        return list(self._search(key[:PIECE_KEY], now))

    def put(self, row: IndexRow, is_dead: Callable[[int], bool], force: bool = False) -> bool:
        """Write a row over that with its key, a free row, or one whose segment `is_dead`. Hold the write lock.

        Return False if the bucket has no such row; with `force`, overwrite any row then.
        """
        self.refresh()
        if self._mask < 0:
            os.ftruncate(self.file, 0)
            write_all(self.file, bytes(FIRST), 0)
            self.refresh()
        bucket = _bucket(row.key, self._mask)
        page = os.pread(self.file, BUCKET, bucket * BUCKET)
        at = next((at for key in (row.key, _NOBODY) for at in _places(page, key)), -1)
        if at < 0:
            first = random.randrange(_ROWS)  # in a table that has grown, most rows can be overwritten
            places = (number % _ROWS * _ROW.size for number in range(first, first + _ROWS))
            at = next((at for at in places if self._is_free(page, at, bucket, is_dead)), -1)
        if at < 0:
            if not force:
                return False
            at = random.randrange(_ROWS) * _ROW.size
        body = _ROW.pack(*row, 0)[:-8]
        os.pwrite(self.file, body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"), bucket * BUCKET + at)
        return True

    def drop(self, row: IndexRow | bytes) -> None:
        """Free a row that has not changed, or the damaged rows of a key. Hold the write lock."""
        self.refresh()
        key = row if isinstance(row, bytes) else row.key
        bucket = _bucket(key, self._mask)
        page = os.pread(self.file, BUCKET, bucket * BUCKET) if self._mask >= 0 else b""
        for at in _places(page, key):
            if _row(page, at) == (None if isinstance(row, bytes) else row):
                os.pwrite(self.file, bytes(_ROW.size), bucket * BUCKET + at)

    @property
    def growth(self) -> int:
        """Bytes that grow() adds."""
        return (GROWTH - 1) * (self._mask + 1) * BUCKET

    def grow(self) -> None:
        """Make the table GROWTH times as large. Hold the write lock."""
        size = (self._mask + 1) * BUCKET
        for at in range(size, GROWTH * size, size):
            for low in range(0, size, 1 << 20):
                write_all(self.file, os.pread(self.file, min(1 << 20, size - low), low), at + low)
        self.refresh()

    def rows(self) -> Iterator[IndexRow | bytes]:
        """Yield every row of the table; for a damaged row, its key."""
        self.refresh()
        mask = self._mask
        for bucket in range(mask + 1):
            page = os.pread(self.file, BUCKET, bucket * BUCKET)
            for at in range(0, len(page) - _ROW.size + 1, _ROW.size):
                key = page[at : at + 16]
                if key != _NOBODY and _bucket(key, mask) == bucket:
                    yield _row(page, at) or key

    def refresh(self) -> None:
        """Find out how large the table is now."""
        size, buckets = os.fstat(self.file).st_size // BUCKET, FIRST // BUCKET
        while buckets * GROWTH <= size:
            buckets *= GROWTH
        self._mask = buckets - 1 if buckets <= size else -1

    def _search(self, key: bytes, now: bool) -> Iterator[IndexRow]:
        """Yield the rows whose key begins with `key`. If there are none, search again if the table has grown."""
        found = False
        while not found:
            mask = self._mask  # another thread may change it at any time
            if mask >= 0:
                at = _bucket(key, mask) * BUCKET
                page = read_cached(self.file, at, BUCKET) if now else os.pread(self.file, BUCKET, at)
                if now and len(page) < BUCKET:
                    raise BlockingIOError(errno.EAGAIN, "not in memory")
                for place in _places(page, key):
                    row = _row(page, place)
                    if row is not None:
                        found = True
                        yield row
            if not found:
                self.refresh()
                if self._mask == mask:
                    return

    def _is_free(self, page: bytes, at: int, bucket: int, is_dead: Callable[[int], bool]) -> bool:
        """Return whether a row is damaged, belongs to another bucket, or leads to a dead segment."""
        if _bucket(page[at : at + 16], self._mask) != bucket:
            return True
        row = _row(page, at)
        return row is None or is_dead(row.segment)


def _bucket(key: bytes, mask: int) -> int:
    return int.from_bytes(key[4:12], "little") & mask


def _places(page: bytes | bytearray, key: bytes) -> Iterator[int]:
    """Yield the offsets of the rows that begin with `key`."""
    at = page.find(key)
    while at >= 0:
        if at % _ROW.size == 0:
            yield at
        at = page.find(key, at + 1)


def _row(page: bytes | bytearray, at: int) -> IndexRow | None:
    """Return the row at an offset; None if it is damaged."""
    *fields, check = _ROW.unpack_from(page, at)
    if xxhash.xxh3_64_intdigest(page[at : at + _ROW.size - 8]) != check:
        return None
    return IndexRow(*fields)
