"""Views whose files are made of text in memory and of the decoded items of arrays.

DecodedView is their base class. Its arrays share a cache of decoded chunks.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import ReadError
from zarrfs.store.api import Info, Store, Value
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import tune_heap
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Node, View

if TYPE_CHECKING:
    from zarrfs.views.flat import FlatArray  # imports numpy, which would delay the start of a mount

_OPEN = 1024  # readers to keep


class Part(NamedTuple):
    """The items of an array in the bytes [start, stop) of a file."""

    start: int
    stop: int
    node: Node
    itemsize: int = 0  # bytes of an item in the file, if they are converted
    convert: Callable[[Any], Any] | None = None


class File(NamedTuple):
    """A file of a view."""

    info: Info
    texts: tuple[tuple[int, bytes], ...]  # (address, bytes), sorted
    parts: tuple[Part, ...]  # sorted
    content: Hashable  # all that is not read from chunks


class DecodedView(View):
    """A view whose files consist of the decoded chunks of arrays, with one bounded cache of decoded chunks."""

    in_chunks = False  # the order of items in files, see FlatArray

    def __init__(self, store: Store, budget: int) -> None:
        """`budget`: bytes of decoded chunks to cache."""
        super().__init__(store)
        self.cache = DecodedCache(budget)
        self._arrays: LRU[str, FlatArray] = LRU(_OPEN)
        tune_heap()

    def opened(self, key: str, file: File) -> Value:
        """Open `file`, which is at `key`."""
        return _OpenFile(self, key, file)

    def reader(self, node: Node) -> FlatArray:
        """Return the reader of an array."""
        from zarrfs.views.flat import FlatArray

        found = self._arrays.use(node.path)
        if found is None or found.chunks.node is not node:
            found = self._arrays.put(node.path, FlatArray(self.lower, node, self.cache, self.in_chunks))
        return found

    @property
    def remote(self) -> bool:
        return False  # the view prefetches chunks along the array, so that read-ahead by file names gains nothing

    async def prefetch(self, keys: Sequence[str]) -> None:
        """Do nothing: FlatArray fetches chunks ahead of sequential readers."""


class _OpenFile(Value):
    """An open file. Its documents are those of its opening; its chunks are looked up at every read."""

    __slots__ = ("_file", "_key", "_view")

    def __init__(self, view: DecodedView, key: str, file: File) -> None:
        super().__init__(file.info, file.content if view.immutable else None)
        self._view, self._key, self._file = view, key, file

    async def read(self, start: int, length: int) -> Buffer:
        parts, stop = self._file.parts, min(start + length, self.size)
        if start >= stop:
            return b""
        at = max(bisect.bisect_right(parts, start, key=operator.itemgetter(0)) - 1, 0)
        if at < len(parts) and parts[at].start <= start and stop <= parts[at].stop:
            return await self._items(parts[at], start, stop)
        out = bytearray(stop - start)  # a file may have holes
        first_text = max(bisect.bisect_right(self._file.texts, start, key=operator.itemgetter(0)) - 1, 0)
        for address, data in self._file.texts[first_text:]:
            if address >= stop:
                break
            first, last = max(address, start), min(address + len(data), stop)
            if first < last:
                out[first - start : last - start] = data[first - address : last - address]
        for part in parts[at:]:
            if part.start >= stop:
                break
            first, last = max(part.start, start), min(part.stop, stop)
            if first < last:
                out[first - start : last - start] = await self._items(part, first, last)
        return out

    async def _items(self, part: Part, start: int, stop: int) -> Buffer:
        """Return the bytes [start, stop) of the file, within a part."""
        node = part.node
        await self._view.hierarchy.check(self._key, node)
        flat, start, stop = self._view.reader(node), start - part.start, stop - part.start
        if part.convert is None:
            return await flat.read(start, stop)
        import numpy as np

        first, last = start // part.itemsize, -(-stop // part.itemsize)
        stored = flat.chunks.itemsize
        items = np.frombuffer(await flat.read(first * stored, last * stored), flat.chunks.array.dtype.numpy())
        try:
            data = part.convert(items)
        except ReadError as exc:
            raise ReadError(node.path, exc.reason) from None
        shown = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        return shown[start - first * part.itemsize : stop - first * part.itemsize]
