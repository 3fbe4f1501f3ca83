"""-o view=v2 and view=v3: a hierarchy of any Zarr generation as one of that version.

The view translates metadata documents and chunk names. Chunks are the bytes of the source, and so is a zarr.json in
view=v3, with two exceptions: an array whose chunk keys have a prefix or suffix of their own gets the usual keys, and a
group loses consolidated metadata, which would name arrays that are left out. The view contains only the hierarchy:
groups, arrays, their documents, and chunks within the grid. An array that the version cannot express, or whose chunks
its readers could not decode, is an empty directory; left_out() returns the reason.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError
from zarrfs.store.api import Info, Kind, Store, Value, check_key, join_key, split_key
from zarrfs.views.chunknames import ChunkNames
from zarrfs.views.hierarchy import DIRECTORY, FILE_ABOVE, Node, chunk_errors
from zarrfs.views.view import File, View, text_file
from zarrfs.zarr import v2, v3
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import load_json, strict_json
from zarrfs.zarr.model import ArrayMetadata
from zarrfs.zarr.translation import translate

if TYPE_CHECKING:
    from zarrfs.views.chunks import Chunks, StoredAt  # imports numpy, which would delay the start of a mount

_Entry = tuple[Iterator[str], Info, bool]  # names in the view, entry in the source, is a directory

_KNOWN = 65_536  # nodes whose documents to remember
_INDEXES = 32 << 20  # bytes of indexes of shards to cache, and to read concurrently
_AT_ONCE = 32  # most indexes of shards to read concurrently
_DOCUMENTS = {2: (".zarray", ".zattrs", ".zgroup"), 3: ("zarr.json",)}  # sorted


class _TranslatedNode(NamedTuple):
    """A node as it appears in the view."""

    node: Node
    documents: dict[str, File]  # by name, sorted
    chunks: ChunkNames | None = None  # of an array that the version can express


class _Resolved(NamedTuple):
    """The meaning of a key that is not a document: the directory of a node, or a chunk (directory) at `source`."""

    translated: _TranslatedNode
    source: str = ""  # a chunk, or a directory of chunks
    directory: bool = False
    rest: str = ""  # the key below an array
    inner: tuple[int, ...] | None = None  # the index of a chunk within a shard


class TranslatedView(View):
    """A view of a hierarchy in Zarr v2 or v3. Listings begin with documents; the rest is in the source's order."""

    def __init__(self, store: Store, version: Literal[2, 3]) -> None:
        super().__init__(store, _INDEXES)
        self._version, self.name = version, f"v{version}"
        self._names = _DOCUMENTS[version]
        self._known_nodes: LRU[str, _TranslatedNode] = LRU(_KNOWN)

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        name = split_key(key)[1]
        if name in self._names:
            return await super().info(key)
        resolved = await self._resolve_key(key)
        if not resolved.source:
            return await self._directory_info(resolved.translated.node, name)
        if resolved.inner is not None:
            return (await self._inner_at(key, resolved, resolved.inner)).entry(name)
        with chunk_errors(resolved.source):
            info = _as_chunk_info(await self.lower.info(resolved.source, sized), resolved.directory)
        if resolved.directory and info.kind is not Kind.DIRECTORY:
            raise NotFound(key)
        return info._replace(name=name, links=1) if resolved.directory else info._replace(name=name)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        if split_key(prefix)[1] in self._names:
            await self.find(prefix)
            raise NotDirectory(prefix)
        resolved = await self._resolve_key(prefix)
        if resolved.source and not resolved.directory:
            raise NotDirectory(prefix)
        node, chunks = resolved.translated.node, resolved.translated.chunks
        if node.childless:
            await self.hierarchy.check(prefix, node)  # before chunks are left out, which its array may have now
        if not resolved.rest and (not after or after in self._names):
            for name, file in resolved.translated.documents.items():
                if name > after:
                    yield self.entry(name, file)
            after = ""
        if chunks is not None:
            async for info in (self._list_inner if chunks.inner else self._list_chunks)(resolved, chunks, after):
                yield info
        elif not node.childless:
            async for info in self.hierarchy.children(node, after):
                if info.name in self._names:
                    self.leave_out(join_key(node.path, info.name), "has the name of a document")
                else:
                    yield info._replace(links=1, size=0)

    async def open(self, key: str) -> Value:
        if split_key(key)[1] in self._names:
            return await super().open(key)
        resolved = await self._resolve_key(key)
        if resolved.directory:
            await self.info(key)  # raises NotFound if it does not exist
            raise IsDirectory(key)
        with chunk_errors(resolved.source):
            if resolved.inner is None:
                return await self.lower.open(resolved.source)
            at = await self._inner_at(key, resolved, resolved.inner)
            return at.range(key, await self.lower.open(at.key))

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        if split_key(key)[1] in self._names:
            return await super().locate(key)
        resolved = await self._resolve_key(key)
        if not resolved.source or resolved.directory:
            return {}
        if resolved.inner is None:
            return await self.lower.locate(resolved.source, shown)
        at = await self._inner_at(key, resolved, resolved.inner)
        where = await self.lower.locate(at.key, shown)
        start = where.get("offset", 0) + at.offset
        where = {"url": where["url"]} if "url" in where else {"shard": at.key}
        return where | {"offset": start, "length": at.length}

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why arrays at or below `key` are left out, by path, of those looked up so far."""
        node, rest = await self.hierarchy.find(key)
        if rest:
            return {}
        self._translate(node)
        return await super().left_out(key)

    @property
    def remote(self) -> bool:
        return self.lower.remote

    async def prefetch(self, keys: Sequence[str]) -> None:
        sources = []
        for key in keys:
            try:
                resolved = await self._resolve_key(key)
            except (NotFound, ReadError):  # also a document
                continue
            if resolved.source and not resolved.directory and resolved.inner is None:
                sources.append(resolved.source)
        await self.lower.prefetch(sources)

    # -- keys

    async def find(self, key: str) -> File:
        """Return the document at `key`."""
        parent, name = split_key(check_key(key))
        node, rest = await self.hierarchy.find(parent)
        documents = self._translate(node).documents
        if rest or name not in documents:
            raise NotFound(key)
        return documents[name]

    async def _resolve_key(self, key: str) -> _Resolved:
        """Resolve a key that is not a document, without checking that a chunk exists. Raise NotFound."""
        check_key(key, root=True)
        node, rest = await self.hierarchy.find(key)
        translated = self._translate(node)
        if not rest:
            return _Resolved(translated, directory=True)
        if node.childless:
            await self.hierarchy.check(key, node)  # before a chunk is absent: its array may have other names now
        if translated.chunks is not None:
            source, directory = translated.chunks.source(rest)
            if source is not None:
                index = translated.chunks.index(rest) if translated.chunks.inner and not directory else None
                return _Resolved(translated, _joined(node.chunks, source), directory, rest, index)
        raise NotFound(key)

    # -- nodes and their documents

    def _translate(self, node: Node) -> _TranslatedNode:
        known = self._known_nodes.get(node.path)
        if known is not None and known.node is node:
            return known
        try:
            translated = self._new_translation(node)
            self._left_out.pop(node.path, None)
        except MetadataError as exc:
            self.leave_out(node.path, str(exc))
            translated = _TranslatedNode(node, {})
        self._known_nodes.put(node.path, translated)
        return translated

    def _new_translation(self, node: Node) -> _TranslatedNode:
        """Translate the documents of a node. Raise MetadataError if the version cannot express it."""
        metadata = node.metadata
        if node.unsupported and node.childless:
            raise MetadataError(str(node.problem))
        if metadata is None:
            # a broken node that need not be an array may be one or a group
            names = self._names[:1] if node.childless else self._names[::2]
            return _TranslatedNode(node, dict.fromkeys(names, text_file(node, b"")))
        chunks: ChunkNames | None = None
        if isinstance(metadata, ArrayMetadata):
            translation = translate(metadata, self._version)
            document, text = translation.document, node.text
            if self._version == 2 or metadata.generation != "v3" or document:
                own = load_json(text) if self._version == 3 and text else {}
                text = strict_json({**own, **document})
            documents = {self._names[0]: text}
            chunks = ChunkNames(metadata, translation.keys, translation.inner)
        elif self._version == 3:
            text = node.text
            if b"consolidated_metadata" in text:
                text = strict_json({k: v for k, v in load_json(text).items() if k != "consolidated_metadata"})
            documents = {"zarr.json": text or strict_json(v3.group_json(metadata))}
        else:
            documents = {".zgroup": strict_json(v2.GROUP_DOCUMENT)}
        if self._version == 2 and (attributes := v2.attributes_json(metadata)):
            documents[".zattrs"] = strict_json(attributes)
        return _TranslatedNode(node, {name: text_file(node, documents[name]) for name in sorted(documents)}, chunks)

    async def _directory_info(self, node: Node, name: str) -> Info:
        try:
            info = await self.lower.info(node.chunks, sized=False)
        except NotFound:  # a node without chunks in an experimental v3 store
            info = Info(name, Kind.DIRECTORY)
        return Info(name, Kind.DIRECTORY, 0, info.mode, info.mtime_ns)

    # -- inner chunks of shards

    async def _chunks_of(self, translated: _TranslatedNode) -> Chunks:
        """Return the inner chunks of an array."""
        if not self._readers:  # imports numpy
            await trio.to_thread.run_sync(importlib.import_module, "zarrfs.views.flat")
        return self.reader(translated.node).chunks

    async def _inner_at(self, key: str, resolved: _Resolved, index: tuple[int, ...]) -> StoredAt:
        """Return where an inner chunk is stored. Raise NotFound and ReadError."""
        at = await (await self._chunks_of(resolved.translated)).stored_at(index)
        if at is None:
            raise NotFound(key)
        return at

    # -- listings

    async def _list_chunks(self, resolved: _Resolved, chunks: ChunkNames, after: str) -> AsyncIterator[Info]:
        """Yield chunks and directories of chunks."""
        start = split_key(chunks.source(join_key(resolved.rest, after))[0] or "")[1] if after else ""
        async for names, info, is_directory in self._entries(resolved, chunks, start):
            for name in names:
                yield _as_chunk_info(info, is_directory)._replace(name=name, links=1 if is_directory else info.links)

    async def _list_inner(self, resolved: _Resolved, chunks: ChunkNames, after: str) -> AsyncIterator[Info]:
        """Yield the inner chunks of the shards in a directory, or directories of them, shard by shard.

        Directories are listed by the names in the source alone. To list chunks, the indexes of their shards are read;
        if the index of a shard is damaged, all its chunks are listed, as unreadable.
        """
        start = split_key(chunks.source(join_key(resolved.rest, after))[0] or "")[1] if after else ""
        shards = [entry async for entry in self._entries(resolved, chunks)]
        first = next((at for at, (_, info, _) in enumerate(shards) if info.name == start), None)
        every: Iterator[tuple[str, Info, bool]] = (
            (name, info, is_directory) for names, info, is_directory in shards[first or 0 :] for name in names
        )
        if first is not None:
            every = itertools.islice(itertools.dropwhile(lambda entry: entry[0] != after, every), 1, None)
        stored = await self._chunks_of(resolved.translated)
        at_once = max(1, min(_AT_ONCE, _INDEXES // max(stored.index_length, 1)))
        found: dict[str, Info] = {}

        async def look(entry: tuple[str, Info, bool]) -> None:
            name, info, is_directory = entry
            try:
                if is_directory:
                    found[name] = _as_chunk_info(info, True)._replace(name=name, links=1)
                elif at := await stored.stored_at(chunks.index(join_key(resolved.rest, name)) or ()):
                    found[name] = at.entry(name)
            except ReadError as exc:
                found[name] = Info(name, Kind.FILE, 1, unreadable=exc.reason)

        while batch := list(itertools.islice(every, at_once)):
            await for_each(look, batch)
            for name, _, _ in batch:
                if name in found:
                    yield found.pop(name)

    async def _entries(self, resolved: _Resolved, chunks: ChunkNames, after: str = "") -> AsyncIterator[_Entry]:
        """Yield the entries of chunks, or directories of chunks, in a source directory."""
        directory = _joined(resolved.translated.node.chunks, chunks.source(resolved.rest)[0] or "")
        try:
            async for info in self.lower.list_dir(directory, after):
                is_directory = info.kind is Kind.DIRECTORY
                names = chunks.names(resolved.rest, info.name, is_directory)
                if names is None and (is_directory or info.unreadable):
                    is_directory = not is_directory  # a directory in place of a chunk, or the reverse
                    names = chunks.names(resolved.rest, info.name, is_directory)
                if names is not None:
                    yield names, info, is_directory
        except NotFound:
            if resolved.rest:
                raise
        except NotDirectory as exc:
            raise ReadError(directory, FILE_ABOVE) from exc


def _as_chunk_info(info: Info, directory: bool) -> Info:
    """Return the entry of a chunk or a directory of chunks; a directory in the place of a chunk is unreadable."""
    if directory and info.unreadable:
        return info._replace(kind=Kind.DIRECTORY, size=0)  # listing it, or reading a chunk in it, raises the error
    if directory or info.kind is not Kind.DIRECTORY:
        return info
    return info._replace(kind=Kind.FILE, size=1, links=1, unreadable=DIRECTORY)


def _joined(directory: str, key: str) -> str:
    return join_key(directory, key) if key else directory
