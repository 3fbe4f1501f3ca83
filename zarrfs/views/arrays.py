"""-o view=arrays: groups of any Zarr generation as directories, each array as one flat file.

The array `x` of a group appears as `x.npy`, with its attributes in `x.json`; with -o arrays=raw it appears as `x.bin`,
and `x.json` also describes its contents. The attributes of the group are in `.attributes.json`. An array at the root
of the store is named `array`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Hashable
from typing import Any, NamedTuple

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, TargetChanged
from zarrfs.store.api import (
    Info,
    Kind,
    Store,
    Value,
    check_key,
    join_key,
    name_rule,
    split_key,
)
from zarrfs.system.buffers import Buffer
from zarrfs.views.flat_arrays import DecodedView, FlatArrays
from zarrfs.views.hierarchy import Hierarchy, Node
from zarrfs.zarr.dtypes import as_v2
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import ArrayMetadata

log = logging.getLogger(__name__)

ATTRIBUTES = ".attributes.json"  # of a group
ROOT = "array"  # the name of an array at the root of its store
_FRESH = 1.0  # seconds for which entries of a mutable store are cached
_ENTRIES = 16_384  # files and directories to remember
_AT_ONCE = 64  # nodes to look up concurrently


class _ViewEntry(NamedTuple):
    """A file or a directory of the view."""

    node: Node  # an array; or a group, for its directory or attributes
    text: bytes | None = None  # JSON, or the header before the items; None: a directory
    items: int | None = None  # size of the array's items after the text, in bytes

    @property
    def size(self) -> int:
        """The size of a file in bytes."""
        return len(self.text or b"") + (self.items or 0)

    @property
    def layout(self) -> Hashable:
        """The header, size, shape, data type and order, which must not change while the file is open."""
        from zarrfs.views.chunks import is_fortran

        array = self.node.metadata
        if self.items is None or not isinstance(array, ArrayMetadata):
            return self.text
        return self.text, self.items, array.shape, array.dtype, is_fortran(array)


class ArraysView(DecodedView):
    """A store of flat files. Arrays that no file can represent are left out with a warning."""

    def __init__(self, store: Store, raw: bool, budget: int) -> None:
        """`raw`: files without headers; `budget`: bytes of decoded chunks to cache."""
        super().__init__(store, FlatArrays(store, budget))
        self._raw = raw
        self._suffixes = (".bin", ".json") if raw else (".json", ".npy")
        self._hierarchy = Hierarchy(store)
        self._entries: LRU[str, tuple[float, _ViewEntry]] = LRU(_ENTRIES)  # with the time of the lookup
        self._left_out: dict[str, str] = {}

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        return self._info(split_key(key)[1], await self._find(key))

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        entry = await self._find(prefix)
        if entry.text is not None:
            raise NotDirectory(prefix)
        names = [] if entry.node.leaf else [info.name async for info in self._hierarchy.children(entry.node)]
        taken = {name for name in names if name.endswith(self._suffixes)}
        # an entry has the name of its child, perhaps with a suffix: it may follow `after` if that starts with the name
        names = sorted(name for name in names if name >= after or after.startswith(name))
        ahead = {name: self._info(name, file) for name, file in self._own_files(entry.node)}
        for start in range(0, len(names), _AT_ONCE):
            batch = names[start : start + _AT_ONCE]
            for name in sorted(name for name in ahead if name < batch[0]):
                info = ahead.pop(name)
                if name > after:
                    yield info

            async def look(name: str) -> None:
                ahead.update((info.name, info) for info in await self._entries_of(entry.node, name, taken))

            await for_each(look, batch)
        for name in sorted(ahead):
            if name > after:
                yield ahead[name]

    async def open(self, key: str) -> Value:
        entry = await self._find(key)
        if entry.text is None:
            raise IsDirectory(key)
        info = self._info(split_key(key)[1], entry)
        return _ArrayValue(self, key, entry, info, entry.layout if self.immutable else None)

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        return await self._read(key, await self._find(key), start, length)

    async def read_opened(self, key: str, opened: _ViewEntry, start: int, length: int) -> Buffer:
        """Return bytes of a file that was opened as `opened`. Raise TargetChanged if its layout has changed."""
        entry = await self._find(key)
        if entry.node is not opened.node and entry.layout != opened.layout:
            raise TargetChanged(key, "has changed since it was opened")
        return await self._read(key, entry, start, length)

    async def _read(self, key: str, entry: _ViewEntry, start: int, length: int | None) -> Buffer:
        if entry.text is None:
            raise IsDirectory(key)
        stop = entry.size if length is None else min(entry.size, start + length)
        text, begin = entry.text, len(entry.text)
        if not entry.items or stop <= begin:
            return text[start:stop]
        if start >= stop:
            return b""
        items = await self._arrays.reader(entry.node).read(max(start - begin, 0), stop - begin)
        return items if start >= begin else b"".join((text[start:], items))

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        entry = await self._find(key)
        return {"node": entry.node.path, "documents": list(entry.node.documents)}

    # -- left out arrays

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why arrays at or below `key` are left out, by path, of those looked up so far."""
        return {path: why for path, why in self._left_out.items() if not key or f"{path}/".startswith(f"{key}/")}

    # -- keys

    async def _find(self, key: str) -> _ViewEntry:
        """Return the entry of `key`. Raise NotFound."""
        known = self._entries.get(key)
        now = trio.current_time()
        if known is not None and (self.immutable or now - known[0] < _FRESH):
            return known[1]
        entry = await self._look_up(check_key(key, root=True))
        self._entries.put(key, (now, entry))
        return entry

    async def _look_up(self, key: str) -> _ViewEntry:
        prefix, name = split_key(key)
        group, rest = await self._hierarchy.find(prefix)
        if not key:
            return _ViewEntry(group)
        if rest or (group.leaf and prefix):
            raise NotFound(key)
        found = dict(self._own_files(group)).get(name)
        if not group.leaf:
            child = await self._hierarchy.node(key)
            if child is not None and not child.leaf:
                return _ViewEntry(child)
            base, dot, suffix = name.rpartition(".")
            if found is None and base and dot + suffix in self._suffixes:
                array = await self._hierarchy.node(join_key(prefix, base))
                found = self._file(array, dot + suffix) if array is not None and array.leaf else None
        if found is None:
            raise NotFound(key)
        return found

    def _own_files(self, group: Node) -> list[tuple[str, _ViewEntry]]:
        """Return the files of a directory that are not of a child: those of a root array, or a group's attributes."""
        if group.leaf:
            made = [(ROOT + suffix, self._file(group, suffix)) for suffix in self._suffixes]
            return [(name, file) for name, file in made if file is not None]
        attributes = group.metadata.attributes if group.metadata is not None else {}
        if group.problem is not None:
            self._leave_out(group, group.problem)
        try:
            return [(ATTRIBUTES, _ViewEntry(group, _json(dict(attributes))))] if attributes else []
        except MetadataError as exc:
            self._leave_out(group, f"{ATTRIBUTES}: {exc}")
            return []

    async def _entries_of(self, group: Node, name: str, taken: set[str]) -> list[Info]:
        """Return the entries of the child `name` of a group; `taken`: names of children that its files might have."""
        path = join_key(group.path, name)
        node = await self._hierarchy.node(path)
        if node is None:
            return []
        if not node.leaf:
            return [self._info(name, _ViewEntry(node))]
        found = []
        for suffix in self._suffixes:
            file, called = self._file(node, suffix), name + suffix
            other = await self._hierarchy.node(path + suffix) if called in taken else None
            rule = name_rule(called)
            if file is None or rule is not None or called == ATTRIBUTES or (other is not None and not other.leaf):
                if file is not None:
                    self._leave_out(node, f"{suffix}: {rule or 'a group has that name'}")
                continue
            found.append(self._info(called, file))
        return found

    # -- files

    def _file(self, node: Node, suffix: str) -> _ViewEntry | None:
        """Return the file of an array; None if no file can represent it."""
        from zarrfs.views.chunks import is_fortran
        from zarrfs.views.flat import flat_size, npy_header

        array = node.metadata
        try:
            if not isinstance(array, ArrayMetadata):
                raise MetadataError(node.problem or "no array")  # noqa: TRY301
            size, fortran = flat_size(array), is_fortran(array)
            header = b"" if self._raw else npy_header(array.shape, array.dtype, fortran)
            if suffix == ".json":
                return _ViewEntry(node, _json(_description(array, fortran) if self._raw else dict(array.attributes)))
        except MetadataError as exc:
            self._leave_out(node, str(exc))
            return None
        return _ViewEntry(node, header, size)

    def _leave_out(self, node: Node, reason: str) -> None:
        if self._left_out.get(node.path) != reason:
            self._left_out[node.path] = reason
            log.warning("%s: left out of view=arrays: %s", node.path or "/", reason)

    def _info(self, name: str, entry: _ViewEntry) -> Info:
        node = entry.node
        if entry.text is None:
            return Info(name, Kind.DIRECTORY, mtime_ns=node.mtime_ns)
        identity = None if self.immutable else hash(entry.layout)  # another layout must not share cached pages
        return Info(name, Kind.FILE, entry.size, node.mode, node.mtime_ns, identity=identity)


class _ArrayValue(Value):
    """An open flat file of the view.

    Its layout is pinned: a read raises TargetChanged if the layout has changed. Its chunks are not: they are looked up
    at every read, and change with the source.
    """

    __slots__ = ("_entry", "_key", "_view")

    def __init__(self, view: ArraysView, key: str, entry: _ViewEntry, info: Info, version: Hashable | None) -> None:
        super().__init__(info, version)
        self._view, self._key, self._entry = view, key, entry

    async def read(self, start: int, length: int) -> Buffer:
        return await self._view.read_opened(self._key, self._entry, start, length)


def _description(array: ArrayMetadata, fortran: bool) -> JSON:
    """Describe the contents of a file without a header."""
    return {
        "shape": list(array.shape), "dtype": as_v2(array.dtype), "order": "F" if fortran else "C",
        "attributes": dict(array.attributes),
    }  # fmt: skip


def _json(value: JSON) -> bytes:
    """Encode as JSON. NaN is written as NaN, as in the source."""
    try:
        return json.dumps(value, indent=2).encode()
    except RecursionError:  # since Python 3.12, json parses more levels than it writes
        raise MetadataError("JSON too deep") from None
