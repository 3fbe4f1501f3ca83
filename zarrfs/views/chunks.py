"""The decoded chunks of one array: found by number, fetched, decoded, cached, and checked for changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import trio

from zarrfs.errors import NotFound, OutOfRange, ReadError, StoreError, TargetChanged, TargetMissing
from zarrfs.store.api import Info, Kind, Store, Value, join_key
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import quarter
from zarrfs.views.boxes import Run
from zarrfs.views.decoded_cache import Decoded, DecodedCache
from zarrfs.views.hierarchy import Node, chunk_errors
from zarrfs.zarr.codecs import (
    check_codecs,
    decode_chunk_at,
    decoder_of,
    inner_array,
    sharding_of,
    takes_child,
)
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.model import ArrayMetadata

Array = np.ndarray[Any, Any]
T = TypeVar("T")

_SLOW = 1 << 62  # bytes; a size for which DecodedCache.run() always uses a thread
_TRIES = 3  # attempts to read a chunk or shard that is not replaced meanwhile
_EMPTY = {"T": "", "B": b""}  # items without a fill value, by kind of dtype
KEPT = 1024  # bytes: the overhead of a cached chunk, and the size of a missing one
_tokens = itertools.count()


class StoredAt(NamedTuple):
    """A range of a stored value: an inner chunk of a shard."""

    key: str  # of the whole value, as are its entry and its version
    info: Info
    version: Hashable
    offset: int
    length: int

    def entry(self, name: str) -> Info:
        """Return the entry of the range as a file."""
        return Info(name, Kind.FILE, self.length, self.info.mode, self.info.mtime_ns, identity=self.info.identity)

    def range(self, key: str, whole: Value) -> Value:
        """Return the range of the open value, which is closed with it. Raise TargetChanged, about `key`."""
        if whole.size < self.offset + self.length or whole.version != self.version:
            whole.close()
            raise TargetChanged(key, "its shard has changed")
        return _Range(self.entry(key.rpartition("/")[2]), whole, self.offset)


class _Range(Value):
    __slots__ = ("_offset", "_whole")

    def __init__(self, info: Info, whole: Value, offset: int) -> None:
        super().__init__(info, None if whole.version is None else (whole.version, offset, info.size))
        self._whole, self._offset = whole, offset

    async def read(self, start: int, length: int) -> Buffer:
        return await self._whole.read(self._offset + start, max(0, min(length, self.size - start)))

    def close(self) -> None:
        self._whole.close()


class Chunks:
    """The chunks of one array by number; of a sharded array, the inner chunks.

    Shape, chunks and numbers are in the order of the flat file: an array whose chunks are stored in Fortran order is
    transposed, with its dimensions reversed. Items are opaque bytes of their size (dtype void), in the byte order of
    the array; items without a fixed size are objects. With `c_order` nothing is transposed.
    """

    def __init__(self, store: Store, node: Node, cache: DecodedCache, c_order: bool = False) -> None:
        """`node` is an array in `store`."""
        assert isinstance(node.metadata, ArrayMetadata)
        self.node, self.array = node, node.metadata
        self._store, self._cache = store, cache
        self._sharding = sharding_of(self.array)
        self._stored = self._sharding.inner if self._sharding else self.array  # the metadata that decodes one chunk
        self.fortran = not c_order and is_fortran(self.array)
        grid, turn = self._stored.grid, -1 if self.fortran else 1
        self._grid = Grid(grid.shape[::turn], grid.chunks[::turn])  # in the order of the flat file
        found = self._grid.shape, self._grid.chunks, self._grid.counts
        self.shape, self.shape_of_chunk, self.counts = (each or (1,) for each in found)
        self.number = self._grid.size
        self.itemsize = self.array.dtype.itemsize
        self.size_of_chunk = self._stored.chunk_bytes  # bytes, decoded
        self.item = np.dtype((np.void, self.itemsize)) if self.itemsize else np.dtype(object)
        self._takes = self.size_of_chunk + KEPT + (self._sharding.index_length if self._sharding else 0)  # bytes
        self._external, self._ready = takes_child(self._stored), False
        self._token = next(_tokens)

    @property
    def index_length(self) -> int:
        """The size in bytes of the index of a shard; 0 without shards."""
        return self._sharding.index_length if self._sharding else 0

    @property
    def plain(self) -> bool:
        """Return whether stored chunks are the bytes of their items, uncompressed."""
        names = [codec.name for codec in self._stored.codecs[self.fortran :]]
        return names in ([], ["bytes"]) and self._sharding is None

    def id(self, number: int) -> Hashable:
        """Return the cache key of a chunk."""
        return self._token, number

    def key(self, number: int) -> str:
        """Return the key of the stored chunk, or of the shard that holds it."""
        return self._place(self._index(number))[0]

    def filled(self, shape: tuple[int, ...]) -> Array:
        """Return items of missing chunks: the fill value; without one, zeros, empty text, empty bytes or None."""
        if self.itemsize:
            fill = self.array.fill
            if fill is None or not any(fill):
                return np.zeros(shape, self.item)
            return np.full(shape, np.frombuffer(fill, self.item)[0], self.item)
        found = np.empty(shape, object)
        fill = self.array.fill_object
        found.fill(_EMPTY.get(self.array.dtype.kind) if fill is None else fill)
        return found

    def kept(self, number: int) -> Decoded | None:
        """Return the chunk if it is cached, and so fresh that get() would not look at its stored value."""
        found = self._cache.peek(self.id(number))
        return found if found is not None and (self._store.immutable or found.is_fresh()) else None

    def coming(self, number: int) -> bool:
        """Return whether the chunk is cached or being decoded."""
        return self._cache.has(self.id(number))

    async def get(self, number: int) -> Array | None:
        """Return the chunk in full chunk shape; None if missing. Raise ReadError if it cannot be read or decoded."""
        id = self.id(number)
        found = self._cache.peek(id)
        if found is None or not await self._is_current(found, id, self.key(number)):
            found = await self._cache.get(id, self._takes, lambda: self.load(number))
        return found.value  # type: ignore[no-any-return]

    async def stored_at(self, index: tuple[int, ...]) -> StoredAt | None:
        """Return where an inner chunk is stored; None if it is missing. Raise ReadError."""
        key, place = self._place(index)

        async def find(value: Value) -> StoredAt | None:
            run = await self._range(key, value, place)
            return None if run is None else StoredAt(key, value.info, value.version, *run)

        return await self._opened(key, find)

    async def load(self, number: int) -> Decoded:
        """Fetch and decode a chunk, bypassing the cache."""
        index = self._index(number)
        await self._get_ready()
        now = trio.current_time()
        key, place = self._place(index)

        async def read(value: Value) -> tuple[Hashable, Buffer | None]:
            run = await self._range(key, value, place)
            if run is None:
                return value.version, None
            self._check_sizes(key, run[1])
            data = await value.read(*run)
            if len(data) != run[1]:
                raise ReadError(key, f"ends before {run[0]} + {run[1]}")
            return value.version, data

        version, data = await self._opened(key, read) or (None, None)
        if data is None:
            return Decoded(None, KEPT, version, now)
        work = self.size_of_chunk if self.itemsize and not self._external else _SLOW
        chunk = await self._cache.run(work, self._decode, key, data, index)
        return Decoded(chunk, chunk.nbytes + KEPT, version, now)

    async def stored(self, run: Run) -> Buffer | None:
        """Read items of a chunk of a plain array; None if it is missing."""
        key, length = self.key(run.number), run.items * self.itemsize

        async def read(value: Value) -> Buffer:
            if value.size != self.size_of_chunk:
                raise ReadError(key, f"a chunk of {value.size} bytes, not {self.size_of_chunk}")
            data = await value.read(run.start * self.itemsize, length)
            if len(data) != length:
                raise ReadError(key, "changes while it is read")
            return data

        return await self._opened(key, read)

    # -- helpers

    def _index(self, number: int) -> tuple[int, ...]:
        """Return the index of a chunk in the array's own order of dimensions."""
        return self._grid.index(number)[:: -1 if self.fortran else 1]

    def _decode(self, key: str, data: Buffer, index: tuple[int, ...]) -> Array:
        try:
            chunk = decode_chunk_at(self._stored, data, index)
        except MetadataError as exc:
            raise ReadError(key, str(exc)) from exc
        chunk = chunk.T if self.fortran else chunk
        if chunk.shape != self._grid.chunks:
            raise ReadError(key, f"a chunk of the shape {chunk.shape}, not {self._grid.chunks}")
        chunk = np.asarray(chunk, order="C")  # copied once here, in a thread, instead of at every read
        return self._finished(chunk)

    def _finished(self, chunk: Array) -> Array:
        """Return a decoded chunk as it is cached."""
        chunk = chunk.reshape(self.shape_of_chunk)
        return chunk.view(self.item) if self.itemsize else chunk

    async def _get_ready(self) -> None:
        """Make the decoder in a thread if a codec runs in a child process, because starting the process takes long."""
        if self._external and not self._ready:
            await trio.to_thread.run_sync(check_codecs, self._stored)
            self._ready = True

    def _check_sizes(self, key: str, stored: int) -> None:
        """Raise ReadError if a chunk does not fit in memory, or cannot have `stored` bytes in the store."""
        self._check_room(key, self._takes)
        try:
            decoder_of(self._stored).check_stored(stored)
        except MetadataError as exc:
            raise ReadError(key, str(exc)) from exc

    def _check_room(self, key: str, size: int) -> None:
        """Raise ReadError for a chunk, or an index, of `size` bytes that does not fit in memory."""
        if size > max(self._cache.max_bytes, quarter()) + KEPT:
            raise ReadError(key, f"a chunk of {size} bytes does not fit in memory")

    async def _opened(self, key: str, read: Callable[[Value], Awaitable[T]]) -> T | None:
        """Open a stored value and return what `read` returns for it; None if it does not exist.

        If the value changes meanwhile, open it again. Raise ReadError.
        """
        for attempt in range(_TRIES):
            try:
                with chunk_errors(key):
                    value = await self._store.open(key)
            except NotFound:
                return None
            try:
                return await read(value)
            except (TargetChanged, TargetMissing, OutOfRange):
                if self._store.immutable or attempt == _TRIES - 1:
                    raise
            except StoreError as exc:  # such as a file that was removed meanwhile
                raise ReadError(key, exc.reason or exc.__class__.__doc__ or "") from exc
            finally:
                value.close()
        raise AssertionError("not reached")

    async def _is_current(self, found: Decoded, id: Hashable, key: str) -> bool:
        """Return whether a cached chunk is of the present version of its stored value; forget it otherwise."""
        if self._store.immutable or found.is_fresh():
            return True

        async def version_of(value: Value) -> Hashable:
            return value.version

        now = trio.current_time()
        version = await self._opened(key, version_of)
        if version is not None and version == found.version:
            found.checked = now
            return True
        if self._cache.peek(id) is found:  # not a newer one, which another reader has fetched meanwhile
            self._cache.discard(id)
        return False

    def _place(self, index: tuple[int, ...]) -> tuple[str, int]:
        """Return the key of the stored value that holds a chunk, and the number of an inner chunk in its shard."""
        at, place = self._sharding.shard(index) if self._sharding else (index, 0)
        return join_key(self.node.chunks, self.array.keys.key(at)), place

    async def _range(self, key: str, value: Value, place: int) -> tuple[int, int] | None:
        """Return (offset, length) of a chunk in its open value; None if it is missing in its shard.

        Raise TargetChanged if the index of the shard is of another version.
        """
        if self._sharding is None:
            return 0, value.size
        id = self._token, key
        found = self._cache.peek(id)
        if found is None or (value.version is None and not found.is_fresh() and not self._store.immutable):
            self._cache.discard(id)
            found = await self._cache.get(id, 0, lambda: self._load_index(key))
        if found.version != (value.size, value.version) and not self._store.immutable:
            self._cache.discard(id)
            raise TargetChanged(key, "changes while it is read")
        try:
            return found.value[place]  # type: ignore[no-any-return]
        except MetadataError as exc:
            raise ReadError(key, str(exc)) from exc

    async def _load_index(self, key: str) -> Decoded:
        sharding, now, length = self._sharding, trio.current_time(), self.index_length
        assert sharding is not None
        self._check_room(key, length)

        async def read(value: Value) -> Decoded:
            try:
                start, _stop = sharding.index_range(value.size)
                index = sharding.read_index(await value.read(start, length), value.size)
            except MetadataError as exc:
                raise ReadError(key, str(exc)) from exc
            return Decoded(index, length + KEPT, (value.size, value.version), now)

        found = await self._opened(key, read)
        if found is None:
            raise TargetMissing(key, "was removed while it is read")
        return found


