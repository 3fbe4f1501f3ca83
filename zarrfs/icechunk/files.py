"""Parsers of the files of an Icechunk repository: header, repository file, snapshots and manifests.

Source: https://icechunk.io/en/latest/reference/spec/ (versions 1, 2 and 2.1) and the schemas quoted there.
"""

from __future__ import annotations

import base64
import contextlib
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from zarrfs.icechunk.flatbuffers import I32, U8, U32, U64, DamagedBuffer, Table, cut, layout, vector_at
from zarrfs.zarr.compressors import zstd
from zarrfs.zarr.errors import CodecError

MAGIC = "ICE🧊CHUNK".encode()
NEWEST = 2  # the newest format that this module can read
SNAPSHOT, MANIFEST, REPOSITORY = 1, 2, 6  # types of files
_HEADER = 39  # bytes: magic 12, implementation 24, format 1, type 1, compression 1
_KINDS = {SNAPSHOT: "snapshot", MANIFEST: "manifest", REPOSITORY: "repository file"}
ID = re.compile("[0-9A-HJKMNP-TV-Z]{20}")  # Crockford's base 32 of 12 bytes
_CROCKFORD = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789ABCDEFGHJKMNPQRSTVWXYZ")
_LATEST = (2**63 - 1) // 1000  # microseconds since 1970; the index stores nanoseconds in 64 bits with a sign
_LOCATION_MAX = 65_536  # bytes of a URL after decompression

# (coordinates, inline bytes, id of the chunk's file, URL, ETag, last change in seconds, offset, length)
ChunkReference = tuple[
    tuple[int, ...], bytes | None, bytes | None, str | None, str | None, int, int, int
]
Extents = tuple[tuple[int, int], ...]  # [from, to) in each dimension; () means all chunks


class SnapshotNode(NamedTuple):
    """A group or array of a snapshot."""

    path: str  # absolute
    ident: bytes
    document: bytes  # the content of zarr.json
    rank: int | None  # number of dimensions; None: a group
    manifests: tuple[tuple[bytes, Extents], ...]


class Snapshot(NamedTuple):
    """A snapshot without its chunks."""

    ident: str
    message: str
    flushed_at: int  # microseconds since 1970
    nodes: tuple[SnapshotNode, ...]


class Repository(NamedTuple):
    """The repository file of format 2: the ids of snapshots by the names of branches and tags."""

    branches: dict[str, str]
    tags: dict[str, str]
    snapshots: frozenset[str]


def name_of(ident: bytes) -> str:
    """Return the name of the file with the 12-byte id `ident`."""
    return base64.b32encode(ident)[:20].decode().translate(_CROCKFORD)


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """Turn exceptions of struct, slicing and decoders, which a damaged buffer causes, into Damaged."""
    try:
        yield
    except (struct.error, UnicodeDecodeError, IndexError, OverflowError) as exc:
        raise DamagedBuffer(f"damaged: {exc}") from exc


def payload(data: bytes, kind: int, limit: int) -> bytes:
    """Return the FlatBuffer in a file of type `kind`.

    Raise DamagedBuffer if the file is of another type, of a newer format, or damaged, or if decompression would
    exceed `limit` bytes.
    """
    import zstandard

    name = _KINDS[kind]
    if len(data) < _HEADER or not data.startswith(MAGIC):
        raise DamagedBuffer(f"is no {name} of Icechunk")
    version, found, compression = data[36], data[37], data[38]
    if version > NEWEST:
        raise DamagedBuffer(f"has format {version} of Icechunk; this zarrfs reads up to {NEWEST}: take a newer one")
    if found != kind or compression > 1 or not version:
        raise DamagedBuffer(f"is no {name} of Icechunk: type {found}, compression {compression}, format {version}")
    if not compression:
        return data[_HEADER:]
    try:
        return zstd(memoryview(data)[_HEADER:], limit)
    except (CodecError, zstandard.ZstdError) as exc:
        raise DamagedBuffer(f"damaged, or larger than -o document_limit=: {exc}") from exc


def repository(buffer: bytes) -> Repository:
    """Parse the payload of a repository file. Raise DamagedBuffer."""
    with _checked():
        table = Table.root(buffer)
        idents = [name_of(_ident(one, 12)) for one in table.tables(4)]

        def refs(slot: int) -> dict[str, str]:
            return {one.text(0) or "": idents[one.number(1, U32)] for one in table.tables(slot)}

        return Repository(refs(2), refs(1), frozenset(idents))


