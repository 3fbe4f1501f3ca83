"""The arrays and groups in a store, of every generation of Zarr: found by their documents, and cached."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import NamedTuple, cast

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import (
    AccessDenied,
    IsDirectory,
    NotDirectory,
    NotFound,
    ReadError,
    StoreError,
    TargetChanged,
    ZarrfsError,
)
from zarrfs.store.api import Info, Kind, Store, join_key, split_key
from zarrfs.store.followed import with_links_followed
from zarrfs.store.traversal import NOWHERE
from zarrfs.system.buffers import Buffer
from zarrfs.zarr import ATTRIBUTE_DOCUMENTS, DOCUMENT_MAX, DOCUMENTS, NODE_DOCUMENTS, draft
from zarrfs.zarr.consolidated import CONSOLIDATED, consolidated
from zarrfs.zarr.documents import parse_document, parse_node
from zarrfs.zarr.errors import MetadataError, Unsupported
from zarrfs.zarr.jsontext import JSON, load_json, strict_json
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.layout import Experimental, OtherFile
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

_INLINE = 256 << 10  # bytes: larger JSON is parsed in a thread, off the event loop
_FRESH = 1.0  # seconds for which the document of an array in use, and what is no node yet, are not looked at again
_KNOWN = 65_536  # nodes to remember
_AT_ONCE = 64  # nodes to look up concurrently on a server
_LOOKS = 8  # chunks to probe for the naming scheme
DIRECTORY = "a directory lies in the place of a chunk"
FILE_ABOVE = "a file lies in the place of a directory of chunks"
_CHANGED = "has changed: zarrfs refresh shows the new version"  # the problem of an array


class Node(NamedTuple):
    """A node of a hierarchy. If `metadata` is None, `problem` is the error in its documents."""

    path: str  # "/"-joined names, the root is ""
    metadata: ArrayMetadata | GroupMetadata | None
    problem: str | None = None
    documents: tuple[str, ...] = ()  # their keys in the source; empty for a group implied by nodes below it
    chunks: str = ""  # its directory in the source, mostly `path`; chunk keys are relative to it
    mtime_ns: int | None = None  # the latest of its documents, if the source has times
    mode: int | None = None  # of its first document, if the source has modes
    childless: bool = False  # an array, an invalid array or an unreadable entry: no node is below it
    text: bytes = b""  # its zarr.json, as the source has it
    seen: NodeDocument | None = None  # its document as of the first look, or the consolidated one
    unsupported: bool = False  # `problem` is about a valid document
    final: bool = False  # not looked up again: a valid node with documents, whose chunk keys are known

    @property
    def broken(self) -> bool:
        """Return whether a document is invalid or unreadable."""
        return self.problem is not None and not self.unsupported

    @property
    def may_be_array(self) -> bool:
        """Return whether it is an array, or an invalid document does not tell that it is none."""
        return self.childless or self.broken


class NodeDocument(NamedTuple):
    """A document of a node, as found in the store."""

    key: str
    name: str  # .zarray, zarr.json, ...: the format of its contents
    info: Info
    content: int = 0  # a hash, if the store has no times
    by: NodeDocument | None = None  # the consolidated document, if it is `held` in that
    held: JSON = None


def raise_it(exc: Exception) -> None:
    raise exc


class Hierarchy:
    """The nodes of the hierarchy at the root of `store`.

    Documents are those of the first look. If the store may change, check() notices that the document of an array in
    use has changed, or that its chunks have other names than were assumed; a group without a document and an invalid
    document are looked up again after a second. If the store is remote, consolidated metadata at the root is trusted,
    as Zarr readers do, which saves a request for every document.
    """

    def __init__(self, store: Store) -> None:
        self.store = store = with_links_followed(store)
        self._nodes: LRU[str, tuple[float, Node]] = LRU(_KNOWN)  # with the time of the next look
        # when the document of an array was last looked at, and what it was then; None: that of another array
        self._checked: LRU[str, tuple[float, NodeDocument | None]] = LRU(_KNOWN)
        self._layouts: dict[str, int | None] = {}  # a hash of the first look at each array, which is never evicted
        self._remote = store.remote
        self._consolidated: dict[str, dict[str, JSON]] | None = None  # documents of a remote store, by path and name
        self._consolidated_by: NodeDocument | None = None  # the document that holds them
        self._draft: str | None = None  # the suffix of documents in a store of the experimental v3
        self._lock = trio.Lock()

    # -- nodes

    async def node(self, path: str) -> Node | None:
        """Return the array or group at `path`; None if there is none, or if it is below an array. Raise ReadError."""
        found, rest = await self.find(path)
        return None if rest else found

    async def find(self, key: str) -> tuple[Node, str]:
        """Return (the deepest node at or above `key`, the rest of the key); the root always exists."""
        node = await self._at("") or Node("", GroupMetadata("v3", {}, implied=True))
        parts = key.split("/") if key else []
        for depth, name in enumerate(parts):
            child = None if node.childless else await self._at(join_key(node.path, name))
            if child is None:
                return node, "/".join(parts[depth:])
            node = child
        return node, ""

    async def children(self, node: Node, after: str = "") -> AsyncIterator[Info]:
        """Yield the child directories of a group in the order of the store, without reading their documents."""
        if self._draft is not None:
            for info in await self._draft_children(node.path, self._draft):
                if info.name > after:
                    yield info
            return
        async for info in self.store.list_dir(node.chunks, after):
            if info.kind is Kind.DIRECTORY and await self._may_be_visible(node, info.name):
                yield info
            elif _may_be_a_node(info):
                yield info._replace(kind=Kind.DIRECTORY, size=0)

    async def _may_be_visible(self, group: Node, name: str) -> bool:
        """Return whether a directory may be a node; a dot directory, such as .git, must have a document."""
        if name[0] != ".":
            return True
        child = await self._at(join_key(group.path, name))
        return child is not None and bool(child.documents)

    async def walk(self, prefix: str = "", failed: Callable[[Exception], None] = raise_it) -> AsyncIterator[Node]:
        """Yield the node at `prefix` and all below it, groups before their children, without listing chunks.

        A group behind a symbolic link appears once for each path to it. `failed` is called with the error of a group
        that cannot be listed to its end, or of a node that cannot be looked up; what was found is yielded.
        """
        first = await self.node(prefix)
        if first is None:
            return
        yield first
        stack = [] if first.childless else [self._looked_up(first, failed)]
        while stack:
            node = await anext(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            yield node
            if not node.childless:
                stack.append(self._looked_up(node, failed))

    async def _looked_up(self, group: Node, failed: Callable[[Exception], None]) -> AsyncIterator[Node]:
        """Yield the children of a group, which are looked up concurrently if the store is remote."""
        paths: list[str] = []
        found: dict[str, Node | None] = {}

        async def look(path: str) -> None:
            try:
                found[path] = await self._at(path)
            except (ZarrfsError, OSError) as exc:
                failed(exc)

        try:
            async for info in self.children(group):
                paths.append(join_key(group.path, info.name))
        except (ZarrfsError, OSError) as exc:
            failed(exc)
        at_once = _AT_ONCE if self._remote else 1
        for start in range(0, len(paths), at_once):
            batch = paths[start : start + at_once]
            await for_each(look, batch)
            for path in batch:
                if (node := found.pop(path, None)) is not None:
                    yield node

    # -- one node, without a look at the nodes above it

    async def _at(self, path: str) -> Node | None:
        """Return the node at `path`. The caller has to ensure that no node above it is an array."""
        until, node = self._nodes.get(path, (0.0, None))
        if node is not None and until > trio.current_time():
            return node
        if self._remote and self._consolidated is None:
            await self._begin()
        until = trio.current_time() + _FRESH
        first = self._layouts.get(path)
        try:
            node = await self._look(path)
        except (NotFound, NotDirectory, IsDirectory):
            self._nodes.pop(path, None)
            if first is None:
                return None
            node = Node(path, None, _CHANGED, (path,), path, childless=True)
        if isinstance(node.metadata, ArrayMetadata) and not self.store.immutable:
            first = self._layouts.setdefault(path, _layout(node))
        if first is not None and first != _layout(node):
            node = Node(path, None, _CHANGED, node.documents, node.chunks, childless=True)
        final = node.final or isinstance(node.metadata, ArrayMetadata) or self.store.immutable
        return self._nodes.put(path, (math.inf if final else until, node))[1]

    async def check(self, key: str, node: Node) -> None:
        """Raise TargetChanged, about `key`, if an array is not that of the first look, apart from its attributes.

        One reader looks at its document, once a second; the others go by its last look.
        """
        if not (self.store.immutable or node.seen is None or node.problem):
            checked, seen = self._checked.get(node.path, (-_FRESH, node.seen))
            if (now := trio.current_time()) - checked >= _FRESH:
                self._checked.put(node.path, (now, seen))
                seen = self._checked.put(node.path, (now, await self._seen_now(node, seen)))[1]
            if seen is not None:
                return
        elif node.problem != _CHANGED:
            return
        raise TargetChanged(key, f"{node.path or '/'} {_CHANGED}")

    async def _seen_now(self, node: Node, seen: NodeDocument | None) -> NodeDocument | None:
        """Return the present document of an array, last seen as `seen`; None if it is that of another array."""
        with suppress(NotFound, NotDirectory, IsDirectory):
            if seen is not None and _version(await self.store.info(seen.key)) == _version(seen.info):
                same = not seen.content or hash(bytes(await self.store.get(seen.key))) == seen.content
                if same and (node.final or await self._with_keys(node) == node):
                    return seen
            found = await Hierarchy(self.store).node(node.path)
            if found is not None and _layout(found) == _layout(node):
                return found.seen
        return None

    async def _look(self, path: str) -> Node:
        """Look up the node at `path`. Raise NotFound or NotDirectory."""
        directory, info = path, Info("", Kind.DIRECTORY)
        if self._draft is not None:
            directory, found = draft.data_directory(path), await self._draft_documents(path, self._draft)
        else:
            if path and path not in (self._consolidated or ()):
                info = await self._directory(path)
            if info.unreadable:
                return Node(path, None, info.unreadable, (path,), path, info.mtime_ns, None, childless=True)
            found = await self._documents(path)
        if not found:
            return Node(path, GroupMetadata("v3", {}, implied=True), None, (), directory, info.mtime_ns)
        try:
            return await self._read(path, found, directory)
        except Experimental as exc:
            problem = f"{exc}: mount this directory itself"
            if not path and found[0].by is None:
                try:
                    self._draft = draft.entry_point(await self.store.get(found[0].key))
                    return await self._look(path)
                except MetadataError as error:
                    problem = str(error)
            return Node(path, None, problem, (found[0].key,), directory, childless=True, unsupported=True, final=True)

    async def _directory(self, path: str) -> Info:
        """Return the entry of a directory that may be a node, or of an unreadable one. Raise NotFound."""
        info = await self.store.info(path, sized=False)
        if info.kind is Kind.DIRECTORY or _may_be_a_node(info):
            return info
        raise NotFound(path)

    async def _documents(self, directory: str) -> tuple[NodeDocument, ...]:
        """Find the document that makes a directory a node, and the document of its attributes."""
        there: dict[str, NodeDocument] = {}

        async def ask(name: str) -> None:
            if (document := await self._document(directory, name)) is not None:
                there[name] = document

        first, *others = NODE_DOCUMENTS
        await ask(first)  # if it exists, the others are not needed: most stores take one request
        if not there and self._remote:
            await for_each(ask, [*others, *{*ATTRIBUTE_DOCUMENTS.values()}])
        for name in NODE_DOCUMENTS:
            if not there and not self._remote and name != first:
                await ask(name)
            if name in there:
                beside = ATTRIBUTE_DOCUMENTS.get(name, "")
                if beside and not self._remote:
                    await ask(beside)
                return tuple(there[each] for each in (name, beside) if each in there)
        return ()

    async def _document(self, directory: str, name: str) -> NodeDocument | None:
        by, held = self._consolidated_by, (self._consolidated or {}).get(directory)
        key = join_key(directory, name)
        if by is not None and held is not None:
            return by._replace(key=key, name=name, held=held[name], by=by) if name in held else None
        try:
            info = await self.store.info(key)
            if name == "meta" and info.unreadable == NOWHERE:  # other programs use the name, too
                return None
        except (NotFound, NotDirectory):
            return None
        return NodeDocument(key, name, info) if info.kind is Kind.FILE else None

    async def _read(self, path: str, found: tuple[NodeDocument, ...], directory: str) -> Node:
        """Return the node of documents. Raise Experimental."""
        made, data, problem, unsupported = found[0], b"", None, False
        metadata: ArrayMetadata | GroupMetadata | None = None
        try:
            if made.by is not None:
                data = strict_json(made.held) if made.name == "zarr.json" else b""
                metadata = parse_document(made.name, made.held, found[1].held if found[1:] else None)
            else:
                _check_sizes(found)
                data = bytes(await self.store.get(made.key))
                attributes = await self.store.get(found[1].key) if found[1:] else None
                if self._draft is not None:
                    metadata = draft.parse(made.name, data)
                else:
                    metadata = parse_node(made.name, data, attributes)
        except OtherFile:
            metadata, found = GroupMetadata("v3", {}, implied=True), ()
        except Experimental:
            raise
        except MetadataError as exc:
            problem, unsupported = str(exc), isinstance(exc, Unsupported)
        times = [each.info.mtime_ns for each in (made, *found) if each.info.mtime_ns is not None]
        node = Node(
            path, metadata, problem, tuple(each.key for each in found), directory, max(times, default=None),
            made.info.mode, unsupported=unsupported, seen=made.by or _versioned(made, data),
            childless=isinstance(metadata, ArrayMetadata) or (metadata is None and _must_be_array(made.name, data)),
            text=data if made.name == "zarr.json" and not problem else b"",
        )  # fmt: skip
        node = await self._with_keys(node)
        return node if found and not problem else node._replace(final=False)

    # -- chunk names that the document does not determine

    async def _with_keys(self, node: Node) -> Node:
        """Return the node with the chunk names in use; it is final if they are certain."""
        array = node.metadata
        other = array.nested if isinstance(array, ArrayMetadata) else None
        if other is None or not isinstance(array, ArrayMetadata):
            return node._replace(final=True)
        seen = await self._template_in_use(array, other, node.chunks)
        return node if seen is None else node._replace(metadata=dataclasses.replace(array, keys=seen), final=True)

    async def _template_in_use(self, array: ArrayMetadata, other: KeyTemplate, directory: str) -> KeyTemplate | None:
        """Return the template of the stored chunks; the array's own is tried first. None if no chunk was found."""
        last = array.grid.size - 1
        for number in dict.fromkeys(last * part // (_LOOKS - 1) for part in range(_LOOKS if last >= 0 else 0)):
            index = array.grid.index(number)
            for template in (array.keys, other):
                try:
                    info = await self.store.info(join_key(directory, template.key(index)), sized=False)
                except StoreError:
                    continue
                if info.kind is not Kind.DIRECTORY:
                    return template
        try:
            if not await self.store.lists(directory):
                return None
            listing = cast("AsyncGenerator[Info, None]", self.store.list_dir(directory))
            async with aclosing(listing):  # stop at the first chunk: the listing of a bucket may be very long
                async for info in listing:
                    for template in (array.keys, other):
                        known = template.is_directory if info.kind is Kind.DIRECTORY else template.index
                        if known(info.name, array.grid):
                            return template
        except (AccessDenied, NotFound, NotDirectory):  # a server may not permit listings, or may have no chunk
            if not self._remote:
                raise
        return None

    # -- consolidated metadata of remote stores

    async def _begin(self) -> None:
        """Load the consolidated metadata of the store, if it has any."""
        async with self._lock:
            if self._consolidated is not None:
                return
            for name in CONSOLIDATED:
                found = await self._document("", name)
                if found is not None and (found.info.size or 0) <= DOCUMENT_MAX:
                    break
            else:
                self._consolidated = {}
                return
            try:
                data = await self.store.get(found.key)
                small = len(data) <= _INLINE
                known = consolidated(name, data) if small else await trio.to_thread.run_sync(consolidated, name, data)
            except (NotFound, IsDirectory, MetadataError):
                data, known = b"", None
            self._consolidated_by, self._consolidated = _versioned(found, data), known or {}

    # -- experimental v3

    async def _draft_documents(self, path: str, suffix: str) -> tuple[NodeDocument, ...]:
        """Return the document of a node, or () for an implied group. Raise NotFound if there is neither."""
        for kind, key in zip(("array", "group"), draft.document_keys(path, suffix), strict=True):
            if (found := await self._document(*split_key(key))) is not None:
                return (found._replace(name=kind),)
        if path:
            directory = join_key(draft.META_ROOT, path)
            if (info := await self._directory(directory)).unreadable:
                return (NodeDocument(directory, "group", info),)
        return ()

    async def _draft_children(self, path: str, suffix: str) -> list[Info]:
        names: dict[str, Info] = {}
        inside = join_key(draft.META_ROOT, path) if path else draft.META_ROOT
        try:
            async for info in self.store.list_dir(inside):
                made = draft.node_of_key(join_key(inside, info.name), suffix) if info.kind is Kind.FILE else None
                if made:
                    name = split_key(made[0])[1]
                else:
                    name = info.name if info.kind is Kind.DIRECTORY or _may_be_a_node(info) else ""
                if name:
                    names[name] = Info(name, Kind.DIRECTORY, mtime_ns=info.mtime_ns)
        except (NotFound, NotDirectory):
            return []
        return [names[name] for name in sorted(names)]


@contextmanager
def chunk_errors(key: str) -> Iterator[None]:
    """Turn errors of a look at a chunk that are not absence into ReadError."""
    try:
        yield
    except NotFound:
        raise
    except StoreError as exc:
        known = {IsDirectory: DIRECTORY, NotDirectory: FILE_ABOVE}
        raise ReadError(key, known.get(type(exc)) or exc.reason or exc.__class__.__doc__ or "") from exc


def _may_be_a_node(info: Info) -> bool:
    """Return whether an unreadable entry may be an array or a group. It is then shown as an error, not as absent."""
    return bool(info.unreadable) and info.name not in DOCUMENTS and not info.name.startswith(".")


def _versioned(document: NodeDocument, data: Buffer) -> NodeDocument:
    """Add a hash of the contents to a document whose version nothing else tells."""
    info = document.info
    return document if info.identity or info.mtime_ns is not None else document._replace(content=hash(bytes(data)))


def _version(info: Info) -> tuple[int | None, ...]:
    return info.size, info.mtime_ns, info.identity


def _layout(node: Node) -> int | None:
    """Return a hash of the metadata that decides how the chunks of an array are read; None if it is not an array."""
    array = node.metadata
    if not isinstance(array, ArrayMetadata):
        return None
    return hash(
        repr((array.shape, array.grid.chunks, array.dtype, array.fill, array.fill_object, array.codecs, array.keys))
    )


def _check_sizes(found: tuple[NodeDocument, ...]) -> None:
    """Raise MetadataError if a document is unreadable or too large."""
    for each in found:
        if each.info.unreadable:
            raise MetadataError(f"{each.name}: {each.info.unreadable}")
        if (each.info.size or 0) > DOCUMENT_MAX:
            raise MetadataError(f"{each.name}: more than {DOCUMENT_MAX} bytes")


def _must_be_array(name: str, data: Buffer) -> bool:
    """Return whether an invalid document nevertheless describes an array."""
    if name != "zarr.json":
        return name not in (".zgroup", "group")
    with suppress(MetadataError):
        document = load_json(data)
        return isinstance(document, dict) and document.get("node_type") == "array"
    return False
