"""The check of a store: every value is read once, in bounded memory; chunks of arrays are decoded.

An invalid metadata document is a fault, and so is a file in the directory of an array that is no chunk of its grid.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator

import trio

from zarrfs.concurrency.budget import MemoryBudget
from zarrfs.config.shares import WHOLE, Share
from zarrfs.copying.array_survey import nodes_of
from zarrfs.copying.check_report import BAD_METADATA, OUTSIDE, UNDECODED, ArrayCheck, CheckReport, Unsound
from zarrfs.errors import NotDirectory, NotFound, ReadError, ZarrfsError
from zarrfs.references.parquet import ParquetStore
from zarrfs.store.api import Info, Kind, Store, split_key, walk
from zarrfs.store.traversal import PIECE, check_length, extents, follow
from zarrfs.system.buffers import Buffer
from zarrfs.system.cpus import usable
from zarrfs.views.hierarchy import Hierarchy, Node
from zarrfs.zarr import DOCUMENT_MAX, DOCUMENTS, is_litter
from zarrfs.zarr.consolidated import consolidated
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.model import ArrayMetadata

log = logging.getLogger(__name__)

READERS = 16  # files read at the same time
_INLINE = 16 << 10  # bytes: decoding no more than these is faster than moving to a thread


async def check(
    store: Store, key: str, report: CheckReport, memory: int = 256 << 20, decode: bool = True, share: Share = WHOLE
) -> None:
    """Read `key`, or everything below it, and fill `report`.

    Hold at most `memory` bytes of data, and as many of chunks that are decoded. Read only the files of `share`; every
    share examines the metadata of arrays and lists all directories.
    """
    await _Check(store, report, memory, decode).run(key, share)


class _Check:
    """One call of check()."""

    def __init__(self, store: Store, report: CheckReport, memory: int, decode: bool) -> None:
        self._store, self._report, self._memory, self._decode = store, report, memory, decode
        self._piece = max(64 << 10, min(PIECE, memory // (2 * READERS)))
        self._budget = MemoryBudget(memory)
        self._threads = trio.CapacityLimiter(usable())
        self._objects = trio.CapacityLimiter(1)  # one at a time: the memory that objects take is not known in advance
        self._arrays: dict[str, ArrayCheck] = {}  # by the directory of their chunks
        self._invalid: dict[str, str] = {}  # by key of a metadata document that can be read: why it is invalid
        self._unexamined: list[Exception] = []  # why groups were not examined to their end

    async def run(self, key: str, share: Share) -> None:
        await self._expect(key, share)
        await self._find_nodes(key)
        send, receive = trio.open_memory_channel[tuple[str, Info]](READERS)
        async with trio.open_nursery() as nursery:
            for _ in range(READERS):
                nursery.start_soon(self._look, receive.clone())
            receive.close()
            async with send:
                async for at, info in self._entries(key):
                    if share.has(at):
                        await send.send((at, info))
                    else:
                        self._invalid.pop(at, None)
        for at, reason in self._invalid.items():  # of the array that contains `key`
            if share.has(at):
                self._report.add(at, Unsound(BAD_METADATA, reason))
        if self._report.clean:  # else the walk has met the same errors
            for exc in self._unexamined:
                self._report.add(getattr(exc, "key", key), exc)
        if not share.index:
            await self._count_absent_records(key)

    async def _expect(self, key: str, share: Share) -> None:
        """Set the expected counts, if the store knows them, and the entries that the compiler left out."""
        report = self._report
        if not key and (usage := await self._store.usage()).counted:
            report.expected_files, report.expected_bytes = usage.files // share.count, usage.bytes // share.count
        problems = [
            (entry, rule)
            for entry, rule in await self._store.problems()
            if not key or entry == key or entry.startswith(key + "/")
        ]
        report.left_out, report.problems = len(problems), problems[: report.keep]

    async def _entries(self, key: str) -> AsyncIterator[tuple[str, Info]]:
        top = await self._store.info(key)
        if top.kind is Kind.DIRECTORY:
            async for found in walk(self._store, key, self._report.add):
                yield found
        else:
            yield key, top

    async def _count_absent_records(self, key: str) -> None:
        """Count the absent record files of a Parquet set, after all record files have been read."""
        try:
            found = await self._store.absences(key) if isinstance(self._store, ParquetStore) else None
        except ReadError as exc:
            self._report.add(key, exc)
        else:
            self._report.absent_records = found.absent if found is not None else 0

    # -- entries

    async def _look(self, receive: trio.MemoryReceiveChannel[tuple[str, Info]]) -> None:
        async with receive:
            async for key, info in receive:
                if info.kind is Kind.SYMLINK:
                    await self._look_at_link(key)
                elif info.kind is Kind.FILE:
                    await self._look_at_file(key, info)
                else:
                    found, rest = self._array_of(key)
                    if found is not None and found.index(rest) is not None:
                        found.bad += 1
                        self._report.add(key, Unsound("unreadable", "a directory lies in the place of a chunk"))

    async def _look_at_link(self, key: str) -> None:
        """Count a symbolic link. A dangling link is not an error, because its author may intend it."""
        self._report.links += 1
        try:
            await follow(self._store, key)
        except (NotFound, NotDirectory):
            self._report.dangling += 1
        except (ZarrfsError, OSError):
            pass  # the entry with this error is reported itself

    async def _look_at_file(self, key: str, info: Info) -> None:
        found, rest = self._array_of(key)
        index = None if found is None else found.index(rest)
        name = split_key(key)[1]
        is_chunk = found is not None and found.array is not None and rest not in DOCUMENTS and not is_litter(name)
        bad: Exception | None = None
        try:
            if info.size is None:
                info = await self._store.info(key)
            if found is not None and index is not None and found.decodes:
                await self._decode_file(found, key, info.size or 0, index)
                found.decoded += 1
            elif name == ".zmetadata" and (info.size or 0) <= DOCUMENT_MAX:
                await self._parse_consolidated(key, info.size or 0)
            else:
                await self._read(key, info)
            if key in self._invalid:
                raise Unsound(BAD_METADATA, self._invalid[key])  # noqa: TRY301
            if is_chunk and found is not None and found.array is not None and index is None:
                first = found.array.keys.key((0,) * found.array.ndim)
                grid = f"the grid {list(found.array.grid.counts)}, whose first is {first}"
                raise Unsound(OUTSIDE, f"no chunk of {grid}")  # noqa: TRY301
        except Exception as exc:
            if not isinstance(exc, ZarrfsError | OSError):
                log.debug("%s: unexpected failure", key, exc_info=exc)
            bad = exc
        self._invalid.pop(key, None)
        if found is not None and is_chunk:
            found.chunks += index is not None
            found.bad += bad is not None
        if bad is None:
            self._report.ok += 1
        else:
            self._report.add(key, bad, await self._url_of(key))

    async def _parse_consolidated(self, key: str, size: int) -> None:
        data = await self._get(key, 0, size)
        try:
            consolidated(".zmetadata", data)
        except MetadataError as exc:
            raise Unsound(BAD_METADATA, str(exc)) from exc

    async def _read(self, key: str, info: Info) -> None:
        """Read the data of a file in pieces, without its holes."""
        async for start, length in extents(self._store, key, info):
            for at in range(start, start + length, self._piece):
                await self._get(key, at, min(self._piece, start + length - at))

    async def _get(self, key: str, start: int, length: int) -> Buffer:
        data = await self._store.get(key, start, length)
        self._report.bytes += len(data)
        check_length(key, len(data), start, length)
        return data

    async def _url_of(self, key: str) -> str | None:
        """Return the URL of the bytes of `key`, or of its first region; None if there is no URL."""
        try:
            where = await self._store.locate(key)
        except (ZarrfsError, OSError):
            return None
        url: str | None = where.get("url") or next((part["url"] for part in where.get("regions", ())), None)
        return url

    # -- chunks

    def _array_of(self, key: str) -> tuple[ArrayCheck | None, str]:
        """Return (the array that contains a file, the file's key relative to it)."""
        prefix, rest = split_key(key)
        while self._arrays:
            found = self._arrays.get(prefix)
            if found is not None:
                return found, rest
            if not prefix:
                break
            prefix, name = split_key(prefix)
            rest = f"{name}/{rest}"
        return None, key

    async def _decode_file(self, found: ArrayCheck, key: str, size: int, at: tuple[int, ...]) -> None:
        """Decode the chunk with grid index `at`; a shard that does not fit in memory chunk by chunk."""
        assert found.array is not None
        sharding = found.sharding
        if sharding is None or _memory_of(found.array, size) <= self._memory:
            await self._decode_chunk(key, (0, size), found.array, at)
            return
        if sharding.index_length > self._memory:
            raise Unsound(UNDECODED, f"an index of {sharding.index_length} bytes: memory_limit= is too low")
        try:
            start, _stop = sharding.index_range(size)
            index = sharding.read_index(await self._get(key, start, sharding.index_length), size)
            for number, place in enumerate(itertools.product(*map(range, sharding.per_shard))):
                if (where := index[number]) is not None:
                    steps = zip(at, sharding.per_shard, place, strict=True)
                    inner = tuple(shard * count + within for shard, count, within in steps)
                    await self._decode_chunk(key, where, sharding.inner, inner)
        except MetadataError as exc:
            raise Unsound(UNDECODED, str(exc)) from exc

    async def _decode_chunk(
        self, key: str, where: tuple[int, int], array: ArrayMetadata, index: tuple[int, ...]
    ) -> None:
        """Decode the chunk with grid index `index`, which is stored at `where` = (start, length) of a file."""
        from zarrfs.zarr.codecs import decode_chunk_at

        memory = _memory_of(array, where[1])
        if memory > self._memory:
            raise Unsound(UNDECODED, f"{where[1]} bytes of a chunk of {array.chunk_bytes}: memory_limit= is too low")
        await self._budget.take(memory)
        try:
            data = await self._get(key, *where)
            if array.dtype.itemsize and array.chunk_bytes + len(data) <= _INLINE:
                decode_chunk_at(array, data, index)
            else:
                limiter = self._threads if array.dtype.itemsize else self._objects
                await trio.to_thread.run_sync(decode_chunk_at, array, data, index, limiter=limiter)
        except MetadataError as exc:
            raise Unsound(UNDECODED, str(exc)) from exc
        finally:
            self._budget.give(memory)

    # -- metadata

    async def _find_nodes(self, key: str) -> None:
        """Find the arrays at or below `key`, or the array that contains it, and invalid metadata."""
        hierarchy = Hierarchy(self._store)
        try:
            above, _rest = await hierarchy.find(key)
            start = above.path if above.childless else key
            async for node in nodes_of(self._store, hierarchy, start, self._unexamined.append):
                if node.documents == (node.path,):
                    continue  # not a node, but an unreadable entry
                if node.childless:
                    self._add_array(node)
                elif node.problem is not None:
                    self._invalid[node.documents[0]] = node.problem
        except (ZarrfsError, OSError) as exc:
            self._unexamined.append(exc)

    def _add_array(self, node: Node) -> None:
        from zarrfs.zarr.codecs import check_codecs, sharding_of

        if node.problem is not None and split_key(node.documents[0])[1] == "meta":
            return  # other programs write files of this name, too
        array = node.metadata if isinstance(node.metadata, ArrayMetadata) else None
        found = self._arrays[node.chunks] = ArrayCheck(node.path, array)
        self._report.arrays.append(found)
        if node.unsupported:
            found.note = f"{node.problem}: its files are only read"
        elif array is None:
            found.bad += 1
            self._invalid[node.documents[0]] = str(node.problem)
        elif self._decode:
            if reasons := check_codecs(array):
                found.bad, found.note = 1, "; ".join(reasons)
                self._report.add(node.path, Unsound(UNDECODED, f"{found.note}: chunks are only read"))
                return
            found.sharding = sharding_of(array)
            if _memory_of(array if found.sharding is None else found.sharding.inner, 0) > self._memory:
                found.note = f"chunks of {array.chunk_bytes} bytes do not fit in memory_limit=: they are only read"
            found.decodes = found.note is None


def _memory_of(array: ArrayMetadata, size: int) -> int:
    """Return the bytes of memory that decoding a chunk of `size` bytes takes. Filters make copies.

    Memory for objects, and for text that a codec of another package parses, is not known in advance and not counted.
    """
    from zarrfs.zarr.codecs import decoder_of
    from zarrfs.zarr.representation import OBJECTS_LIMIT

    if not array.dtype.itemsize:
        return size
    limit = decoder_of(array).limit
    return size + 2 * (array.chunk_bytes if limit >= OBJECTS_LIMIT > array.chunk_bytes else limit)
