"""The check of arrays: all chunks decode, no file is outside the grid, and metadata documents agree."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.concurrency.budget import MemoryBudget
from zarrfs.copying.array_survey import nodes_of
from zarrfs.copying.check_report import CheckReport, Unsound
from zarrfs.errors import NotDirectory, NotFound, StoreError, ZarrfsError
from zarrfs.store.api import Store, join_key, split_key
from zarrfs.store.traversal import check_length, follow
from zarrfs.system.buffers import Buffer
from zarrfs.system.cpus import usable
from zarrfs.views.hierarchy import Hierarchy, Node
from zarrfs.zarr import DOCUMENTS
from zarrfs.zarr.consolidated import consolidated
from zarrfs.zarr.documents import DOCUMENT_MAX, is_litter
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import load_json
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

if TYPE_CHECKING:
    from zarrfs.zarr.codecs import Sharding

BAD_METADATA, UNDECODED, OUTSIDE = "bad metadata", "undecodable", "outside grid"  # in check_report.BAD_KINDS
_V2_DOCUMENTS = (".zarray", ".zgroup", ".zattrs")
_INLINE = 16 << 10  # bytes: decoding no more than these is faster than moving to a thread


@dataclasses.dataclass
class ArrayCheck:
    """The findings in one array."""

    path: str
    array: ArrayMetadata | None  # None: its metadata is invalid
    total: int = 0  # chunks of the grid
    chunks: int = 0  # files of such chunks that were checked, also those that could not be read
    decoded: int = 0  # chunks that were decoded
    bad_files: int = 0  # chunks that cannot be read or do not decode, and files outside the grid
    broken: int = 0  # faults of the array itself: invalid metadata, an unknown codec
    note: str | None = None  # why chunks are not decoded

    @property
    def bad(self) -> int:
        """The number of all faults."""
        return self.bad_files + self.broken

    def as_json(self) -> dict[str, Any]:
        """Return the array as JSON."""
        return {
            "path": self.path, "chunks_total": self.total, "chunks": self.chunks, "decoded": self.decoded,
            "bad": self.bad, "note": self.note,
        }  # fmt: skip


class ArrayChecks:
    """The arrays at or below a key, for check(): which files it must read whole, and the check of their content.

    `memory` limits the bytes of chunks, both encoded and decoded, that are held at the same time.
    """

    def __init__(self, store: Store, decode: bool, memory: int) -> None:
        self.arrays: list[ArrayCheck] = []
        self._store, self._decode, self._memory = store, decode, memory
        self._budget = MemoryBudget(memory)
        self._threads = trio.CapacityLimiter(usable())
        self._objects = trio.CapacityLimiter(1)  # one at a time: the memory that objects take is not known in advance
        self._sharding: dict[str, Sharding] = {}  # by path of the array
        self._places: dict[str, ArrayCheck] = {}  # arrays by the directory of their chunks
        # by key of a document that consolidated metadata contains: the key of that metadata, the digest of the copy
        self._said: dict[str, tuple[str, bytes]] = {}
        self._tops: list[tuple[str, str]] = []  # (group with consolidated metadata, file name of that metadata)

    async def find(self, key: str, report: CheckReport) -> None:
        """Find the arrays at or below `key`, or the array that contains it; add invalid metadata to `report`."""
        hierarchy = Hierarchy(self._store)
        try:
            above, _rest = await hierarchy.find(key)
            async for node in nodes_of(hierarchy, above.path if above.leaf else key):
                if node.leaf:
                    self._add(node, report)
                elif isinstance(node.metadata, GroupMetadata):
                    await self._note_consolidated(node, report)
                elif node.problem is not None:
                    report.add(node.documents[0], Unsound(BAD_METADATA, node.problem))
        except (ZarrfsError, OSError) as exc:
            report.add(getattr(exc, "key", key), exc)

    def of(self, key: str) -> tuple[ArrayCheck | None, str]:
        """Return (the array that contains a file, the file's key relative to it)."""
        prefix, rest = split_key(key)
        while self._places:
            found = self._places.get(prefix)
            if found is not None:
                return found, rest
            if not prefix:
                break
            prefix, name = split_key(prefix)
            rest = f"{name}/{rest}"
        return None, key

    def whole(self, key: str, size: int) -> bool:
        """Return whether look() must read this file of `size` bytes, because its content has to be checked."""
        if split_key(key)[1] in DOCUMENTS and size <= min(DOCUMENT_MAX, self._memory // 2):
            return key in self._said or self._covered(key)
        found, rest = self.of(key)
        if found is None or found.array is None or found.note is not None or not self._decode:
            return False
        return self._is_chunk(found.array, rest)

    async def look(self, key: str, size: int, report: CheckReport) -> None:
        """Read a whole file and check its content. Raise Unsound if it is wrong, and the errors of Store.get()."""
        found, rest = self.of(key)
        array = None if found is None else found.array
        index = None if array is None else array.keys.index(rest, array.grid)
        if found is None or array is None or index is None:
            self._compare(key, await self._read(key, 0, size, report))
            return
        sharding = self._sharding.get(found.path)
        if sharding is not None and _takes(array, size) > self._memory:
            await self._look_at_shard(key, size, sharding, index, report)
        else:
            await self._look_at_chunk(key, (0, size), array, index, report)
        found.decoded += 1

    async def _read(self, key: str, start: int, length: int, report: CheckReport) -> Buffer:
        data = await self._store.get(key, start, length)
        report.read += len(data)
        check_length(key, len(data), start, length)
        return data

    async def _look_at_shard(
        self, key: str, size: int, sharding: Sharding, at: tuple[int, ...], report: CheckReport
    ) -> None:
        """Decode the shard with grid index `at` chunk by chunk, because the whole shard does not fit in memory."""
        if sharding.index_length > self._memory:
            raise Unsound(UNDECODED, f"an index of {sharding.index_length} bytes: memory_limit= is too low")
        try:
            start, _stop = sharding.index_range(size)
            index = sharding.read_index(await self._read(key, start, sharding.index_length, report), size)
        except MetadataError as exc:
            raise Unsound(UNDECODED, str(exc)) from exc
        places = itertools.product(*map(range, sharding.per_shard))
        for number, place in enumerate(places):
            try:
                where = index[number]
            except MetadataError as exc:
                raise Unsound(UNDECODED, str(exc)) from exc
            if where is not None:
                steps = zip(at, sharding.per_shard, place, strict=True)
                inner = tuple(shard * count + within for shard, count, within in steps)
                await self._look_at_chunk(key, where, sharding.inner, inner, report)

    async def _look_at_chunk(
        self, key: str, where: tuple[int, int], array: ArrayMetadata, index: tuple[int, ...], report: CheckReport
    ) -> None:
        """Decode the chunk with grid index `index`, which is stored at `where` = (start, length) of a file."""
        takes = _takes(array, where[1])
        if takes > self._memory:
            raise Unsound(UNDECODED, f"{where[1]} bytes of a chunk of {array.chunk_bytes}: memory_limit= is too low")
        await self._budget.take(takes)
        try:
            await self._decoded(array, await self._read(key, *where, report), index)
        finally:
            self._budget.give(takes)

    def ended(self, key: str, failed: bool) -> Unsound | None:
        """Count a file after it was read, or after reading it `failed`; return Unsound if it is outside the grid."""
        self._said.pop(key, None)
        found, rest = self.of(key)
        if found is None or found.array is None or rest in DOCUMENTS or is_litter(split_key(key)[1]):
            return None
        if self._is_chunk(found.array, rest):
            found.chunks += 1
            found.bad_files += failed
            return None
        found.bad_files += 1
        first = found.array.keys.key((0,) * found.array.ndim)
        return Unsound(OUTSIDE, f"no chunk of the grid {list(found.array.grid.counts)}, whose first is {first}")

    def passed(self, key: str) -> None:
        """Note that a file exists which another share of the check reads, so that missing() does not report it."""
        self._said.pop(key, None)

    def check_directory(self, key: str, report: CheckReport) -> None:
        """Report a directory that has the key of a chunk."""
        found, rest = self.of(key)
        if found is not None and self._is_chunk(found.array, rest):
            found.bad_files += 1
            report.add(key, Unsound("unreadable", "a directory lies in the place of a chunk"))

    async def missing(self, report: CheckReport) -> None:
        """Add documents to `report` that consolidated metadata contains but that do not exist."""
        for key, (said_by, digest) in self._said.items():
            if not _is_absence(key, digest) and not await self._is_linked(key):
                report.add(key, Unsound(BAD_METADATA, f"is not there, but {said_by} has it"))

    async def _is_linked(self, key: str) -> bool:
        """Return whether a document exists behind a symbolic link: its own, or one of a directory above it."""
        try:
            return await follow(self._store, key) is not None
        except (NotFound, NotDirectory):
            return False
        except (ZarrfsError, OSError):
            return True  # check() reports the entry with this error itself

    # -- parts

    def _add(self, node: Node, report: CheckReport) -> None:
        from zarrfs.zarr.codecs import check_codecs, sharding_of

        if node.problem is not None and split_key(node.documents[0])[1] == "meta":
            return  # other programs write files of this name, too
        array = node.metadata if isinstance(node.metadata, ArrayMetadata) else None
        found = ArrayCheck(node.path, array)
        self.arrays.append(found)
        self._places[node.chunks] = found
        if array is None:
            found.broken += 1
            at = node.documents[0] if node.documents else node.path
            report.add(at, Unsound(BAD_METADATA, str(node.problem)))
            return
        found.total = array.grid.size
        reasons = check_codecs(array)
        if reasons and self._decode:
            found.note = "; ".join(reasons)
            found.broken += 1
            report.add(node.path, Unsound(UNDECODED, f"{found.note}: chunks are only read"))
            return
        sharding = sharding_of(array)
        if sharding is not None:
            self._sharding[node.path] = sharding
        if self._decode and _takes(array if sharding is None else sharding.inner, 0) > self._memory:
            found.note = f"chunks of {array.chunk_bytes} bytes do not fit in memory_limit=: they are only read"

    def _is_chunk(self, array: ArrayMetadata | None, rest: str) -> bool:
        return array is not None and array.keys.index(rest, array.grid) is not None

    async def _decoded(self, array: ArrayMetadata, data: Buffer, index: tuple[int, ...]) -> None:
        from zarrfs.zarr.codecs import decode_chunk_at

        try:
            if array.dtype.itemsize and array.chunk_bytes + len(data) <= _INLINE:
                decode_chunk_at(array, data, index)
            else:
                limiter = self._threads if array.dtype.itemsize else self._objects
                await trio.to_thread.run_sync(decode_chunk_at, array, data, index, limiter=limiter)
        except MetadataError as exc:
            raise Unsound(UNDECODED, str(exc)) from exc

    # -- consolidated metadata

    async def _note_consolidated(self, group: Node, report: CheckReport) -> None:
        """Record the copies of documents below a group in its consolidated metadata."""
        assert isinstance(group.metadata, GroupMetadata)
        for name in ("zarr.json",) if group.metadata.generation == "v3" and group.documents else (".zmetadata",):
            key = join_key(group.chunks, name)
            try:
                found = consolidated(name, await self._store.get(key, 0, DOCUMENT_MAX))
            except StoreError:  # not there, or a directory
                continue
            except MetadataError as exc:
                report.add(key, Unsound(BAD_METADATA, str(exc)))
                continue
            if found is None:
                continue
            self._tops.append((group.chunks, name))
            for path, documents in found.items():
                for document, value in documents.items():
                    if path or document != "zarr.json":  # the group's own zarr.json contains no copy of itself
                        where = join_key(join_key(group.chunks, path) if path else group.chunks, document)
                        self._said.setdefault(where, (key, _digest(value)))

    def _covered(self, key: str) -> bool:
        """Return whether consolidated metadata should contain the document `key`."""
        prefix, name = split_key(key)
        return any(
            not top or prefix == top or prefix.startswith(top + "/")
            for top, said_by in self._tops
            if (name in _V2_DOCUMENTS if said_by == ".zmetadata" else name == "zarr.json" and prefix != top)
        )

    def _compare(self, key: str, data: Buffer) -> None:
        """Compare a document with its copy in consolidated metadata."""
        try:
            own = _digest(load_json(data))
        except MetadataError as exc:
            raise Unsound(BAD_METADATA, str(exc)) from exc
        said_by, digest = self._said.get(key, ("", None))
        if digest is None and not _is_absence(key, own):
            raise Unsound(BAD_METADATA, "consolidated metadata does not have it")
        if digest is not None and own != digest:
            raise Unsound(BAD_METADATA, f"differs from {said_by}")


def _is_absence(key: str, digest: bytes) -> bool:
    """Return whether a document means the same as no document: a .zattrs without attributes."""
    return split_key(key)[1] == ".zattrs" and digest == _digest({})


def _digest(document: Any) -> bytes:
    """Return a digest of a document's content, without the consolidated metadata in it."""
    if isinstance(document, dict):
        document = {name: value for name, value in document.items() if name != "consolidated_metadata"}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()


def _takes(array: ArrayMetadata, size: int) -> int:
    """Return the bytes of memory that decoding a chunk of `size` bytes takes. Filters make copies.

    Memory for objects, and for text that a codec of another package parses, is not known in advance and not counted.
    """
    from zarrfs.zarr.codecs import decoder_of
    from zarrfs.zarr.representation import OBJECTS_LIMIT

    if not array.dtype.itemsize:
        return size
    limit = decoder_of(array).limit
    return size + 2 * (array.chunk_bytes if limit >= OBJECTS_LIMIT > array.chunk_bytes else limit)