def snapshot(buffer: bytes, limit: int) -> Snapshot:
    """Parse the payload of a snapshot.

    Raise DamagedBuffer, also if documents and paths together exceed `limit` bytes.
    """
    with _checked():
        table = Table.root(buffer)
        nodes = []
        for one in table.tables(2):
            node = _node(one)
            limit -= len(node.document) + len(node.path) + 1
            if limit < 0:
                raise DamagedBuffer("more metadata than the limit allows")
            nodes.append(node)
        ident = name_of(_ident(table, 12))
        flushed_at = table.number(3, U64)
        if flushed_at > _LATEST:
            raise DamagedBuffer("damaged: a time after the year 2262")
        return Snapshot(ident, table.text(4) or "", flushed_at, tuple(nodes))


def _node(table: Table) -> SnapshotNode:
    path, document = table.text(1), table.data(2)
    if path is None or document is None:
        raise DamagedBuffer("damaged: a node without path or metadata")
    kind, content = table.number(3, U8), table.table(4)
    if kind not in (1, 2) or content is None:
        raise DamagedBuffer(f"a node of unknown type {kind}")
    if kind == 2:
        return SnapshotNode(path, _ident(table, 8), document, None, ())
    rank = content.vector(3, 4)[1] or content.vector(0, 16)[1]
    manifests = []
    for one in content.tables(2):
        start, count = one.vector(1, 8)
        extents = tuple(
            (U32(one.buffer, at)[0], U32(one.buffer, at + 4)[0]) for at in range(start, start + 8 * count, 8)
        )
        manifests.append((_ident(one, 12), extents))
    return SnapshotNode(path, _ident(table, 8), document, rank, tuple(manifests))


def manifest(buffer: bytes) -> Iterator[tuple[bytes, Iterator[ChunkReference]]]:
    """Parse the payload of a manifest: yield (id, chunk references) of each array. Raise DamagedBuffer."""
    with _checked():
        table = Table.root(buffer)
        locations = _Locations(table.data(2))
        for one in table.tables(1):
            yield _ident(one, 8), _references(buffer, *one.vector(1, 4), locations)


class _Locations:
    """A decompressor of virtual chunks' URLs, with the dictionary of a manifest."""

    def __init__(self, dictionary: bytes | None) -> None:
        self._dictionary = dictionary
        self._decoder: Any = None

    def __call__(self, data: bytes) -> str:
        import zstandard

        if not self._dictionary:
            raise DamagedBuffer("damaged: compressed URLs without a dictionary")
        try:
            if self._decoder is None:
                dictionary = zstandard.ZstdCompressionDict(self._dictionary)
                self._decoder = zstandard.ZstdDecompressor(dict_data=dictionary)
            size = zstandard.frame_content_size(data)
            if size > _LOCATION_MAX:
                raise DamagedBuffer(f"damaged: a URL of {size} bytes")
            found: bytes = self._decoder.decompress(data, max_output_size=_LOCATION_MAX)
        except zstandard.ZstdError as exc:
            raise DamagedBuffer(f"damaged: {exc}") from exc
        return found.decode()


def _references(buffer: bytes, start: int, count: int, locations: _Locations) -> Iterator[ChunkReference]:
    # a manifest may have millions of chunks, so this does without Table and reads each layout once
    layouts: dict[int, tuple[int, ...]] = {}
    shapes: dict[int, struct.Struct] = {}
    with _checked():
        for slot in range(start, start + 4 * count, 4):
            at = slot + U32(buffer, slot)[0]
            vtable = at - I32(buffer, at)[0]
            fields = layouts.get(vtable)
            if fields is None:
                fields = layouts[vtable] = layout(buffer, vtable, 9)
            index, inline, offset, length, chunk, location, etag, changed, packed = fields
            if not index:
                raise DamagedBuffer("damaged: a chunk without coordinates")
            first, rank = vector_at(buffer, at + index, 4)
            shape = shapes.get(rank)
            if shape is None:
                shape = shapes[rank] = struct.Struct(f"<{rank}I")
            coordinates = shape.unpack_from(buffer, first)
            where = (U64(buffer, at + offset)[0] if offset else 0, U64(buffer, at + length)[0] if length else 0)
            if inline:
                begin, size = vector_at(buffer, at + inline, 1)
                yield coordinates, buffer[begin : begin + size], None, None, None, 0, 0, size
            elif chunk:
                yield coordinates, None, cut(buffer, at + chunk, 12), None, None, 0, *where
            elif location or packed:
                begin, size = vector_at(buffer, at + (location or packed), 1)
                data = buffer[begin : begin + size]
                url = data.decode() if location else locations(data)
                tag = None
                if etag:
                    begin, size = vector_at(buffer, at + etag, 1)
                    tag = buffer[begin : begin + size].decode()
                yield coordinates, None, None, url, tag, U32(buffer, at + changed)[0] if changed else 0, *where
            else:
                raise DamagedBuffer("damaged: a chunk without a place")


def _ident(table: Table, size: int) -> bytes:
    """Return the id in the first field of a table. Raise DamagedBuffer if it is absent."""
    found = table.fixed(0, size)
    if found is None:
        raise DamagedBuffer("damaged: an id is missing")
    return found
