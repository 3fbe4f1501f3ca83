"""The decoded chunks of one array: where their bytes are, whether they are there, and whether they have changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import trio

from zarrfs.errors import NotFound, ReadError, StoreError
from zarrfs.store.api import Info, Kind, Store, join_key
from zarrfs.store.links import resolve
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import quarter
from zarrfs.views.boxes import Slices
from zarrfs.views.decoded_cache import Decoded, DecodedCache
from zarrfs.views.hierarchy import Node
from zarrfs.zarr.codecs import ShardIndex, Sharding, decode_chunk, decoder_of, inner_array, sharding_of
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.model import ArrayMetadata

Array = np.ndarray[Any, Any]
T = TypeVar("T")
Version = tuple[int | None, int | None, int | None]  # size, time and identity, as far as the store tells

_BELIEVED = 1.0  # seconds: how long a chunk of a store that may change is used without a look at it
_NOTED = 2048  # stored values: so many are looked at when a file is opened again
KEPT = 1024  # bytes: what it takes to remember a chunk, beside its own; or that it is not there
_tokens = itertools.count()


class Chunks:
    """Chunks by number. Of a sharded array they are the inner chunks.

    All is told in the order of a flat file: of an array whose chunks are stored in Fortran order, that of the array
    transposed, so shape, chunks and numbers have its dimensions reversed. Items are plain bytes of their size, in the
    byte order of the array; those without a size are objects.
    """

    def __init__(self, store: Store, node: Node, cache: DecodedCache) -> None:
        """The chunks of `node`, which is an array in `store`."""
        assert isinstance(node.metadata, ArrayMetadata)
        self.node, self.array = node, node.metadata
        self._store, self._cache = store, cache
        self._sharding = sharding_of(self.array)
        self._stored = self._sharding.inner if self._sharding else self.array  # what one chunk is decoded with
        self.fortran = is_fortran(self.array)
        grid, turn = self._stored.grid, -1 if self.fortran else 1
        self._grid = Grid(grid.shape[::turn], grid.chunks[::turn])  # in the order of the flat file
        self.shape, self.shape_of_chunk, self.counts = self._grid.shape, self._grid.chunks, self._grid.counts
        self.number = self._grid.size
        self.itemsize = self.array.dtype.itemsize
        self.size_of_chunk = self._stored.chunk_bytes  # bytes, decoded
        self.item = np.dtype((np.void, self.itemsize)) if self.itemsize else np.dtype(object)
        self._takes = self.size_of_chunk + KEPT + (self._sharding.index_length if self._sharding else 0)  # to be made
        self._token = next(_tokens)
        self._read: dict[str, Hashable] = {}  # versions of the stored values that were read, where they may change

    @property
    def plain(self) -> bool:
        """Whether chunks are stored as they are decoded, item by item."""
        names = [codec.name for codec in self._stored.codecs[self.fortran :]]
        return names in ([], ["bytes"]) and self._sharding is None

    def id(self, number: int) -> Hashable:
        """What a chunk is called in the cache."""
        return self._token, number

    def key(self, number: int) -> str:
        """The key in the store of the chunk, or of the shard that it is in."""
        index = self._index(number)
        return self._key(self._sharding.shard(index)[0] if self._sharding else index)

    def place(self, number: int) -> tuple[slice, ...]:
        """The part of the array that a chunk has."""
        extents = zip(self._grid.index(number), self.shape_of_chunk, self.shape, strict=True)
        return tuple(slice(at * step, min((at + 1) * step, extent)) for at, step, extent in extents)

    def filled(self, shape: tuple[int, ...]) -> Array:
        """Items of chunks that are not there: the fill value, or zeros where there is none."""
        if self.itemsize:
            fill = self.array.fill
            if fill is None or not any(fill):
                return np.zeros(shape, self.item)
            return np.full(shape, np.frombuffer(fill, self.item)[0], self.item)
        found = np.empty(shape, object)
        found.fill(self.array.fill_object)
        return found

    def kept(self, number: int) -> Decoded | None:
        """The chunk, if it is kept and can be believed without a look at the store."""
        found = self._cache.peek(self.id(number))
        if found is None or self._store.immutable or trio.current_time() - found.checked < _BELIEVED:
            return found
        return None

    def coming(self, number: int) -> bool:
        """Whether the chunk is kept, or about to be."""
        return self._cache.coming(self.id(number))

    async def get(self, number: int) -> Array | None:
        """The chunk, of full chunk shape; None where it is not there. ReadError where it cannot be read or decoded."""
        key = self.key(number)
        found = await self._believed(self.id(number), key)
        if found is None:
            found = await self._cache.get(self.id(number), self._takes, lambda: self.load(number))
        return found.value  # type: ignore[no-any-return]

    async def load(self, number: int) -> Decoded:
        """As get(), fetched and decoded anew."""
        index = self._index(number)
        version: Hashable
        if self._sharding is None:
            key = self._key(index)
            info, now = await self._info(key, sized=False), trio.current_time()
            version = None if info is None or self._store.immutable else _version_of(info)
            data = None
            if info is not None:
                if info.unreadable or info.kind is Kind.DIRECTORY:
                    raise ReadError(key, info.unreadable or "a directory lies in the place of a chunk")
                self._check_sizes(key, info.size)
                data = await _answer(key, self._store.get, key)
        else:
            key, version, data = await self._inner(self._sharding, index)
            now = trio.current_time()
        self._note(key, version)
        if data is None:
            return Decoded(None, KEPT, version, now)
        chunk = await self._cache.run(self.size_of_chunk, self._decode, key, data)
        return Decoded(chunk, chunk.nbytes + KEPT, version, now)

    async def stored(self, number: int, start: int, count: int) -> Buffer | None:
        """Of a plain array: `count` items of a chunk, from `start` on; None where the chunk is not there."""
        key, size = self.key(number), self.size_of_chunk
        self._note(key, await self._version(key))
        data: Buffer | None = await _answer(key, self._store.get, key, start * self.itemsize, count * self.itemsize)
        if data is None:
            return None
        info = await self._info(key)
        if info is None or info.size != size or len(data) != count * self.itemsize:
            raise ReadError(key, f"a chunk of {info and info.size} bytes, not {size}")
        return data

    async def unchanged(self) -> bool:
        """Whether the first stored values that were read are as they were, in a store that may change."""
        try:
            for key, version in list(self._read.items()):
                if await self._version(key) != version:
                    return False
        except ReadError:
            return False
        return True

    # -- parts

    def _index(self, number: int) -> tuple[int, ...]:
        """The index of a chunk in the array's own order of dimensions."""
        return self._grid.index(number)[:: -1 if self.fortran else 1]

    def _key(self, index: tuple[int, ...]) -> str:
        return join_key(self.node.chunks, self.array.keys.key(index))

    def _decode(self, key: str, data: Buffer) -> Array:
        try:
            chunk = decode_chunk(self._stored, data)
        except MetadataError as exc:
            raise ReadError(key, str(exc)) from exc
        chunk = chunk.T if self.fortran else chunk
        if chunk.shape != self.shape_of_chunk:
            raise ReadError(key, f"a chunk of the shape {chunk.shape}, not {self.shape_of_chunk}")
        chunk = np.asarray(chunk, order="C")  # here, in a thread, and not for each read of it
        return chunk.view(self.item) if self.itemsize else chunk

    def _check_sizes(self, key: str, stored: int | None) -> None:
        """ReadError of a chunk that memory would not hold, or that cannot be stored as so many bytes."""
        largest = max(self._cache.largest, quarter())
        if self._takes > largest + KEPT:
            raise ReadError(key, f"a chunk that takes {self._takes} bytes, array_cache is {self._cache.largest}")
        try:
            if stored is not None:
                decoder_of(self._stored).check_stored(stored)
        except MetadataError as exc:
            raise ReadError(key, str(exc)) from exc

    async def _version(self, key: str) -> Version | None:
        """What tells one value of `key` from the next, without asking a server."""
        if self._store.immutable:
            return None
        info = await self._info(key, sized=False)
        return None if info is None else _version_of(info)

    async def _info(self, key: str, sized: bool = True) -> Info | None:
        """The entry of a stored value, or of what it leads to; None where it is not there. ReadError."""
        found = await _answer(key, resolve, self._store, key, sized)
        return None if found is None else found[1]

    def _note(self, key: str, version: Hashable) -> None:
        if not self._store.immutable and len(self._read) < _NOTED:
            self._read.setdefault(key, version)

    async def _believed(self, id: Hashable, key: str) -> Decoded | None:
        """What is kept of `key`, if it is still the same; forgotten if not."""
        found = self._cache.peek(id)
        if found is None or self._store.immutable or trio.current_time() - found.checked < _BELIEVED:
            return found
        now = trio.current_time()
        version = None if found.value is None else await self._version(key)
        # a server that tells no times: only reading it again tells whether it has changed
        if version is not None and version[1] is not None and version == found.version:
            found.checked = now
            return found
        self._cache.drop(id, found)
        return None

    async def _inner(self, sharding: Sharding, index: tuple[int, ...]) -> tuple[str, Hashable, Buffer | None]:
        """(key of the shard, its version, bytes of an inner chunk or None)."""
        at, place = sharding.shard(index)
        key = self._key(at)
        id = self._token, key
        for _ in range(3):
            found = await self._believed(id, key)
            if found is None:
                found = await self._cache.get(id, 0, lambda: self._load_index(sharding, key))
            try:
                run = None if found.value is None else found.value[place]
            except MetadataError as exc:
                raise ReadError(key, str(exc)) from exc
            if run is None:
                return key, found.version, None
            self._check_sizes(key, run[1])
            data = await _answer(key, self._store.get, key, *run)
            if await self._version(key) == found.version:  # else another shard has taken its place
                if data is None or len(data) != run[1]:
                    raise ReadError(key, f"ends before {run[0]} + {run[1]}")
                return key, found.version, data
            self._cache.drop(id, found)
        raise ReadError(key, "changes while it is read")

    async def _load_index(self, sharding: Sharding, key: str) -> Decoded:
        version, now = await self._version(key), trio.current_time()
        info = await self._info(key)
        if info is None:
            return Decoded(None, KEPT, version, now)
        if info.kind is not Kind.FILE:
            raise ReadError(key, "is a directory, not a shard")
        self._check_sizes(key, None)
        size, length = info.size or 0, sharding.index_length
        if size < length:
            raise ReadError(key, f"{size} bytes, shorter than the index of a shard")
        data = await _answer(key, self._store.get, key, size - length if sharding.index_at == "end" else 0, length)
        try:
            index: ShardIndex | None = None if data is None else sharding.read_index(data, size)
        except MetadataError as exc:
            raise ReadError(key, str(exc)) from exc
        return Decoded(index, length + KEPT, version, now)


async def _answer(key: str, ask: Callable[..., Any], *arguments: Any) -> Any:
    """What the store answers about a chunk; None where it is not there. ReadError for every other answer."""
    try:
        return await ask(*arguments)
    except NotFound:
        return None
    except StoreError as exc:  # say, a directory: not the absence of a chunk
        raise ReadError(key, exc.reason or exc.__class__.__doc__ or "") from exc


def _version_of(info: Info) -> Version:
    return info.size, info.mtime_ns, info.identity


def is_fortran(array: ArrayMetadata) -> bool:
    """Whether chunks are stored in Fortran order: the first codec reverses the dimensions."""
    array = inner_array(array) or array
    if array.ndim < 2 or not array.codecs or array.codecs[0].name != "transpose":
        return False
    order = array.codecs[0].configuration.get("order")
    return isinstance(order, list | tuple) and list(order) == list(range(array.ndim))[::-1]


def part_of(array: Array, slices: Slices) -> Array:
    """A part of an array, which is a view of it; of a scalar, too."""
    found: Array = array[(*slices, ...)]  # type: ignore[arg-type]
    return found
