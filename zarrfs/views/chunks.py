"""The decoded chunks of one array: found by number, fetched, decoded, cached, and checked for changes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import trio

from zarrfs.errors import IsDirectory, NotFound, OutOfRange, ReadError, StoreError, TargetChanged, TargetMissing
from zarrfs.store.api import Info, Store, Value, join_key
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import quarter
from zarrfs.views.boxes import Slices
from zarrfs.views.decoded_cache import Decoded, DecodedCache
from zarrfs.views.hierarchy import Node
from zarrfs.zarr.codecs import (
    Sharding,
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
ChunkVersion = tuple[int | None, int | None, int | None]  # size, mtime and identity, as far as the store knows them

_SLOW = 1 << 62  # bytes; a size for which DecodedCache.run() always uses a thread
_TRIES = 3  # attempts to read a chunk or shard that is not replaced meanwhile
_CHANGES = "changes while it is read"
_EMPTY = {"T": "", "B": b""}  # items without a fill value, by kind of dtype
KEPT = 1024  # bytes: the overhead of a cached chunk, and the size of a missing one
_tokens = itertools.count()


class StoredAt(NamedTuple):
    """A range of a file."""

    key: str  # of the file
    info: Info  # of the file; its size may not be known
    offset: int
    length: int


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
        self.shape, self.shape_of_chunk, self.counts = self._grid.shape, self._grid.chunks, self._grid.counts
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
        index = self._index(number)
        return self._key(self._sharding.shard(index)[0] if self._sharding else index)

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
        """Return the chunk if it is cached and so fresh that it may be used without a request to the store."""
        found = self._cache.peek(self.id(number))
        if found is None or self._store.immutable:
            return found
        return found if found.is_fresh() else None

    def coming(self, number: int) -> bool:
        """Return whether the chunk is cached or being decoded."""
        return self._cache.has(self.id(number))

    async def get(self, number: int) -> Array | None:
        """Return the chunk in full chunk shape; None if missing. Raise ReadError if it cannot be read or decoded."""
        found = await self._fresh(self.id(number), self.key(number))
        if found is None:
            found = await self._cache.get(self.id(number), self._takes, lambda: self.load(number))
        return found.value  # type: ignore[no-any-return]

    async def stored_at(self, index: tuple[int, ...]) -> StoredAt | None:
        """Return where an inner chunk is stored, by the index of its shard; None if missing. Raise ReadError."""
        assert self._sharding is not None
        key, place = self._place(self._sharding, index)
        for _ in range(_TRIES):
            found = await self._index_of(self._sharding, key)
            run = _run_of(found, key, place)
            if run is None:
                return None
            shard = await _ask(key, self._store.info, key, False)
            if shard is not None and (self._store.immutable or self._version_in(shard) == found.version):
                return StoredAt(key, shard, *run)
            self._cache.discard((self._token, key))
        raise ReadError(key, _CHANGES)

    async def load(self, number: int) -> Decoded:
        """Fetch and decode a chunk, bypassing the cache."""
        index = self._index(number)
        await self._get_ready()
        now = trio.current_time()
        key, version, data = await self._fetched(index)
        if data is None:
            return Decoded(None, KEPT, version, now)
        work = self.size_of_chunk if self.itemsize and not self._external else _SLOW
        chunk = await self._cache.run(work, self._decode, key, data, index)
        return Decoded(chunk, chunk.nbytes + KEPT, version, now)

    async def stored(self, number: int, runs: Sequence[tuple[int, int]]) -> list[Buffer] | None:
        """Read runs of items, (start, count), of one version of a chunk of a plain array; None if it is missing."""
        key = self.key(number)

        async def read(value: Value) -> list[Buffer]:
            if value.size != self.size_of_chunk:
                raise ReadError(key, f"a chunk of {value.size} bytes, not {self.size_of_chunk}")
            found = [await value.read(start * self.itemsize, count * self.itemsize) for start, count in runs]
            if any(len(data) != count * self.itemsize for data, (_, count) in zip(found, runs, strict=True)):
                raise ReadError(key, _CHANGES)
            return found

        return await self._opened(key, read)

    # -- helpers

    def _index(self, number: int) -> tuple[int, ...]:
        """Return the index of a chunk in the array's own order of dimensions."""
        return self._grid.index(number)[:: -1 if self.fortran else 1]

    def _key(self, index: tuple[int, ...]) -> str:
        return join_key(self.node.chunks, self.array.keys.key(index))

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
        return chunk.view(self.item) if self.itemsize else chunk

    async def _get_ready(self) -> None:
        """Make the decoder in a thread if a codec runs in a child process, because starting the process takes long."""
        if self._external and not self._ready:
            await trio.to_thread.run_sync(check_codecs, self._stored)
            self._ready = True

    def _check_sizes(self, key: str, stored: int | None) -> None:
        """Raise ReadError if a chunk does not fit in memory, or cannot have `stored` bytes in the store."""
        self._check_room(key, self._takes)
        try:
            if stored is not None:
                decoder_of(self._stored).check_stored(stored)
        except MetadataError as exc:
            raise ReadError(key, str(exc)) from exc

    def _check_room(self, key: str, size: int) -> None:
        """Raise ReadError for a chunk, or an index, of `size` bytes that does not fit in memory."""
        if size > max(self._cache.max_bytes, quarter()) + KEPT:
            raise ReadError(key, f"a chunk of {size} bytes does not fit in memory")

    def _version_in(self, info: Info) -> ChunkVersion | None:
        return None if self._store.immutable else (info.size, info.mtime_ns, info.identity)

    async def _opened(self, key: str, read: Callable[[Value], Awaitable[T]]) -> T | None:
        """Open a stored value and return what `read` returns for it; None if it does not exist.

        If the value changes meanwhile, open it again. Raise ReadError.
        """
        for attempt in range(_TRIES):
            value: Value | None = await _ask(key, self._store.open, key)
            if value is None:
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

    async def _fresh(self, id: Hashable, key: str) -> Decoded | None:
        """Return the cached value of `key` if its version is still current; drop it otherwise."""
        found = self._cache.peek(id)
        if found is None or self._store.immutable or found.is_fresh():
            return found
        now = trio.current_time()
        info = None if found.value is None else await _ask(key, self._store.info, key, False)
        version = None if info is None else self._version_in(info)
        # without a modification time, a change is noticed only if the value is read again
        if version is not None and version[1] is not None and version == found.version:
            found.checked = now
            return found
        self._cache.discard(id)
        return None

    async def _index_of(self, sharding: Sharding, key: str) -> Decoded:
        """Return the index of a shard, from the cache if it is still valid."""
        id = self._token, key
        found = await self._fresh(id, key)
        return found or await self._cache.get(id, 0, lambda: self._load_index(sharding, key))

    async def _fetched(self, index: tuple[int, ...]) -> tuple[str, Hashable, Buffer | None]:
        """Return (key, version, bytes) of a stored chunk, or of an inner chunk. If it is missing, bytes are None."""
        sharding = self._sharding
        key, place = (self._key(index), 0) if sharding is None else self._place(sharding, index)

        async def whole(value: Value) -> tuple[str, Hashable, Buffer]:
            self._check_sizes(key, value.size)
            return key, self._version_in(value.info), await value.read(0, value.size)

        if sharding is None:
            return await self._opened(key, whole) or (key, None, None)
        for _ in range(_TRIES):
            found = await self._index_of(sharding, key)
            run = _run_of(found, key, place)
            if run is None:
                return key, found.version, None
            self._check_sizes(key, run[1])
            data = await self._opened(key, functools.partial(self._range, found.version, run))
            if data is not None:
                if len(data) != run[1]:
                    raise ReadError(key, f"ends before {run[0]} + {run[1]}")
                return key, found.version, data
            self._cache.discard((self._token, key))
        raise ReadError(key, _CHANGES)

    async def _range(self, version: Hashable, run: tuple[int, int], value: Value) -> Buffer | None:
        """Read (offset, length) of a value; return None if it has another version."""
        return await value.read(*run) if self._version_in(value.info) == version else None

    def _place(self, sharding: Sharding, index: tuple[int, ...]) -> tuple[str, int]:
        """Return (key of the shard, number in it) of an inner chunk."""
        at, place = sharding.shard(index)
        return self._key(at), place

    async def _load_index(self, sharding: Sharding, key: str) -> Decoded:
        now, length = trio.current_time(), sharding.index_length
        self._check_room(key, length)

        async def read(value: Value) -> Decoded:
            try:
                start, _stop = sharding.index_range(value.size)
                index = sharding.read_index(await value.read(start, length), value.size)
            except MetadataError as exc:
                raise ReadError(key, str(exc)) from exc
            return Decoded(index, length + KEPT, self._version_in(value.info), now)

        return await self._opened(key, read) or Decoded(None, KEPT, None, now)


