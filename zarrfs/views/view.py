"""View: a store that shows the hierarchy of another one. A view is a rule for names; its files are made of parts.

The parts of a file are text in memory and the decoded items of arrays, with one cache of decoded chunks for a view.
"""

from __future__ import annotations

import abc
import bisect
import logging
import operator
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import IsDirectory, ReadError
from zarrfs.store.api import Info, Kind, Store, Value, WrappingStore, split_key
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import tune_heap
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Hierarchy, Node

if TYPE_CHECKING:
    from zarrfs.views.flat import FlatArray  # imports numpy, which would delay the start of a mount

log = logging.getLogger(__name__)

_OPEN = 1024  # readers to keep


class Part(NamedTuple):
    """The bytes [start, stop) of a file: text, or the items of an array."""

    start: int
    stop: int
    source: bytes | Node
    dtype: str | None = None  # numpy's, of an item in the file, if it is converted


class File(NamedTuple):
    """A file of a view. Its mode and its time are those of `node`; if that has a problem, it is unreadable."""

    node: Node
    size: int
    parts: tuple[Part, ...]  # sorted, with holes

    @property
    def content(self) -> Hashable:
        """The part of the file that is known without reading chunks."""
        return self.size, tuple(part[:3] for part in self.parts if isinstance(part.source, bytes))


def text_part(start: int, text: bytes) -> Part:
    """Return a part that is text."""
    return Part(start, start + len(text), text)


def text_file(node: Node, text: bytes) -> File:
    """Return a file of text."""
    return File(node, len(text), (text_part(0, text),))


class View(WrappingStore):
    """A store that shows the hierarchy of another one. Nodes that it cannot show are left out, with one warning.

    Links of the store are followed. Documents are those of the first look; see Hierarchy.
    """

    name = ""  # of the option view=
    in_chunks = False  # the order of items in files, see FlatArray

    def __init__(self, store: Store, budget: int) -> None:
        """`budget`: bytes of decoded chunks to cache."""
        self.hierarchy = Hierarchy(store)
        super().__init__(self.hierarchy.store)
        self.cache = DecodedCache(budget)
        self._readers: LRU[str, FlatArray] = LRU(_OPEN)
        self._left_out: dict[str, str] = {}

    @abc.abstractmethod
    async def find(self, key: str) -> File | Node:
        """Return the file at `key`, or the node whose directory it is. Raise NotFound and ReadError."""

    async def info(self, key: str, sized: bool = True) -> Info:
        return self.entry(split_key(key)[1], await self.find(key))

    async def open(self, key: str) -> Value:
        file = await self.find(key)
        if not isinstance(file, File):
            raise IsDirectory(key)
        self.check_document(file.node)
        return _OpenFile(self, key, self.entry(split_key(key)[1], file), file)

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        found = await self.find(key)
        return {"documents": list((found.node if isinstance(found, File) else found).documents)}

    def entry(self, name: str, found: File | Node) -> Info:
        """Return the entry of a file or a directory."""
        if isinstance(found, Node):
            return Info(name, Kind.DIRECTORY, mtime_ns=found.mtime_ns)
        node = found.node
        if node.problem is not None:
            return Info(name, Kind.FILE, 1, mtime_ns=node.mtime_ns, unreadable=node.problem)
        mode = None if node.mode is None else node.mode & 0o666
        identity = None if self.immutable else hash(found.content)  # another layout must not share cached pages
        return Info(name, Kind.FILE, found.size, mode, node.mtime_ns, identity=identity)

    def check_document(self, node: Node) -> None:
        """Raise ReadError, about the document in the source, if a node has a problem."""
        if node.problem is not None:
            raise ReadError((*node.documents, node.path)[0] or "/", node.problem)  # perhaps its document was removed

    def reader(self, node: Node) -> FlatArray:
        """Return the reader of an array."""
        from zarrfs.views.flat import FlatArray

        if not self._readers:
            tune_heap()
        found = self._readers.use(node.path)
        if found is None or found.chunks.node is not node:
            found = self._readers.put(node.path, FlatArray(self.lower, node, self.cache, self.in_chunks))
        return found

    def leave_out(self, path: str, reason: str) -> None:
        """Record that a node is left out, and log why."""
        if self._left_out.get(path) != reason:
            self._left_out[path] = reason
            log.warning("%s: left out of view=%s: %s", path or "/", self.name, reason)

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why arrays at or below `key` are left out, by path, of those looked up so far."""
        return {path: why for path, why in self._left_out.items() if not key or f"{path}/".startswith(f"{key}/")}

    @property
    def remote(self) -> bool:
        return False  # FlatArray fetches chunks ahead along the array, so that read-ahead by file names gains nothing


class _OpenFile(Value):
    """An open file. Its documents are those of its opening; its chunks are looked up at every read."""

    __slots__ = ("_file", "_key", "_view")

    def __init__(self, view: View, key: str, info: Info, file: File) -> None:
        fixed = all(isinstance(part.source, bytes) for part in file.parts)
        super().__init__(info, file.content if view.immutable or fixed else None)
        self._view, self._key, self._file = view, key, file

    async def read(self, start: int, length: int) -> Buffer:
        parts, stop = self._file.parts, min(start + length, self.size)
        out: bytearray | None = None
        for at in range(max(bisect.bisect_right(parts, start, key=operator.itemgetter(0)) - 1, 0), len(parts)):
            part = parts[at]
            if part.start >= stop:
                break
            first, last = max(part.start, start), min(part.stop, stop)
            if first < last:
                data = await self._bytes(part, first - part.start, last - part.start)
                if last - first == stop - start:
                    return data
                out = out or bytearray(stop - start)
                out[first - start : last - start] = data
        return out or bytes(max(stop - start, 0))

    async def _bytes(self, part: Part, start: int, stop: int) -> Buffer:
        """Return the bytes [start, stop) of a part."""
        node = part.source
        if isinstance(node, bytes):
            return node[start:stop]
        await self._view.hierarchy.check(self._key, node)
        flat = self._view.reader(node)
        if part.dtype is None:
            return await flat.read(start, stop)
        import numpy as np

        shown, stored = np.dtype(part.dtype).itemsize, flat.chunks.itemsize
        first, last = start // shown, -(-stop // shown)
        items = np.frombuffer(await flat.read(first * stored, last * stored), flat.chunks.array.dtype.numpy)
        return items.astype(part.dtype).view(np.uint8).data[start - first * shown : stop - first * shown]
