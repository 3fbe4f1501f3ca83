"""-o view=v2 and view=v3: a hierarchy of any Zarr generation as one of that version.

The view translates metadata documents and chunk names; chunks are the bytes of the source. It contains the hierarchy
and nothing else: groups, arrays, their documents, and chunks within the grid. An array that the version cannot express
is an empty directory; left_out() returns the reason.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, NamedTuple

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError
from zarrfs.store.api import Info, Kind, Store, Usage, Value, WrappingStore, check_key, join_key, split_key
from zarrfs.store.traversal import resolve
from zarrfs.store.values import BytesValue
from zarrfs.views.chunknames import ChunkNames
from zarrfs.views.hierarchy import Hierarchy, Node
from zarrfs.zarr import v2, v3
from zarrfs.zarr.documents import ATTRIBUTE_DOCUMENTS, NODE_DOCUMENTS, parse_document
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON, strict_json
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

log = logging.getLogger(__name__)

Metadata = ArrayMetadata | GroupMetadata

_PIECE = 64  # nodes to translate between two checkpoints
_KNOWN = 65_536  # nodes whose documents to remember
_FILE_ABOVE = "a file lies in the place of a directory of chunks"
_DOCUMENTS = {2: (".zarray", ".zattrs", ".zgroup", ".zmetadata"), 3: ("zarr.json",)}  # sorted


class _TranslatedNode(NamedTuple):
    """A node as it appears in the view."""

    node: Node
    documents: dict[str, bytes | None]  # by name, sorted; None: made on demand
    chunks: ChunkNames | None = None  # of an array that the version can express


class _Resolved(NamedTuple):
    """The meaning of a key of the view: a document, the directory of a node, or a chunk (directory) at `source`."""

    translated: _TranslatedNode
    document: str = ""
    source: str = ""  # a chunk, or a directory of chunks
    directory: bool = False
    rest: str = ""  # the key below an array


def open_translated(store: Store, version: Literal[2, 3], strict: bool) -> Store:
    """Return the hierarchy in `store` as one of `version`; closing the view closes `store`.

    `strict`: a node that the version cannot express is a ReadError when it is looked up, in place of left out.
    """
    return TranslatedView(store, version, strict)


class TranslatedView(WrappingStore):
    """A hierarchy in another version; see open_translated()."""

    def __init__(self, store: Store, version: Literal[2, 3], strict: bool = False) -> None:
        super().__init__(store)
        self.hierarchy = Hierarchy(store)
        self._version, self._strict = version, strict
        self._names = _DOCUMENTS[version]
        self._known_nodes: LRU[str, _TranslatedNode] = LRU(_KNOWN)
        self._left_out: dict[str, str] = {}

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        resolved = await self._resolve_key(key)
        name = split_key(key)[1]
        if resolved.document:
            return await self._document_info(resolved.translated, resolved.document, sized)
        if not resolved.source:
            return await self._directory_info(resolved.translated.node, name)
        info = _in_its_place((await self._resolve(resolved.source, sized))[1], resolved.directory)
        if resolved.directory and info.kind is not Kind.DIRECTORY:
            raise NotFound(key)
        return info._replace(name=name, links=1) if resolved.directory else info._replace(name=name)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        resolved = await self._resolve_key(prefix)
        if resolved.document or (resolved.source and not resolved.directory):
            raise NotDirectory(prefix)
        translated = resolved.translated
        if translated.chunks is not None:
            async for info in self._list_array(resolved, translated.chunks, after):
                yield info
        elif translated.node.leaf:
            for info in await self._document_infos(translated, after):
                yield info
        else:
            async for info in self._list_group(translated, after):
                yield info

    async def open(self, key: str) -> Value:
        resolved = await self._resolve_key(key)
        if resolved.document:
            data = await self._document(resolved.translated, resolved.document)
            info = await self._document_info(resolved.translated, resolved.document, True)
            return BytesValue(info, data, hash(data))
        return await self.lower.open(await self._chunk(key, resolved))

    async def locate(self, key: str) -> dict[str, Any]:
        resolved = await self._resolve_key(key)
        if resolved.document:
            size = (await self._document_info(resolved.translated, resolved.document, True)).size
            return {"inline": size, "documents": list(resolved.translated.node.documents)}
        if not resolved.source or resolved.directory:
            return {}
        return await self.lower.locate(await self._chunk(key, resolved))

    async def usage(self) -> Usage:
        return await self.lower.usage()

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why arrays at or below `key` are left out, by path, of those looked up so far."""
        node, rest = await self.hierarchy.find(key)
        if rest:
            return {}
        await self._translate(node)
        prefix = f"{key}/" if key else ""
        return {path: why for path, why in self._left_out.items() if path == key or path.startswith(prefix)}

    async def holder(self, key: str) -> tuple[Store, str]:
        resolved = await self._resolve_key(key)
        if resolved.document:  # made by the view
            return self, key
        return self.lower, await self._chunk(key, resolved)

    async def check(self) -> None:
        async for node in self.hierarchy.walk():
            if node.problem is not None:
                raise ReadError(node.path or "/", node.problem)
            await self._translate(node)

    async def prefetch(self, keys: Sequence[str]) -> None:
        sources = []
        for key in keys:
            try:
                resolved = await self._resolve_key(key)
            except (NotFound, ReadError):
                continue
            if resolved.source and not resolved.directory:
                sources.append(resolved.source)
        await self.lower.prefetch(sources)

    # -- keys

    async def _resolve_key(self, key: str) -> _Resolved:
        """Resolve a key of the view, without checking that a chunk exists. NotFound for names it cannot have."""
        check_key(key, root=True)
        parent, name = split_key(key)
        if name in self._names:
            node, rest = await self.hierarchy.find(parent)
            translated = await self._translate(node)
            if rest or name not in translated.documents:
                raise NotFound(key)
            return _Resolved(translated, document=name)
        node, rest = await self.hierarchy.find(key)
        translated = await self._translate(node)
        if not rest:
            return _Resolved(translated, directory=True)
        if translated.chunks is not None:
            source, directory = translated.chunks.source(rest)
            if source is not None:
                return _Resolved(translated, "", _joined(node.chunks, source), directory, rest)
        raise NotFound(key)

    async def _chunk(self, key: str, resolved: _Resolved) -> str:
        """Return the source key of a chunk. IsDirectory for a directory of chunks."""
        if resolved.directory:
            await self.info(key)  # NotFound if it does not exist
            raise IsDirectory(key)
        source, info = await self._resolve(resolved.source, False)
        if reason := _in_its_place(info, False).unreadable:
            raise ReadError(key, reason)
        return source

    async def _resolve(self, source: str, sized: bool) -> tuple[str, Info]:
        """Follow links to a chunk or a directory of chunks. ReadError if a file is in the place of a directory."""
        try:
            return await resolve(self.lower, source, sized)
        except NotDirectory as exc:
            raise ReadError(source, _FILE_ABOVE) from exc

    # -- nodes and their documents

    async def _translate(self, node: Node) -> _TranslatedNode:
        known = self._known_nodes.get(node.path)
        if known is not None and known.node is node:
            return known
        try:
            translated = self._new_translation(node)
            if ".zmetadata" in translated.documents and not await self.hierarchy.consolidated(node.consolidated):
                del translated.documents[".zmetadata"]
            self._left_out.pop(node.path, None)
        except MetadataError as exc:
            self._leave_out(node.path, exc)
            translated = _TranslatedNode(node, {})
        self._known_nodes.put(node.path, translated)
        return translated

    def _leave_out(self, path: str, why: MetadataError) -> None:
        """Leave a node out: raise ReadError if `strict`, otherwise log one warning."""
        if self._strict:
            raise ReadError(path or "/", f"view=v{self._version} cannot show it: {why}") from why
        if self._left_out.get(path) != str(why):
            log.warning("%s: left out of view=v%d: %s", path or "/", self._version, why)
        self._left_out[path] = str(why)

    def _new_translation(self, node: Node) -> _TranslatedNode:
        """Translate the documents of a node. MetadataError if the version cannot express it."""
        metadata = node.metadata
        if metadata is None:
            return _TranslatedNode(node, {self._names[0] if node.leaf or self._version == 3 else ".zgroup": None})
        if isinstance(metadata, ArrayMetadata):
            three = self._version == 3
            text = v3.array_document(metadata) if three else v2.array_document(metadata)
            documents: dict[str, bytes | None] = {self._names[0]: text}
            chunks = ChunkNames(metadata, v3.chunk_keys(metadata) if three else v2.chunk_keys(metadata))
        else:
            documents, chunks = {}, None
            if self._version == 3:
                documents["zarr.json"] = None if node.consolidated else strict_json(v3.group_json(metadata))
        if self._version == 2:
            if attributes := v2.attributes_json(metadata):
                documents[".zattrs"] = strict_json(attributes)
            if chunks is None:
                documents[".zgroup"] = strict_json(v2.GROUP_DOCUMENT)
            if node.consolidated:
                documents[".zmetadata"] = None
        return _TranslatedNode(node, documents, chunks)

    async def _document(self, translated: _TranslatedNode, name: str) -> bytes:
        """Return a document. ReadError if that of the source is invalid; NotFound without consolidated metadata."""
        data = translated.documents[name]
        if data is None:
            if translated.node.problem is not None:
                raise ReadError(translated.node.path or "/", translated.node.problem)
            try:
                data = translated.documents[name] = await self._consolidated(translated.node, name)
            except MetadataError as exc:
                raise ReadError(translated.node.path or "/", f"{name}: {exc}") from exc
        return data

    async def _consolidated(self, root: Node, name: str) -> bytes:
        """Return a document of the root with consolidated metadata, if the source has any."""
        nodes = await _consolidated_nodes(self.hierarchy, root.consolidated)
        if name == ".zmetadata":
            if nodes is None:
                raise NotFound(name)
            return strict_json(_zmetadata(nodes, self._leave_out))
        assert isinstance(root.metadata, GroupMetadata)
        document = v3.group_json(root.metadata)
        if nodes is not None:
            document["consolidated_metadata"] = _inline_metadata(nodes, self._leave_out)
        return strict_json(document)

    async def _document_info(self, translated: _TranslatedNode, name: str, sized: bool) -> Info:
        made = await self._document(translated, name) if sized else translated.documents[name]
        size = None if made is None else len(made)
        mode = None if translated.node.mode is None else translated.node.mode & 0o666
        identity = None if made is None or self.immutable else hash(made)
        return Info(name, Kind.FILE, size, mode, translated.node.mtime_ns, identity=identity)

    async def _document_infos(self, translated: _TranslatedNode, after: str) -> list[Info]:
        names = [name for name in sorted(translated.documents) if name > after]
        return [await self._document_info(translated, name, False) for name in names]

    async def _directory_info(self, node: Node, name: str) -> Info:
        try:
            info = await self.lower.info(node.chunks, sized=False)
        except NotFound:  # a node without chunks in an experimental v3 store
            info = Info(name, Kind.DIRECTORY)
        return Info(name, Kind.DIRECTORY, 0, info.mode, info.mtime_ns)

    # -- listings

    async def _list_group(self, translated: _TranslatedNode, after: str) -> AsyncIterator[Info]:
        """Yield documents and nodes, sorted, without reading the nodes."""
        documents = await self._document_infos(translated, after)
        async for info in self.hierarchy.children(translated.node, after):
            while documents and documents[0].name < info.name:
                yield documents.pop(0)
            if info.name in self._names:
                self._leave_out(join_key(translated.node.path, info.name), MetadataError("has the name of a document"))
            else:
                yield info._replace(links=1, size=0)
        for document in documents:
            yield document

    async def _list_array(self, resolved: _Resolved, chunks: ChunkNames, after: str) -> AsyncIterator[Info]:
        """Yield chunks in the order of the source, and documents: before all chunks in v2, after them in v3."""
        own = await self._document_infos(resolved.translated, after) if not resolved.rest else []
        if own and self._version == 2:
            for info in own:
                yield info
            own, after = [], ""
        elif self._version == 2 and after in self._names:
            after = ""
        if resolved.rest or self._version == 2 or after < "zarr.json":
            directory = _joined(resolved.translated.node.chunks, chunks.directory(resolved.rest))
            async for info in self._list_chunks(directory, resolved, chunks, after):
                yield info
        for info in own:
            yield info

    async def _list_chunks(
        self, directory: str, resolved: _Resolved, chunks: ChunkNames, after: str
    ) -> AsyncIterator[Info]:
        """Yield chunks and directories of chunks in a source directory, by their names in the view."""
        start = chunks.source_name(resolved.rest, after)
        view_name = chunks.view_names(resolved.rest)
        try:
            async for info in self.lower.list_dir(directory, start or ""):
                if info.kind is Kind.SYMLINK:
                    info = (await self._linked(join_key(directory, info.name), info))._replace(name=info.name)
                is_directory = info.kind is Kind.DIRECTORY
                name = view_name(info.name, is_directory)
                if name is None and (is_directory or info.unreadable):
                    is_directory = not is_directory  # each in the other's place
                    name = view_name(info.name, is_directory)
                if name is None or (start is None and name <= after):
                    continue
                info = _in_its_place(info, is_directory)
                yield info._replace(name=name, links=1 if is_directory else info.links)
        except NotFound:
            if resolved.rest:
                raise
        except NotDirectory as exc:
            raise ReadError(directory, _FILE_ABOVE) from exc

    async def _linked(self, key: str, link: Info) -> Info:
        """Stat the target of a link; if that fails, return an unreadable file."""
        try:
            return (await resolve(self.lower, key, False))[1]
        except ReadError as exc:
            return link._replace(kind=Kind.FILE, size=1, unreadable=exc.reason)