class ChunkRow(Chunks):
    """The chunks of one array, a chunk after the other as if it had one dimension, with the items beyond its edges.

    A chunk that is longer than the array is cut to it. Items are in C order.
    """

    def __init__(self, store: Store, node: Node, cache: DecodedCache) -> None:
        """`node` is an array in `store`."""
        super().__init__(store, node, cache, c_order=True)
        cut = tuple(map(min, self._grid.chunks, self._grid.shape))
        self._part = tuple(map(slice, cut))
        self._contiguous = cut[1:] == self._grid.chunks[1:]
        items = math.prod(cut)
        self.shape, self.shape_of_chunk, self.counts = (self.number * items,), (items,), (self.number,)

    @property
    def plain(self) -> bool:
        return self._contiguous and super().plain

    def _finished(self, chunk: Array) -> Array:
        return np.ascontiguousarray(part_of(chunk, self._part)).reshape(-1).view(self.item)


async def _ask(key: str, ask: Callable[..., Any], *arguments: Any) -> Any:
    """Call `ask` for a chunk; return None if the chunk does not exist. Raise ReadError for any other StoreError."""
    try:
        return await ask(*arguments)
    except NotFound:
        return None
    except IsDirectory as exc:
        raise ReadError(key, "a directory lies in the place of a chunk") from exc
    except StoreError as exc:  # for example a file above it, which must not be taken for a missing chunk
        raise ReadError(key, exc.reason or exc.__class__.__doc__ or "") from exc


def _run_of(index: Decoded, key: str, place: int) -> tuple[int, int] | None:
    """Return offset and length of an inner chunk in its shard; None if it is missing. Raise ReadError."""
    try:
        return None if index.value is None else index.value[place]
    except MetadataError as exc:
        raise ReadError(key, str(exc)) from exc


def is_fortran(array: ArrayMetadata) -> bool:
    """Return whether chunks are stored in Fortran order, that is, whether the first codec reverses the dimensions."""
    array = inner_array(array) or array
    if array.ndim < 2 or not array.codecs or array.codecs[0].name != "transpose":
        return False
    order = array.codecs[0].configuration.get("order")
    return isinstance(order, list | tuple) and list(order) == list(range(array.ndim))[::-1]


def part_of(array: Array, slices: Slices) -> Array:
    """Return a view of a part of an array, also of a scalar."""
    found: Array = array[(*slices, ...)]  # type: ignore[arg-type]
    return found
