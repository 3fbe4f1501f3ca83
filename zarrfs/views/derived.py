"""Chunks of a translated array that are not files of the source: decoded chunks, and ranges of shards."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from zarrfs.errors import NotFound, TargetChanged
from zarrfs.store.api import Info, Kind, Store, Value
from zarrfs.system.buffers import Buffer
from zarrfs.views.chunks import Array, Chunks, StoredAt
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Node
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.model import ArrayMetadata
from zarrfs.zarr.translation import ChunkForm, Translation, convert

_INDEXES = 32  # most indexes of shards to read concurrently
_INDEX_BYTES = 32 << 20  # most bytes of these indexes


class DerivedChunks:
    """The chunks of one array, by their index in the grid that the view shows."""

    def __init__(
        self, store: Store, node: Node, translation: Translation, decoded: DecodedCache, indexes: DecodedCache
    ) -> None:
        """`node` is an array in `store`.

        `decoded` is the cache of an array whose chunks are decoded, also for the indexes of its shards; `indexes` is
        the cache of an array whose chunks are ranges of shards.
        """
        self._store, self._grid = store, translation.array.grid
        self._decodes = translation.form is ChunkForm.DECODED
        self._size = translation.array.chunk_bytes if translation.array.dtype.itemsize else None
        cache = decoded if self._decodes else indexes
        finish = _conversion(node, translation.array.dtype)
        self._chunks = Chunks(store, node, cache, c_order=True, finish=finish, notes=False)
        self.indexes_at_once = max(1, min(_INDEXES, _INDEX_BYTES // max(self._chunks.index_length, 1)))

    async def stored_at(self, index: tuple[int, ...]) -> StoredAt | None:
        """Return where an inner chunk of a shard is stored; None if it is missing. Raise ReadError."""
        return await self._chunks.stored_at(self._grid.number_at(index))

    async def size_of(self, index: tuple[int, ...], key: str) -> int:
        """Return the size of a decoded chunk in bytes.

        Decodes the chunk if its items have no fixed size, and then raises NotFound if it is missing, or ReadError if
        it cannot be decoded. Otherwise the chunk is not looked up.
        """
        if self._size is not None:
            return self._size
        number = self._grid.number_at(index)
        found = await self._chunks.decoded(number, await self._chunks.version(number))
        if found.value is None:
            raise NotFound(key)
        size: int = found.value.nbytes
        return size

    def shown(self, stored: Info, length: int | None, name: str) -> Info:
        """Return the entry of a chunk; `stored` is its file in the source, `length` the bytes of an inner chunk."""
        size = self._size if self._decodes else length  # None: call size_of()
        return Info(name, Kind.FILE, size, stored.mode, stored.mtime_ns, identity=stored.identity)

    async def open(self, key: str, index: tuple[int, ...], info: Info, at: StoredAt | None) -> Value:
        """Open a chunk, the value `key` of the view; `at`: where an inner chunk is stored."""
        if not self._decodes:
            assert at is not None
            return _Range(key, info, await self._store.open(at.key), at)
        number = self._grid.number_at(index)
        return _DecodedChunk(key, info, self._chunks, number, await self._chunks.version(number))


def _conversion(node: Node, target: DataType) -> Callable[[Array], Array] | None:
    """Return a function that converts the items of a chunk to the bytes in the view; None if they are the same."""
    assert isinstance(node.metadata, ArrayMetadata)
    if target.kind in "TB":
        name = "vlen-utf8" if target.kind == "T" else "vlen-bytes"

        def encode(items: Array) -> Array:
            import numcodecs

            return np.frombuffer(numcodecs.get_codec({"id": name}).encode(items.reshape(-1)), np.uint8)

        return encode
    if target == node.metadata.dtype:
        return None
    return lambda items: convert(items, target).view(np.dtype((np.void, target.itemsize)))


class _Range(Value):
    """A byte range of an open value, which is closed with the range."""

    __slots__ = ("_offset", "_whole")

    def __init__(self, key: str, info: Info, whole: Value, at: StoredAt) -> None:
        if whole.size < at.offset + at.length or not _same(whole.info, at.info):
            whole.close()
            raise TargetChanged(key, "its shard has changed")
        version = None if whole.version is None else (whole.version, at.offset, at.length)
        super().__init__(info, version)
        self._whole, self._offset = whole, at.offset

    async def read(self, start: int, length: int) -> Buffer:
        length = max(0, min(length, self.size - start))
        return await self._whole.read(self._offset + start, length)

    def close(self) -> None:
        self._whole.close()


class _DecodedChunk(Value):
    """An open decoded chunk. Its items are in memory while they are read, and as long as the cache keeps them."""

    __slots__ = ("_chunks", "_key", "_number", "_stored")

    def __init__(self, key: str, info: Info, chunks: Chunks, number: int, stored: Hashable) -> None:
        super().__init__(info, None if info.mtime_ns is None else stored)
        self._key, self._chunks, self._number, self._stored = key, chunks, number, stored

    async def read(self, start: int, length: int) -> Buffer:
        found = await self._chunks.decoded(self._number, self._stored)
        if self._stored is None:  # unknown at open: the version that is read first is pinned
            self._stored = found.version
        if found.value is None or found.version != self._stored:
            raise TargetChanged(self._key, "has changed since it was opened")
        items: Any = found.value
        if items.nbytes != self.size:  # the size is that of an earlier version
            raise TargetChanged(self._key, "has changed since it was opened")
        return memoryview(items.reshape(-1).view(np.uint8))[start : start + length]


def _same(one: Info, other: Info) -> bool:
    """Return whether two entries may describe one version of a file, by the attributes that both have."""
    known = ((one.size, other.size), (one.mtime_ns, other.mtime_ns), (one.identity, other.identity))
    return all(None in pair or pair[0] == pair[1] for pair in known)