def _in_its_place(info: Info, directory: bool) -> Info:
    """Return the entry of a chunk or a directory of chunks; a directory in the place of a chunk is unreadable."""
    if directory and info.unreadable:
        return info._replace(kind=Kind.DIRECTORY, size=0)  # listing it, or reading a chunk in it, is the error
    if directory or info.kind is not Kind.DIRECTORY:
        return info
    return info._replace(kind=Kind.FILE, size=1, links=1, unreadable="a directory lies in the place of a chunk")


def _joined(directory: str, key: str) -> str:
    return join_key(directory, key) if key else directory


# -- consolidated metadata


async def _consolidated_nodes(hierarchy: Hierarchy, key: str) -> dict[str, Metadata] | None:
    """Return the nodes in the consolidated metadata at `key`, and the groups above them, by path, sorted.

    None if there are none, or one document is invalid: readers then open each node, and get the error at that one.
    """
    found: dict[str, Metadata] = {}
    for number, (path, documents) in enumerate((await hierarchy.consolidated(key)).items()):
        name = next((name for name in NODE_DOCUMENTS if name in documents), None)
        if name is None:
            continue
        try:
            metadata = parse_document(name, documents[name], documents.get(ATTRIBUTE_DOCUMENTS.get(name, "")))
        except MetadataError as exc:
            log.warning("%s: not shown, as what it says of %s is bad: %s", key, path or "/", exc)
            return None
        if isinstance(metadata, ArrayMetadata) and metadata.keys_assumed:
            node = await hierarchy.node(path)  # it has looked at the names of stored chunks
            if node is not None and isinstance(node.metadata, ArrayMetadata):
                metadata = dataclasses.replace(metadata, keys=node.metadata.keys)
        found[path] = metadata
        if number % _PIECE == 0:
            await trio.lowlevel.checkpoint()
    for path in [*found]:
        while path:
            path = split_key(path)[0]
            found.setdefault(path, GroupMetadata("v3", {}, implied=True))
    return {path: found[path] for path in sorted(found)} if len(found) > 1 or found.keys() - {""} else None


