"""UnlistedStore: a Zarr store on a server, with as few requests as the rules of Zarr allow.

Below an array, directories are inferred from the keys of its chunks, and there are no metadata documents. Nodes in
consolidated metadata need no requests. A lookup of a document, or of a chunk that will be read, also fetches its
beginning. On a server that cannot list, a name is a directory if the server redirects it to the name with "/", if
consolidated metadata at the root names it, if a metadata document is in it, or if it is in the keys of the chunks of
an array above it. Listings then show metadata documents, the nodes in consolidated metadata, and the chunks in an
array's grid. If the listings of a server lack only some names (those with a dot, with Apache also README* and others),
metadata documents and nodes in consolidated metadata with such names are added.
"""

from __future__ import annotations

import contextlib
import itertools
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
from zarrfs.zarr import DOCUMENT_MAX, DOCUMENTS, NODE_DOCUMENTS
from zarrfs.zarr.consolidated import CONSOLIDATED, consolidated
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.jsontext import load_json
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.layout import layout_of, load_document

_KNOWN = 131_072  # documents that are remembered, among them absent ones
_LEAST = 1.0  # seconds for which documents are valid at least: one lookup of a chunk may depend on several of them
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
_OF_V2 = (".zarray", ".zgroup")
_WORDS = ("meta", "attrs")  # documents of Zarr v1: a group or an array may have the same name
# directories of chunks, in an array whose metadata is not understood
_CHUNKS = re.compile(r"(?:c|__zdata__|0|[1-9][0-9]*)(?:/(?:0|[1-9][0-9]*))*", re.ASCII)


class NodeLayout(NamedTuple):
    """The properties of an array or group that are needed to recognise its chunks and their directories."""

    array: bool
    grid: Grid | None = None  # of an array whose metadata is understood
    templates: tuple[KeyTemplate, ...] = ()  # the keys of its chunks follow one of these
    document: str = ""  # the name of its metadata document, if that is understood

    def has_chunk(self, key: str) -> bool:
        """Return whether `key`, relative to an array, is that of a chunk in its grid."""
        return self.grid is not None and any(each.index(key, self.grid) is not None for each in self.templates)

    def leads(self, directory: str) -> bool:
        """Return whether `directory`, relative to an array, contains chunks according to their keys."""
        if self.grid is None:
            return _CHUNKS.fullmatch(directory) is not None
        return any(template.is_directory(directory, self.grid) for template in self.templates)

    def has(self, name: str) -> bool:
        """Return whether `name`, relative to an array, is a chunk or a directory of chunks in its grid."""
        return self.grid is not None and (self.leads(name) or self.has_chunk(name))


class _Document(NamedTuple):
    """The server's answer about a metadata document, with the layout and the names that follow from the document."""

    given: Known
    until: float  # when it has to be requested again, on trio's clock
    layout: NodeLayout | None  # None: it is absent, refused, or no document of a node
    named: dict[str, tuple[str, ...]] | None  # nodes in its consolidated metadata; None: it is absent or refused


def _agree(one: Known, other: Known) -> bool:
    """Return whether two answers show the same version; without versions, they must be one answer."""
    entry = one.entry
    unversioned = entry is not None and not entry.directory and entry.tag is None and entry.mtime_ns is None
    return entry == other.entry and not (unversioned and one.seen != other.seen)