class ChunkRow(Chunks):
    """The chunks of one array, a chunk after the other as if it had one dimension, with the items beyond its edges.

    A chunk that is longer than the array is cut to it. Items are in C order.
    """

    def __init__(self, store: Store, node: Node, cache: DecodedCache) -> None:
        """`node` is an array in `store`."""
        super().__init__(store, node, cache, c_order=True)
        cut = tuple(map(min, self._grid.chunks, self._grid.shape))
        self._part = tuple(map(slice, cut)) or ...
        self._contiguous = cut[1:] == self._grid.chunks[1:]
        items = math.prod(cut)
        self.shape, self.shape_of_chunk, self.counts = (self.number * items,), (items,), (self.number,)

    @property
    def plain(self) -> bool:
        return self._contiguous and super().plain

    def _finished(self, chunk: Array) -> Array:
        return np.ascontiguousarray(chunk[self._part]).reshape(-1).view(self.item)


def is_fortran(array: ArrayMetadata) -> bool:
    """Return whether chunks are stored in Fortran order, that is, whether the first codec reverses the dimensions."""
    array = inner_array(array) or array
    if array.ndim < 2 or not array.codecs or array.codecs[0].name != "transpose":
        return False
    order = array.codecs[0].configuration.get("order")
    return isinstance(order, list | tuple) and list(order) == list(range(array.ndim))[::-1]