def _inline_metadata(nodes: dict[str, Metadata], leave_out: Callable[[str, MetadataError], None]) -> JSON:
    """Return the consolidated_metadata of the root's zarr.json; call `leave_out` for nodes v3 cannot express."""
    documents: dict[str, JSON] = {}
    for path, metadata in nodes.items():
        try:
            if isinstance(metadata, ArrayMetadata):
                documents[path] = v3.array_json(metadata)
            elif path:
                documents[path] = v3.group_json(metadata)
        except MetadataError as exc:
            leave_out(path, exc)
    return {"kind": "inline", "must_understand": False, "metadata": documents}


def _zmetadata(nodes: dict[str, Metadata], leave_out: Callable[[str, MetadataError], None]) -> JSON:
    """Return the .zmetadata of a v2 hierarchy; call `leave_out` for nodes v2 cannot express."""
    documents: dict[str, JSON] = {}
    for path, metadata in nodes.items():
        try:
            if isinstance(metadata, ArrayMetadata):
                documents[join_key(path, ".zarray")] = v2.array_json(metadata)
            else:
                documents[join_key(path, ".zgroup")] = v2.GROUP_DOCUMENT
            if attributes := v2.attributes_json(metadata):
                documents[join_key(path, ".zattrs")] = attributes
        except MetadataError as exc:
            leave_out(path, exc)
    return {"zarr_consolidated_format": 1, "metadata": documents}
