"""UnlistedStore: a Zarr store on a server, with as few requests as the rules of Zarr allow.

Below an array, directories are inferred from the keys of its chunks, and there are no metadata documents. Nodes in
consolidated metadata need no requests. A lookup of a document, or of a chunk that will be read, also fetches its
beginning. On a server that cannot list, a name is considered a directory if there is evidence: a redirect to the name
with "/", consolidated metadata at the root that names it, Zarr metadata below it, or an array above it whose chunk
keys contain it. Listings then show metadata documents, the nodes in consolidated metadata, and the chunks in an
array's grid. If the listings of a server lack only some names (those with a dot, with Apache also README* and others),
metadata documents and nodes in consolidated metadata with such names are added.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import AccessDenied, IsDirectory, NotDirectory, NotFound, ReadError, TargetMissing
from zarrfs.store.api import Info, Kind, Value, WrappingStore, check_key, join_key, split_key
from zarrfs.store.names import Known, may_be_hidden
from zarrfs.store.remote import FsspecStore
from zarrfs.zarr import DOCUMENTS, NODE_DOCUMENTS
from zarrfs.zarr.consolidated import CONSOLIDATED, consolidated
from zarrfs.zarr.documents import DOCUMENT_MAX, parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.jsontext import load_json
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata, nested

_KNOWN = 65_536  # nodes and directories that are remembered
_REFUSED = 10.0  # seconds for which a refused document is not requested again
_ASKED = 256  # names that are requested at a time
_UNKNOWN = (
    "its server shows no listing, and nothing says what is in it: -o members=a,b names groups and arrays, as "
    "consolidated metadata does; exact names work"
)
_UNREADABLE = (
    "consolidated metadata or -o members= names it, but its server has no metadata document that says what is in it; "
    "exact names work"
)
_NO_GRID = (
    "its server shows no listing, and its metadata does not say which chunks it has, as zarrfs understands it; exact "
    "names work"
)
_WORDS = ("meta", "attrs")  # documents of Zarr v1: a group or an array may have the same name
_BEYOND = re.compile(r"(?:c[./])?[0-9]+(?:[./][0-9]+)*", re.ASCII)  # a name like that of a chunk
# directories of chunks, in an array whose metadata is not understood
_CHUNKS = re.compile(r"(?:c|__zdata__|0|[1-9][0-9]*)(?:/(?:0|[1-9][0-9]*))*", re.ASCII)


_ABSENT = Known(None)
Evidence = dict[str, Known | None]  # answers about documents that a conclusion was drawn from


class NodeLayout(NamedTuple):
    """The properties of an array or group that are needed to recognise its chunks and their directories."""

    array: bool
    grid: Grid | None = None  # of an array whose metadata is understood
    templates: tuple[KeyTemplate, ...] = ()  # the keys of its chunks follow one of these
    document: str = ""  # the name of its metadata document, if that is understood

    def has_chunk(self, key: str) -> bool:
        """Return whether `key`, relative to an array with a grid, is that of a chunk in it."""
        assert self.grid is not None
        return any(template.index(key, self.grid) is not None for template in self.templates)

    def leads(self, directory: str) -> bool:
        """Return whether `directory`, relative to the array, contains chunks according to their keys."""
        if self.grid is None:
            return _CHUNKS.fullmatch(directory) is not None
        return any(template.is_directory(directory, self.grid) for template in self.templates)


class UnlistedStore(WrappingStore):
    """A Zarr store on a server; see the docstring of the module. Errors are those of the FsspecStore below.

    `lists`: whether the server lists directories. If it does not, each chunk of a grid is requested before it is
    listed, and `members` are the paths of existing groups and arrays. Conclusions from documents hold as long as the
    answers about these documents are valid and stay the same.
    """

    def __init__(self, store: FsspecStore, lists: bool = False, members: Sequence[str] = ()) -> None:
        super().__init__(store)
        self._store, self._lists, self._members = store, lists, members
        # by key: the documents that consolidated metadata names, the evidence, the node
        self._nodes: LRU[str, tuple[tuple[str, ...] | None, Evidence, NodeLayout | None]] = LRU(_KNOWN)
        self._named: dict[str, tuple[str, ...]] = {}
        # by directory: the names of nodes in it that are in _named, and that a listing may lack
        self._members_of: dict[str, list[str]] = {}
        self._named_by: Evidence = dict.fromkeys(CONSOLIDATED)
        self._complete = False  # _named has all documents of the nodes
        self._lacking: LRU[str, float] = LRU(_KNOWN)  # until when a document counts as absent or refused
        self._reading: SingleFlight[None] = SingleFlight()

    async def info(self, key: str, sized: bool = True) -> Info:
        check_key(key, root=True)
        try:
            if await self._find(key, look=not sized):
                return await self._store.info(key, sized)
        except (NotFound, AccessDenied):  # some object stores answer 403 for absent keys
            if not await self._is_directory(key):
                raise
        return Info(split_key(key)[1], Kind.DIRECTORY)

    async def open(self, key: str) -> Value:
        check_key(key, root=True)
        try:
            if await self._find(key):
                return await self._store.open(key)
        except NotFound:
            if not await self._is_directory(key):
                raise
        raise IsDirectory(key)

    async def lists(self, prefix: str) -> bool:
        # any directory of a web server may show an HTML page in place of its listing
        return self._lists and (await self._store.is_flat() or await self._shown(prefix) is not None)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        # where the server does not list: documents and nodes, sorted, then chunks in C order
        if self._lists and await self._store.is_flat():
            async for info in self._store.list_dir(prefix, after):
                yield info
            return
        if (await self.info(prefix)).kind is not Kind.DIRECTORY:
            raise NotDirectory(prefix)
        shown = await self._shown(prefix)
        node, rest = (None, "") if shown is not None and self._shows_all(shown) else await self._array(prefix)
        if shown is not None or node is None or not _has(node, rest, after):
            found = {info.name: info for info in shown or ()}
            try:
                named = await self._consolidated()
            except ReadError:
                if shown is None or not self._shows_all(shown):
                    raise
                named = {}  # the listing lacks only names that the server hides
            for name in self._members_of.get(prefix, ()) if named else ():
                if not (self._lists and name in found):
                    found[name] = Info(name, Kind.DIRECTORY)
            if not rest and not (shown is not None and self._shows_all(shown)):
                for info in await self._documents(prefix, found):
                    found[info.name] = info
            if shown is None and node is None:
                if prefix not in await self._consolidated():
                    raise ReadError(prefix or "/", _UNKNOWN)
                if not any(map(_tells_members, found.values())):
                    await self._ask_for_node(prefix)
                    raise ReadError(prefix or "/", _UNREADABLE)
            for name in sorted(found):
                if name > after:
                    yield found[name]
            after = ""
        if shown is None and node is not None:
            if node.grid is None:
                raise ReadError(prefix or "/", _NO_GRID)
            async for info in self._chunks(prefix, node, rest, after):
                yield info

    async def prefetch(self, keys: Sequence[str]) -> None:
        await self._store.prefetch([key for key in keys if not await self._is_beyond(key)])

    async def _is_beyond(self, key: str) -> bool:
        """Return whether it is known, without requesting `key`, that it is not in the grid of the array above it."""
        above, name = split_key(key)
        try:
            node, rest = await self._array(above)
        except ReadError:
            return False
        inner = join_key(rest, name)
        if node is None or node.grid is None or not _BEYOND.fullmatch(inner):
            return False
        return not node.has_chunk(inner)

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        try:
            return await self._store.locate(key, shown)
        except NotFound:
            if not await self._is_directory(key):
                raise
        return {}

    # -- evidence

    async def _find(self, key: str, look: bool = True) -> bool:
        """Return True if a key is a file, whose entry is then in the table of names; False if it is a directory.

        `look`: if the key is a chunk, also fetch its beginning, because it will be read. Raise NotFound.
        """
        if not key:
            return False
        known = self._store.names.get(key)
        if known is not None:
            if known.entry is None:
                raise NotFound(key)
            return not known.entry.directory
        above, name = split_key(key)
        if name in DOCUMENTS:
            if await self._is_no_document(above, name):
                raise NotFound(key)
            return (await self._store.look(key, page=True)).kind is Kind.FILE
        if key in await self._consolidated():
            return False
        node, rest = await self._array(above)
        if node is not None and node.grid is not None:
            inner = join_key(rest, name)
            if node.leads(inner):
                return False
            if node.has_chunk(inner):
                return (await (self._store.look(key) if look else self._store.info(key))).kind is Kind.FILE
            if _BEYOND.fullmatch(inner):
                raise NotFound(key)
        return (await self._store.info(key, sized=False)).kind is Kind.FILE

    async def _is_no_document(self, directory: str, name: str) -> bool:
        """Return whether it is known, without requesting it, that a directory has no document of that name."""
        named = (await self._consolidated()).get(directory) if directory else None
        if named and self._complete:
            return name not in named
        return bool((await self._array(split_key(directory)[0]))[0]) if directory else False

    async def _is_directory(self, key: str) -> bool:
        """Return whether there is evidence that `key`, which is no file, is a directory."""
        if self._lists:
            return not key
        if not key or key in await self._consolidated():
            return True
        if split_key(key)[1] in DOCUMENTS:
            return split_key(key)[1] in _WORDS and await self._has_document(key)
        node, rest = await self._array(key)
        if node is None:
            if await self._node(key) is not None:
                return True
            await self._ask_for_node(key)  # a refused document may be of an array whose chunk keys contain `key`
            return False
        return not rest or node.leads(rest)

    async def _has_document(self, key: str) -> bool:
        """Return whether `key`, whose name is in _WORDS, is a group or array in a group of the same generation."""
        above = await self._node(split_key(key)[0])
        if above is None or above.array:
            return False
        for name in ("zarr.json",) if above.document == "zarr.json" else (".zarray", ".zgroup"):
            if await self._document(join_key(key, name), {}) is not None:
                return True
        return False

    async def _ask_for_node(self, key: str) -> None:
        """Raise AccessDenied if the server refuses the document of the node at or above `key`.

        Only documents that consolidated metadata names count, because many servers answer 403 for absent keys.
        """
        named = await self._consolidated()
        while key and key not in named:
            key = split_key(key)[0]
        if await self._node(key) is None:
            for name in named.get(key, ()):
                if name in NODE_DOCUMENTS:
                    with contextlib.suppress(NotFound):
                        await self._store.info(join_key(key, name))

    async def _array(self, key: str) -> tuple[NodeLayout | None, str]:
        """Return (the array at or above `key`, the rest of the key), or (None, "")."""
        parts = key.split("/") if key else []
        for depth in range(len(parts) + 1):  # from the root down: nothing but chunks lies below an array
            node = await self._node("/".join(parts[:depth]))
            if node is not None and node.array:
                return node, "/".join(parts[depth:])
        return None, ""

    async def _node(self, key: str) -> NodeLayout | None:
        """Return the node at `key`, by the documents in it; None if there is none."""
        names = (await self._consolidated()).get(key) if key else None
        held = self._nodes.get(key)
        if held is not None and held[0] == names and self._holds(held[1]):
            return held[2]
        evidence: Evidence = {}
        found: dict[str, NodeLayout] = {}

        async def look(name: str) -> None:
            data = await self._document(join_key(key, name), evidence)
            node = None if data is None else node_of(name, data)
            if node is not None:
                found[name] = node

        if names:
            await for_each(look, [name for name in NODE_DOCUMENTS if name in names])
        else:  # most nodes have the same generation as their group
            parent = self._nodes.get(split_key(key)[0]) if key else None
            above = None if parent is None else parent[2]
            first = above.document if above is not None and above.document else NODE_DOCUMENTS[0]
            await look(".zarray" if first == ".zgroup" else first)
            if not found:
                await for_each(look, [name for name in NODE_DOCUMENTS if name != first or name == ".zgroup"])
        node = next((found[name] for name in NODE_DOCUMENTS if name in found), None)
        self._nodes.put(key, (names, evidence, node))
        return node

    async def _consolidated(self) -> dict[str, tuple[str, ...]]:
        """Return the nodes in consolidated metadata at the root, and their documents."""
        if not self._holds(self._named_by):
            await self._reading.run(None, self._read_names, lambda: self._holds(self._named_by) or None)
        return self._named

    async def _read_names(self) -> bool:
        named: dict[str, tuple[str, ...]] = {}
        evidence: Evidence = {}
        whole = True
        for name in CONSOLIDATED:
            data = await self._document(name, evidence)
            if data is not None:
                found = _named_by(name, data)
                for node, documents in found.items():  # a node may have documents of both generations
                    named[node] = (*named.get(node, ()), *documents)
                whole = whole and bool(found)
        self._complete = whole and bool(named)
        for path in self._members:
            while path and path not in named:
                named[path] = ()
                path = split_key(path)[0]
        if self._members:
            named.setdefault("", ())
        self._named, self._named_by = named, evidence
        self._members_of = {}
        for parent, name in map(split_key, filter(None, named)):
            if not self._lists or may_be_hidden(name):
                self._members_of.setdefault(parent, []).append(name)
        return True

    async def _document(self, key: str, evidence: Evidence) -> bytes | None:
        """Return the bytes of a document, None if it is absent or refused; add the answer to `evidence`."""
        data, asked, names = None, trio.current_time(), self._store.names
        try:
            await self._store.look(key, page=True)
            evidence[key] = self._answer(key)  # before the bytes are read, which may be of a later version
            data = bytes(await self._store.get(key, 0, DOCUMENT_MAX))
        except (NotFound, IsDirectory):
            self._lacking.put(key, asked + max(names.ttl, names.absent))
        except AccessDenied:  # some servers answer 403 for absent keys
            self._lacking.put(key, asked + min(names.ttl, _REFUSED))
        if data is None:
            evidence[key] = self._answer(key)
        return data

    def _holds(self, evidence: Evidence) -> bool:
        """Return whether conclusions from `evidence` still hold, without a request."""
        return all(known is not None and self._answer(document) == known for document, known in evidence.items())

    def _answer(self, document: str) -> Known | None:
        """Return the valid answer about a document: _ABSENT if it is absent or refused, None if it is not known."""
        known = self._store.names.get(document)
        if known is None:
            return _ABSENT if self._lacking.get(document, -math.inf) > trio.current_time() else None
        return known if known.entry is not None else _ABSENT

    # -- listings

    async def _shown(self, prefix: str) -> list[Info] | None:
        """Return the server's listing of a directory, if there is one: some servers hide only names with a dot."""
        if not self._lists and (not prefix or prefix in await self._consolidated() or (await self._array(prefix))[0]):
            return None  # the root is known to have no listing; nodes and directories in arrays need none
        try:
            return await self._store.listed(prefix)
        except AccessDenied:
            if self._lists:
                raise  # an empty listing would silently lack chunks
            return None
        except (NotFound, NotDirectory, TargetMissing):
            if not self._lists:
                return None
            if (await self._array(prefix))[1]:  # a directory of chunks, without any chunk
                return []
            raise

    def _shows_all(self, shown: list[Info]) -> bool:
        """Return whether a listing lacks no document: those that servers hide are never beside a zarr.json."""
        return self._lists and any(info.name == "zarr.json" for info in shown)

    async def _documents(self, prefix: str, shown: Container[str]) -> list[Info]:
        """Return the metadata documents of a directory that the server's listing hides."""
        names = [name for name in DOCUMENTS if name not in shown and (not self._lists or name[0] == ".")]
        return await self._existing(prefix, names)

    async def _existing(self, prefix: str, names: Iterable[str]) -> list[Info]:
        """Return the entries of those `names` in a directory that exist, or that the server refuses to show.

        Many servers answer 403 for absent keys, so a refused document counts only if consolidated metadata names it.
        """
        found: list[Info] = []
        named = (await self._consolidated()).get(prefix, ())

        async def look(name: str) -> None:
            key = join_key(prefix, name)
            try:
                if name in DOCUMENTS and await self._is_no_document(prefix, name):
                    return
                info = await self._store.info(key)
            except NotFound:
                return
            except AccessDenied as exc:  # not left out: a chunk would be read as the fill value
                if name in DOCUMENTS and name not in named:
                    return
                info = Info(name, Kind.FILE, None, unreadable=exc.reason)
            if info.kind is Kind.FILE:
                found.append(info)

        await for_each(look, names)
        return found

    async def _chunks(self, prefix: str, node: NodeLayout, directory: str, after: str) -> AsyncIterator[Info]:
        """Yield the chunks of an array that the server has, and directories of chunks, in `directory` of the array."""
        array = prefix[: len(prefix) - len(directory)].rstrip("/")
        children = _children(node, await self._template(array, node), directory, after)
        while batch := list(itertools.islice(children, _ASKED)):
            files = [info.name for info in batch if info.kind is Kind.FILE]
            there = {info.name: info for info in await self._existing(prefix, files)}
            for info in batch:
                if info.kind is Kind.DIRECTORY or info.name in there:
                    yield there.get(info.name, info)

    async def _template(self, array: str, node: NodeLayout) -> KeyTemplate:
        """Return the key template of an array; if its document allows several, request a few chunks to decide."""
        assert node.grid is not None
        first, *others = node.templates
        if not others or not node.grid.size:
            return first
        last, refused = node.grid.size - 1, []
        for template in node.templates:
            keys = {template.key(node.grid.index(number)) for number in (0, last // 2, last)}
            found = await self._existing(array, keys)
            if not all(info.unreadable for info in found):
                return template
            if found:
                refused.append(template)
        return refused[0] if refused else first


def node_of(name: str, data: bytes) -> NodeLayout | None:
    """Return the node of a metadata document, even if it is not understood; None if it is no metadata document."""
    try:
        metadata = parse_node(name, data)
    except MetadataError:
        return _vague_node(data)
    if not isinstance(metadata, ArrayMetadata):
        return NodeLayout(False, document=name)
    other = nested(metadata)
    return NodeLayout(True, metadata.grid, (metadata.keys,) if other is None else (metadata.keys, other), name)


def _vague_node(data: bytes) -> NodeLayout | None:
    """Return the node of a metadata document that is not understood, because its chunks exist nevertheless."""
    try:
        document = load_json(data)
    except MetadataError:
        return None
    if not isinstance(document, dict):
        return None
    if isinstance(document.get("shape"), list) and not document.keys().isdisjoint(("zarr_format", "chunks")):
        return NodeLayout(True)
    return NodeLayout(False) if document.get("node_type") == "group" else None


def _named_by(name: str, data: bytes) -> dict[str, tuple[str, ...]]:
    """Return the documents of nodes in consolidated metadata, and of groups above them; {} if it is damaged."""
    try:
        found = consolidated(name, data) or {}
    except MetadataError:
        return {}
    named = {node: tuple(documents) for node, documents in found.items()}
    for node in found:
        while node:
            node = split_key(node)[0]
            named.setdefault(node, ())
    return named


def _tells_members(info: Info) -> bool:
    """Return whether an entry is a directory, or the readable metadata document of the node that contains it."""
    return info.kind is Kind.DIRECTORY or (info.name in NODE_DOCUMENTS and not info.unreadable)


def _has(node: NodeLayout, directory: str, name: str) -> bool:
    """Return whether `name` is a chunk, or a directory of chunks, in a directory of an array."""
    if not name or node.grid is None:
        return False
    key = join_key(directory, name)
    return node.leads(key) or node.has_chunk(key)


def _children(node: NodeLayout, template: KeyTemplate, directory: str, after: str) -> Iterator[Info]:
    assert node.grid is not None
    for name, is_directory in template.children(directory, node.grid, after):
        yield Info(name, Kind.DIRECTORY) if is_directory else Info(name, Kind.FILE, None)
