"""UnlistedStore: a Zarr store on a server that lists nothing, or not all: only exact names are sure.

Where nothing is listed, a name is a directory if there is evidence: a redirect to the name with "/",
consolidated metadata at the root that names it, Zarr metadata beneath it, or an array above it whose chunk
keys go through it. Listings then show metadata documents and the nodes that consolidated metadata names;
chunks are there, but not shown. Where only names with a dot are hidden (nginx and Apache do that), listings
are completed by the metadata documents with such names.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Container, Sequence
from typing import Any, NamedTuple

import trio

from zarrfs.errors import AccessDenied, IsDirectory, NotDirectory, NotFound, TargetMissing
from zarrfs.store.api import Buffer, Info, Kind, Usage, check_key, join_key, split_key
from zarrfs.store.remote import FsspecStore
from zarrfs.transfer.tasks import at_once

# Per generation of Zarr: documents that make a node, and those that may lie beside them.
NODE_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", "__zmeta__", "meta")
_OTHER_DOCUMENTS = (".zattrs", ".zmetadata", "__zattr__", "attrs")
DOCUMENTS = (*NODE_DOCUMENTS, *_OTHER_DOCUMENTS)
_DOCUMENT_MAX = 256 << 20  # bytes
_FRESH = 10.0  # seconds for which it is believed what a name is
_KNOWN = 16_384  # names whose nature is remembered
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)


class Node(NamedTuple):
    """An array or group, as far as it takes to tell the directories of its chunks."""

    array: bool
    rank: int = 0  # dimensions
    head: str = ""  # first part of all chunk keys: c or __zdata__
    nested: bool = False  # chunk keys have a part for each dimension


def read_node(name: str, data: bytes) -> Node | None:
    """The node that a metadata document makes; None for what is no such document."""
    if name == "__zmeta__" and data[:1] != b"{":
        # a pickle of the first releases; what it says is not needed here
        return Node(True, head="__zdata__") if data.rstrip().endswith(b".") and b"S'" in data else None
    document = _json(data)
    if document is None:
        return None
    try:
        return _node(name, document)
    except (TypeError, KeyError):
        return None


def consolidated_nodes(name: str, data: bytes) -> set[str] | None:
    """The nodes, and the groups above them, that a document of consolidated metadata names; None: it is none."""
    document = _json(data) or {}
    if name == "zarr.json":
        document = document.get("consolidated_metadata") or {}
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        return None
    found = {""}
    for key in metadata:
        node = key if name == "zarr.json" else split_key(key)[0]
        while node not in found:
            found.add(node)
            node = split_key(node)[0]
    return found


class UnlistedStore:
    """See the module; `lists`: whether the server lists. Errors are those of the FsspecStore beneath."""

    def __init__(self, store: FsspecStore, lists: bool = False) -> None:
        self.immutable = store.immutable
        self._store, self._lists = store, lists
        self._nodes: OrderedDict[str, tuple[float, Node | None]] = OrderedDict()
        self._named: set[str] | None = None
        self._lock = trio.Lock()

    async def info(self, key: str, sized: bool = True) -> Info:
        check_key(key, root=True)
        try:
            return await self._store.info(key)
        except (NotFound, AccessDenied):  # some object stores answer 403 for what is not there
            if not await self._is_directory(key):
                raise
        return Info(split_key(key)[1], Kind.DIRECTORY)

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        try:
            return await self._store.get(key, start, length)
        except NotFound:
            if not await self._is_directory(key):
                raise
        raise IsDirectory(key)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        if (await self.info(prefix)).kind is not Kind.DIRECTORY:
            raise NotDirectory(prefix)
        found = {info.name: info for info in await self._shown(prefix)}
        if not self._lists:
            for key in await self._consolidated():
                parent, name = split_key(key)
                if key and parent == prefix:
                    found[name] = Info(name, Kind.DIRECTORY)
        for info in await self._documents(prefix, found):
            found[info.name] = info
        for name in sorted(found):
            if name > after:
                yield found[name]

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for info in self.list_dir(prefix):
            key = join_key(prefix, info.name)
            if info.kind is Kind.DIRECTORY:
                async for below in self.list_prefix(key):
                    yield below
            else:
                yield key

    remote = True

    async def get_ready(self) -> None:
        """As PrefetchStore.get_ready."""
        await self._store.get_ready()

    async def prefetch(self, keys: Sequence[str]) -> None:
        """As PrefetchStore.prefetch."""
        await self._store.prefetch(keys)

    async def locate(self, key: str) -> dict[str, Any]:
        try:
            return await self._store.locate(key)
        except NotFound:
            if not await self._is_directory(key):
                raise
        return {}

    async def usage(self) -> Usage:
        return await self._store.usage()

    def stats(self) -> dict[str, Any]:
        """Counters, for the log."""
        return self._store.stats()

    async def aclose(self) -> None:
        await self._store.aclose()

    # -- evidence

    async def _is_directory(self, key: str) -> bool:
        name = split_key(key)[1]
        if self._lists:
            return not key
        if not key or key in await self._consolidated():
            return True
        if name in DOCUMENTS:
            return False
        parts = key.split("/")
        for depth in range(len(parts)):  # from the root down: nothing but chunks lies below an array
            node = await self._node("/".join(parts[:depth]))
            if node is not None and node.array:
                return _leads_to_chunks(node, parts[depth:])
        return await self._node(key) is not None

    async def _in_array(self, key: str) -> bool:
        """Whether `key` is a directory of chunks."""
        parts = key.split("/") if key else []
        for depth in range(len(parts)):
            node = await self._node("/".join(parts[:depth]))
            if node is not None and node.array:
                return True
        return False

    async def _shown(self, prefix: str) -> list[Info]:
        """What the server lists after all: some hide only names with a dot."""
        try:
            return await self._store.listed(prefix) or []
        except (NotFound, NotDirectory, TargetMissing, AccessDenied):
            if self._lists:
                raise
            return []

    async def _documents(self, prefix: str, shown: Container[str]) -> list[Info]:
        """The metadata documents of a directory that the server does not show."""
        names = [name for name in DOCUMENTS if name not in shown and (not self._lists or name[0] == ".")]
        if (self._lists and "zarr.json" in shown) or await self._in_array(prefix):
            return []
        found: list[Info] = []

        async def look(name: str) -> None:
            try:
                info = await self._store.info(join_key(prefix, name))
            except (NotFound, AccessDenied):
                return
            if info.kind is Kind.FILE:
                found.append(info)

        await at_once(look, names)
        return found

    async def _node(self, key: str) -> Node | None:
        """The node at `key`, from the documents beneath it."""
        known = self._nodes.get(key)
        if known is not None and known[0] > trio.current_time():
            return known[1]
        found: dict[str, Node] = {}

        async def look(name: str) -> None:
            data = await self._document(join_key(key, name))
            node = None if data is None else read_node(name, data)
            if node is not None:
                found[name] = node

        await at_once(look, NODE_DOCUMENTS)
        node = next((found[name] for name in NODE_DOCUMENTS if name in found), None)
        self._nodes[key] = trio.current_time() + _FRESH, node
        self._nodes.move_to_end(key)
        if len(self._nodes) > _KNOWN:
            self._nodes.popitem(last=False)
        return node

    async def _consolidated(self) -> set[str]:
        """The nodes that consolidated metadata at the root names, read once."""
        async with self._lock:
            if self._named is None:
                self._named = set()
                for name in ("zarr.json", ".zmetadata"):
                    data = await self._document(name)
                    self._named |= (data and consolidated_nodes(name, data)) or set()
        return self._named

    async def _document(self, key: str) -> bytes | None:
        try:
            return bytes(await self._store.get(key, 0, _DOCUMENT_MAX))
        except (NotFound, AccessDenied, IsDirectory):
            return None


def _node(name: str, document: dict[str, Any]) -> Node | None:
    if name == "zarr.json":
        if document["node_type"] == "group":
            return Node(False)
        encoding = document.get("chunk_key_encoding") or {}
        default = encoding.get("name", "default") == "default"
        separator = (encoding.get("configuration") or {}).get("separator", "/" if default else ".")
        return Node(True, len(document["shape"]), "c" if default else "", separator == "/")
    if name == ".zgroup":
        return Node(False) if "zarr_format" in document else None
    rank = len(document["shape"])
    if name == ".zarray":
        # old stores nest their chunks without saying so
        return Node(True, rank, nested=document.get("dimension_separator", "/") == "/")
    return Node(True, rank, "__zdata__" if name == "__zmeta__" else "") if "chunks" in document else None


def _leads_to_chunks(node: Node, parts: list[str]) -> bool:
    """Whether chunk keys of the array go through the directory `parts` below it."""
    if node.head:
        if parts[0] != node.head:
            return False
        parts = parts[1:]
        if not parts:
            return node.head == "__zdata__" or (node.nested and node.rank > 0)
    if not node.nested or len(parts) >= node.rank:
        return False
    return all(_NUMBER.fullmatch(part) for part in parts)


def _json(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