class UnlistedStore(WrappingStore):
    """A Zarr store on a server; see the docstring of the module. Errors are those of the FsspecStore below.

    `lists`: whether the server lists directories. If it does not, each chunk of a grid is requested before it is
    listed, and `members` are the paths of existing groups and arrays. Conclusions from documents hold for
    metadata_ttl=, at least for a second, while later answers about these documents are the same.
    """

    def __init__(self, store: FsspecStore, lists: bool = False, members: Sequence[str] = ()) -> None:
        super().__init__(store)
        self._store, self._lists, self._members = store, lists, members
        self._documents: LRU[str, _Document] = LRU(_KNOWN)
        self._reading: SingleFlight[str] = SingleFlight()
        self._named: dict[str, tuple[str, ...]] = {}  # by node: the documents that consolidated metadata names
        # by directory: the names of nodes in it that are in _named, and that a listing may lack
        self._members_of: dict[str, list[str]] = {}
        self._named_by: list[_Document] = []
        self._complete = False  # _named has all documents of the nodes

    async def info(self, key: str, sized: bool = True) -> Info:
        if await self._is_file(key, look=not sized):
            return await self._store.info(key, sized)
        return Info(split_key(key)[1], Kind.DIRECTORY)

    async def open(self, key: str) -> Value:
        if await self._is_file(key):
            return await self._store.open(key)
        raise IsDirectory(key)

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        return await self._store.locate(key, shown) if await self._is_file(key) else {}

    async def lists(self, prefix: str) -> bool:
        # any directory of a web server may show an HTML page in place of its listing
        return self._lists and (await self._store.is_flat() or await self._shown(prefix) is not None)

    async def prefetch(self, keys: Sequence[str]) -> None:
        await self._store.prefetch([key for key in keys if not await self._is_outside(key)])

    async def _is_outside(self, key: str) -> bool:
        """Return whether a key in an array is not that of a chunk, as read-ahead beyond the edges guesses them."""
        above, name = split_key(key)
        try:
            array, rest = await self._array(above)
        except ReadError:
            return False
        return array is not None and array.grid is not None and not array.has_chunk(join_key(rest, name))

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        # where the server does not list: documents and nodes, sorted, then chunks in C order
        if self._lists and await self._store.is_flat():
            async for info in self._store.list_dir(prefix, after):
                yield info
            return
        if (await self.info(prefix)).kind is not Kind.DIRECTORY:
            raise NotDirectory(prefix)
        shown = await self._shown(prefix)
        whole = self._lists and any(info.name == "zarr.json" for info in shown or ())  # v3 has no hidden names
        array, rest = (None, "") if whole else await self._array(prefix)
        path = prefix[: len(prefix) - len(rest)].rstrip("/")
        layouts = [] if array is None or shown is not None else await self._layouts(path)
        begun = next((at for at, layout in enumerate(layouts) if after and layout.has(join_key(rest, after))), None)
        if begun is None:
            found = {info.name: info for info in shown or ()}
            try:
                await self._consolidated()
                for name in self._members_of.get(prefix, ()):
                    if not (self._lists and name in found):
                        found[name] = Info(name, Kind.DIRECTORY)
            except ReadError:
                if not whole:  # else the listing has all names but hidden ones
                    raise
            if not (rest or whole):
                found |= {info.name: info for info in await self._hidden(prefix, found)}
            if shown is None and array is None:
                if prefix not in await self._consolidated():
                    raise ReadError(prefix or "/", _UNKNOWN)
                if not any(map(_tells_members, found.values())):
                    await self._ask_for_node(prefix)
                    raise ReadError(prefix or "/", _UNREADABLE)
            for name in sorted(found):
                if name > after:
                    yield found[name]
            begun, after = 0, ""
        for at in range(begun, len(layouts)):
            async for info in self._chunks(path, layouts[at], rest, after):
                if not any(layout.has(join_key(rest, info.name)) for layout in layouts[:at]):
                    yield info
            after = ""

    # -- kinds of keys

    async def _is_file(self, key: str, look: bool = True) -> bool:
        """Return True if a key is a file, whose entry is then in the table of names; False if it is a directory.

        `look`: if the key is a chunk, also fetch its beginning, because it will be read. Raise NotFound.
        """
        if not check_key(key, root=True):
            return False
        known = self._store.names.get(key)
        if known is not None and known.entry is not None:
            return not known.entry.directory
        above, name = split_key(key)
        try:
            if name in DOCUMENTS:
                await self._check_document(above, name)
                return (await self._store.look(key, page=True)).kind is Kind.FILE
            if key in await self._consolidated():
                return False
            array, rest = await self._array(above)
            inner = join_key(rest, name)
            if array is not None and array.grid is not None and array.leads(inner):
                return False
            if look and array is not None and array.has_chunk(inner):
                return (await self._store.look(key)).kind is Kind.FILE
            return (await self._store.info(key, sized=False)).kind is Kind.FILE
        except (NotFound, AccessDenied):  # some object stores answer 403 for absent keys
            if not await self._is_directory(key):
                raise
        return False

    async def _check_document(self, directory: str, name: str) -> None:
        """Raise NotFound if it is known, without requesting it, that a directory has no document of that name."""
        named = (await self._consolidated()).get(directory) if directory else None
        if named and self._complete:
            absent = name not in named
        else:
            absent = bool(directory) and (await self._array(split_key(directory)[0]))[0] is not None
        if absent:
            raise NotFound(join_key(directory, name))

    async def _is_directory(self, key: str) -> bool:
        """Return whether `key`, which is not a file, is a directory."""
        if self._lists:
            return False
        if key in await self._consolidated():
            return True
        if split_key(key)[1] in DOCUMENTS:  # a group or an array, in a group of the same generation
            above = await self._node(split_key(key)[0]) if split_key(key)[1] in _WORDS else None
            if above is None or above.array:
                return False
            return bool(await self._layouts(key, ("zarr.json",) if above.document == "zarr.json" else _OF_V2))
        array, rest = await self._array(key)
        if array is None:
            if await self._node(key) is not None:
                return True
            await self._ask_for_node(key)  # a refused document may be of an array whose chunk keys contain `key`
            return False
        if not rest or array.leads(rest):
            return True
        if array.has_chunk(rest):  # most absent names: no other document needs to be requested
            return False
        return any(layout.leads(rest) for layout in await self._layouts(key[: -len(rest) - 1]))

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

    # -- metadata documents

    async def _array(self, key: str) -> tuple[NodeLayout | None, str]:
        """Return (the array at or above `key`, the rest of the key), or (None, "")."""
        above = key
        while above:  # the array is usually known
            for name in NODE_DOCUMENTS:
                held = self._current(join_key(above, name))
                if held is not None and held.layout is not None and held.layout.array:
                    return held.layout, key[len(above) + 1 :]
            above = split_key(above)[0]
        parts = key.split("/") if key else []
        for depth in range(len(parts) + 1):  # from the root down: nothing but chunks lies below an array
            node = await self._node("/".join(parts[:depth]))
            if node is not None and node.array:
                return node, "/".join(parts[depth:])
        return None, ""

    async def _node(self, key: str) -> NodeLayout | None:
        """Return the node at `key`, by one of the documents in it; None if there is none."""
        names = (await self._consolidated()).get(key) if key else None
        if names:
            batches = [[name for name in NODE_DOCUMENTS if name in names]]
        else:  # most nodes have the same generation as their group
            parent = [self._documents.get(join_key(split_key(key)[0], name)) for name in NODE_DOCUMENTS if key]
            first = next((one.layout.document for one in parent if one and one.layout), "") or NODE_DOCUMENTS[0]
            batches = [[".zarray" if first == ".zgroup" else first], [*NODE_DOCUMENTS]]
        for batch in batches:
            if found := await self._layouts(key, batch):
                return found[0]
        return None

    async def _layouts(self, path: str, names: Iterable[str] = NODE_DOCUMENTS) -> list[NodeLayout]:
        """Return what the metadata documents of these names in a directory say.

        An array may have documents of several generations, with other keys of chunks.
        """
        named = (await self._consolidated()).get(path) if path and self._complete else None
        wanted = [join_key(path, name) for name in NODE_DOCUMENTS if name in names and (not named or name in named)]
        found = {key: self._current(key) for key in wanted}

        async def look(key: str) -> None:
            found[key] = await self._document(key)

        await for_each(look, [key for key in wanted if found[key] is None])
        return [one.layout for one in found.values() if one is not None and one.layout is not None]

    def _current(self, key: str) -> _Document | None:
        """Return what is known of a document while it is valid, and no later answer differs; this sends no request."""
        held = self._documents.get(key)
        if held is None or held.until <= trio.current_time():
            return None
        known = self._store.names.get(key)
        return held if known is None or _agree(held.given, known) else None

    async def _document(self, key: str) -> _Document:
        if (held := self._current(key)) is not None:
            return held
        return await self._reading.run(key, lambda: self._read(key), lambda: self._current(key))

    async def _read(self, key: str) -> _Document:
        data, refused, names = None, False, self._store.names
        before = names.get(key)
        given = Known(None, trio.current_time() if before is None else before.seen)
        try:
            await self._store.look(key, page=True)
            # before the bytes are read, which may be of a later version
            given = names.get(key) or names.last(key) or given
            data = bytes(await self._store.get(key, 0, DOCUMENT_MAX))
        except NotFound:
            given = given._replace(entry=None)
        except IsDirectory:
            pass
        except AccessDenied:  # some servers answer 403 for absent keys
            refused = True
        until = given.seen + max(names.ttl, _LEAST)
        if refused:
            until = min(until, trio.current_time() + _REFUSED)
        layout = None if data is None else node_of(split_key(key)[1], data)
        named = None if data is None else _named_by(key, data) if key in CONSOLIDATED else {}
        return self._documents.put(key, _Document(given, until, layout, named))

    async def _consolidated(self) -> dict[str, tuple[str, ...]]:
        """Return the nodes in consolidated metadata at the root, and their documents."""
        by = [await self._document(name) for name in CONSOLIDATED]
        three, two = by
        if three.named and two.named is None:  # there may be documents of v2, too, which nothing names
            by.append(await self._document(".zgroup"))
        if [*map(id, by)] != [*map(id, self._named_by)]:
            self._note_names(by)
        return self._named

    def _note_names(self, by: list[_Document]) -> None:
        named: dict[str, tuple[str, ...]] = {}
        consolidated = [one.named for one in by[: len(CONSOLIDATED)] if one.named is not None]
        for found in consolidated:
            for node, documents in found.items():  # a node may have documents of both generations
                named[node] = (*named.get(node, ()), *documents)
        beside = any(one.named is not None for one in by[len(CONSOLIDATED) :])
        self._complete = bool(named) and all(consolidated) and not beside
        for path in self._members:
            while path and path not in named:
                named[path] = ()
                path = split_key(path)[0]
        if self._members:
            named.setdefault("", ())
        self._named, self._named_by = named, by
        self._members_of = {}
        for parent, name in map(split_key, filter(None, named)):
            if not self._lists or may_be_hidden(name):
                self._members_of.setdefault(parent, []).append(name)

    # -- listings

    async def _shown(self, prefix: str) -> list[Info] | None:
        """Return the server's listing of a directory, if it shows one."""
        if not self._lists:
            return None
        try:
            return await self._store.listed(prefix)
        except (NotFound, NotDirectory, TargetMissing):
            if (await self._array(prefix))[1]:  # a directory of chunks, without any chunk
                return []
            raise

    async def _hidden(self, prefix: str, shown: Container[str]) -> list[Info]:
        """Return the metadata documents of a directory that the server's listing hides."""
        names = [name for name in DOCUMENTS if name not in shown and (not self._lists or name[0] == ".")]
        return await self._existing(prefix, names)

    async def _existing(self, prefix: str, names: Iterable[str]) -> list[Info]:
        """Return the entries of those `names` in a directory that exist, or that the server refuses to show.

        Many servers answer 403 for absent keys, so a refused document counts only if consolidated metadata names it,
        or if it existed before.
        """
        found: list[Info] = []
        named = (await self._consolidated()).get(prefix, ())

        async def look(name: str) -> None:
            key = join_key(prefix, name)
            try:
                if name in DOCUMENTS:
                    await self._check_document(prefix, name)
                info = await self._store.info(key)
            except NotFound:
                return
            except AccessDenied as exc:  # not left out: a chunk would be read as the fill value
                if name in DOCUMENTS and name not in named and self._store.names.last(key) is None:
                    return
                info = Info(name, Kind.FILE, None, unreadable=exc.reason)
            if info.kind is Kind.FILE:
                found.append(info)

        await for_each(look, names)
        return found

    async def _chunks(self, array: str, node: NodeLayout, directory: str, after: str) -> AsyncIterator[Info]:
        """Yield the chunks of an array that the server has, and directories of chunks, in `directory` of the array."""
        prefix = join_key(array, directory) if directory else array
        if node.grid is None:
            raise ReadError(prefix or "/", _NO_GRID)
        children = _children(node.grid, await self._template(array, node), directory, after)
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
        found = layout_of(name, load_document(name, data))
    except MetadataError:
        return _vague_node(data)
    if found is None:
        return NodeLayout(False, document=name)
    return NodeLayout(True, found.grid, (found.keys, *filter(None, (found.nested,))), name)


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


def _children(grid: Grid, template: KeyTemplate, directory: str, after: str) -> Iterator[Info]:
    for name, is_directory in template.children(directory, grid, after):
        yield Info(name, Kind.DIRECTORY) if is_directory else Info(name, Kind.FILE, None)
