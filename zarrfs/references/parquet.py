"""ParquetStore: a reference set in the Parquet layout. Opening it reads only `.zmetadata`.

The number of a chunk in the grid of its array gives its record file and row. Record files are read on demand, and the
memory of parsed ones is bounded. A record file that is unavailable or damaged fails only the reads of its own chunks.
If a record file does not exist, its chunks are absent: fsspec and kerchunk do not write a record file whose chunks are
all absent.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.config import urls
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError, SourceError, StoreError, TargetChanged
from zarrfs.references.keys import printable as shown
from zarrfs.references.parquet_metadata import DOCUMENT, Bound, ParquetSet, read_set
from zarrfs.references.parquet_records import ABSENT, UNKNOWN, RecordFile, Target, parse_record
from zarrfs.store.api import Info, Kind, Store, Usage, Value, join_key, split_key
from zarrfs.store.directory import FileSystemStore, Links
from zarrfs.store.remote import FsspecStore
from zarrfs.store.targets import TargetReader, Targets
from zarrfs.store.values import BytesValue
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import FLAT

if TYPE_CHECKING:
    from zarrfs.config.options import Options
    from zarrfs.documents.plan import Plan

log = logging.getLogger(__name__)

_ROW = 32  # estimated bytes of memory for a row
_LEAST = 64 << 20  # bytes that a record file may expand to, however small the memory limit
_RETRY = 10.0  # seconds before a record file that failed is read again
_FAILURES = 1024  # failures remembered
_SIZES = 16_384  # sizes of whole targets remembered
_AHEAD = 16  # record files read concurrently after an absent one
_LISTED = 65_536  # most chunks listed between two checkpoints, whatever the record_size
_CHANGED = "has changed since it was first read: the set is another one now"
_COUNTED = 1_000_000  # most record files that are counted by requesting each
_FETCHED = 16 << 20  # bytes of record files cached as they are, before they are parsed
_RECORD = re.compile(r"refs\.(0|[1-9][0-9]{0,18})\.parq", re.ASCII)


def open_set(plan: Plan, options: Options) -> ParquetStore:
    """Return the store for the plan of a set, without reading anything yet."""
    memory = memory_limit(options)
    share = memory // 4  # for record files; the rest is for bytes of targets
    targets = Targets(dataclasses.replace(options, memory_limit=memory - share), plan.base, plan.origin)
    return ParquetStore(plan, options, targets, share)


class Absences(NamedTuple):
    """The counts of absent and possible record files."""

    absent: int
    record_files: int


class Chunk(NamedTuple):
    """The location of a chunk's reference."""

    array: str
    record: int
    row: int


class _NoRecord:
    """The cache entry of a record file that does not exist."""

    def __len__(self) -> int:
        return 256  # estimated bytes of the cache entry itself


class ParquetStore(Store):
    """A store for the set of `plan`; `targets` reads its targets. `memory` bounds the bytes of parsed record files.

    A record file belongs to the set if `.zmetadata`, looked up after it was read, is the one that was read first. A
    record file that is read again must be the same, too, because a set may be written again with an equal
    `.zmetadata`, whose ETag may be a hash of its content.
    """

    immutable = True

    def __init__(self, plan: Plan, options: Options, targets: TargetReader, memory: int) -> None:
        from zarrfs.cache.memory import BlockCache

        self._remote: FsspecStore | None = None
        if plan.url is not None:
            own = dataclasses.replace(options, missing_status=(404,), memory_limit=min(memory, _FETCHED))
            self._lower: Store = (remote := FsspecStore(plan.url, own))
            self._remote = remote
        else:
            self._lower = FileSystemStore(plan.path or "/", Links.FOLLOW, allowed=("/",))
        self._place, self._targets, self._mtime_ns = plan.url or plan.path or "/", targets, plan.mtime_ns
        self._document_limit = Bound(options.document_limit)
        self._limit = min(Bound(max(memory, _LEAST), "memory_limit"), self._document_limit)
        self._warned = False
        self._set: ParquetSet | None = None
        self._lock = trio.Lock()
        self._identities: dict[str, tuple[object, ...]] = {}  # of all files that were read
        self._records: BlockCache[RecordFile | _NoRecord] = BlockCache(memory)
        self._parsing = trio.CapacityLimiter(1)  # child processes, which hold a record file each
        self._failures: LRU[tuple[str, int], tuple[float, ReadError]] = LRU(_FAILURES)
        self._sizes: LRU[str, int] = LRU(_SIZES)
        self._asking: SingleFlight[str] = SingleFlight()

    async def opened(self) -> ParquetSet:
        """Return the parsed `.zmetadata`, which the first call reads. Raise ReadError if that fails."""
        if self._set is None:
            async with self._lock:
                if self._set is None:
                    try:
                        document = await self._read(DOCUMENT, self._document_limit)
                        self._set = await trio.to_thread.run_sync(read_set, self._shown(DOCUMENT), bytes(document))
                    except NotFound:
                        raise ReadError(self._shown(DOCUMENT), "no such file or directory") from None
                    except SourceError as exc:
                        raise ReadError(exc.source, str(exc).removeprefix(f"{exc.source}: ")) from None
        return self._set

    async def problems(self) -> list[tuple[str, str]]:
        return (await self.opened()).problems

    async def about(self) -> dict[str, Any]:
        found = await self.opened()
        problems = [f"{entry}: {rule}" for entry, rule in found.problems]
        return {"arrays": len(found.grids), "record_size": found.record_size, "problems": problems}

    async def lists(self, prefix: str) -> bool:
        return False  # a listing takes a request for each record file

    async def absences(self, prefix: str = "", ask: bool = True) -> Absences | None:
        """Count the absent record files of the arrays at and below `prefix`.

        The files are counted from listings or, if `ask`, by reading all record files of an array without a listing.
        Return None if a listing is not available and `ask` is false or there are too many record files to read.
        """
        found = await self.opened()
        absent = total = 0
        for array, grid in found.grids.items():
            if grid is None or (prefix not in ("", array) and not array.startswith(f"{prefix}/")):
                continue
            count = _record_files(grid, found.record_size)
            numbers = await self._numbers(array)
            if numbers is None:
                if not ask or total + count > _COUNTED:
                    return None
                numbers = [number async for number, *_ in self._records_of(array, grid)]
            absent, total = absent + count - bisect.bisect_left(numbers, count), total + count
        return Absences(absent, total)

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        name, found = split_key(key)[1], await self._find(key, broken=True) if key else None
        if found is None:
            return self._directory(name)
        if not isinstance(found, Target):
            return self._file(name, len(found))
        if found.length is None and not sized:
            return self._file(name, self._sizes.get(found.url))
        return self._file(name, await self._size(found))

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        """Yield documents and directories by name, then chunks in C order.

        A listing `after` a chunk does not read the record files before it.
        """
        found = await self.opened()
        if not found.is_directory(prefix):
            await self._find(prefix)  # a failure is not a file
            raise NotDirectory(prefix)
        children = found.children(prefix)
        grid = found.grids.get(prefix)
        start = 0
        index = FLAT.index(after, grid) if grid is not None and after not in children else None
        if grid is not None and index is not None:
            start = grid.number_at(index) + 1
        else:
            for name, kind in children.items():
                if name > after:
                    if kind is Kind.DIRECTORY:
                        yield self._directory(name)
                    else:
                        yield self._file(name, len(found.text(join_key(prefix, name)) or b""))
        if prefix in found.grids:
            if grid is None:
                raise self._broken(found, prefix)
            async for name, size in self._chunks(prefix, grid, found.record_size, start):
                if name not in children:
                    yield self._file(name, None if size < 0 else size)

    async def open(self, key: str) -> Value:
        name, found = split_key(key)[1], await self._find(key)
        if found is None:
            raise IsDirectory(key)
        if not isinstance(found, Target):
            return BytesValue(self._file(name, len(found)), found, ())
        return _RangeValue(self._file(name, await self._size(found, begin=True)), self._targets, found)

    @property
    def remote(self) -> bool:
        return self._targets.remote

    async def prefetch(self, keys: Sequence[str]) -> None:
        wanted = []
        for key in keys:
            with contextlib.suppress(StoreError, ReadError):
                found = await self._find(key)
                if isinstance(found, Target):
                    wanted.append((found.url, found.offset, found.offset + await self._size(found)))
        await self._targets.prefetch(wanted)

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        found = await self._find(key, broken=True)
        if found is None:
            return {}
        if not isinstance(found, Target):
            return {"inline": len(found)}
        if found.broken:
            return {"broken": found.broken}
        url = self._targets.resolve(found.url, shown)
        return {"url": url} if found.length is None else {"url": url, "offset": found.offset, "length": found.length}

    async def usage(self) -> Usage:
        """Return the number of files if no chunk were absent, because only record files say which are."""
        if self._set is None:
            return Usage()
        files = self._set.documents() + sum(grid.size for grid in self._set.grids.values() if grid)
        return Usage(files=min(files, 2**63 - 1))

    async def aclose(self) -> None:
        await self._targets.aclose()
        await self._lower.aclose()

    # -- names

    def _directory(self, name: str) -> Info:
        return Info(name, Kind.DIRECTORY, 0, None, self._mtime_ns)

    def _file(self, name: str, size: int | None) -> Info:
        return Info(name, Kind.FILE, size, None, self._mtime_ns)

    async def _find(self, key: str, broken: bool = False) -> Buffer | Target | None:
        """Return the bytes of a document or an inline chunk, the target of another chunk, or None for a directory.

        Raise NotFound if there is no such key, ReadError if it is unknown or invalid. With `broken`, an invalid
        reference is returned.
        """
        found = self._known(await self.opened(), key)
        return await self._row(key, found, broken) if isinstance(found, Chunk) else found

    def _known(self, found: ParquetSet, key: str) -> bytes | Chunk | None:
        """Return the bytes of a document, the location of a possible chunk, or None for a directory.

        Raise NotFound if neither `.zmetadata` nor a grid has the key, ReadError if the grid of the array is unknown.
        """
        if found.is_directory(key):
            return None
        text = found.text(key)
        if text is not None:
            return text
        prefix, rest = found.directory_above(key)
        grid = found.grids.get(prefix)
        if grid is not None:
            index = FLAT.index(rest, grid)
            if index is not None:
                return Chunk(prefix, *divmod(grid.number_at(index), found.record_size))
        elif prefix in found.grids and rest[:1].isdigit():
            raise self._broken(found, prefix)
        raise NotFound(key)

    def _broken(self, found: ParquetSet, array: str) -> ReadError:
        """Return the error for reads of the chunks of `array`, whose grid is unknown."""
        return ReadError(f"{self._shown(DOCUMENT)}: {shown(join_key(array, '.zarray'))}", found.broken[array])

    # -- chunks

    async def _chunks(self, array: str, grid: Grid, record_size: int, start: int) -> AsyncIterator[tuple[str, int]]:
        """Yield (name, size) of the chunks from number `start` on; the size is negative if it is not known yet."""
        async for number, first, last, record in self._records_of(array, grid, start):
            at = number * record_size
            for low in range(first, last, _LISTED):
                await trio.lowlevel.checkpoint()
                high = min(low + _LISTED, last)
                if isinstance(record, ReadError):  # list all possible chunks: a lookup of each reports the failure
                    for name in grid.names(low, high):
                        yield name, UNKNOWN
                    continue
                sizes = record.sizes(low - at, high - at)
                if sizes.count(ABSENT) < len(sizes):
                    for name, size in zip(grid.names(low, high), sizes, strict=True):
                        if size != ABSENT:
                            yield name, size

    async def _records_of(
        self, array: str, grid: Grid, start: int = 0
    ) -> AsyncIterator[tuple[int, int, int, RecordFile | ReadError]]:
        """Yield (number, first chunk, last chunk + 1, record file or its failure) of the record files that exist.

        Start at chunk `start`, and prefetch the next record file. After an absent one, continue with those in the
        listing of the array; without a listing, prefetch several concurrently.
        """
        assert self._set is not None
        size = self._set.record_size
        number, stop = start // size, _record_files(grid, size)
        fetched = number
        there: list[int] | None = None
        looked = False
        while number < stop:
            try:
                record: RecordFile | ReadError | None = await self._record(array, number)
            except ReadError as exc:
                record = exc
            if record is None and not looked:
                there, looked = await self._numbers(array), True
            following = number + 1
            if there is not None:
                at = bisect.bisect_right(there, number)
                following = there[at] if at < len(there) else stop
            ahead = following + (_AHEAD if record is None and there is None else 1)
            for wanted in range(max(fetched + 1, following), min(ahead, stop)):
                trio.lowlevel.spawn_system_task(self._prefetch, array, wanted)
                fetched = wanted
            if record is not None:
                first = number * size
                yield number, max(start, first), min(first + size, grid.size), record
            number = following

    async def _row(self, key: str, chunk: Chunk, broken: bool) -> Buffer | Target:
        record = await self._record(chunk.array, chunk.record)
        if record is None:
            raise NotFound(key)
        try:
            row = record.row(chunk.row)
        except ValueError as exc:
            raise ReadError(self._shown(_record_key(chunk.array, chunk.record)), str(exc)) from None
        if row is None:
            raise NotFound(key)
        if isinstance(row, Target) and row.broken and not broken:
            raise ReadError(self._shown(_record_key(chunk.array, chunk.record)), row.broken)
        return row

    async def _record(self, array: str, number: int) -> RecordFile | None:
        """Return a record file, cached or read; None if it is absent. Raise ReadError if it is unavailable."""
        key = array, number
        failure = self._failures.get(key)
        if failure is not None and failure[0] > trio.current_time():
            raise failure[1].with_traceback(None)
        assert self._set is not None
        try:
            guess = min(self._set.record_size * _ROW, self._limit.size)
            found = await self._records.get(key, guess, lambda: self._read_record(array, number))
        except ReadError as exc:
            self._failures.put(key, (trio.current_time() + _RETRY, exc))
            raise
        if not isinstance(found, _NoRecord):
            return found
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: is not there: its chunks count as absent, as fsspec and kerchunk write sparse arrays; "
                "zarrfs check counts such record files", self._shown(_record_key(array, number)),
            )  # fmt: skip
        return None

    async def _read_record(self, array: str, number: int) -> RecordFile | _NoRecord:
        assert self._set is not None
        key = _record_key(array, number)
        try:
            data = await self._read(key, self._limit)
        except NotFound:
            await self._check()
            return _NoRecord()
        await self._check()
        try:
            return await trio.to_thread.run_sync(
                parse_record, data, self._set.record_size, self._limit, limiter=self._parsing
            )
        except ValueError as exc:
            raise ReadError(self._shown(key), str(exc)) from None

    async def _prefetch(self, array: str, number: int) -> None:
        try:
            await self._record(array, number)
        except Exception:  # a reader of the record file reports the failure
            return

    # -- the files of the set

    async def _read(self, key: str, limit: Bound) -> Buffer:
        """Return a whole file of the set. Raise NotFound, or ReadError, also if it is larger than its limit."""
        try:
            if self._remote is not None:
                await self._remote.look(key)  # one request for its attributes and its beginning
            value = await self._lower.open(key)
            try:
                if value.size > limit.size:
                    raise ReadError(key, str(limit))
                data = await value.read(0, value.size)
            finally:
                value.close()
        except NotFound:
            raise
        except (StoreError, ReadError) as exc:
            raise self._named(key, exc) from exc
        if self._identities.setdefault(key, self._identity(value.info)) != self._identity(value.info):
            raise TargetChanged(self._shown(key), _CHANGED)
        return data

    async def _check(self) -> None:
        """Raise TargetChanged if `.zmetadata` has changed since it was read."""
        if self._remote is not None:
            self._remote.names.forget(DOCUMENT)
        try:
            found = await self._lower.info(DOCUMENT)
        except NotFound:
            raise TargetChanged(self._shown(DOCUMENT), "was removed after it was first read") from None
        except (StoreError, ReadError) as exc:
            raise self._named(DOCUMENT, exc) from exc
        if self._identity(found) != self._identities[DOCUMENT]:
            raise TargetChanged(self._shown(DOCUMENT), _CHANGED)

    async def _numbers(self, array: str) -> list[int] | None:
        """Return the sorted numbers of an array's record files; None if no reliable listing is available."""
        if urls.protocols(self._place)[:1] in (["http"], ["https"]):  # HTML may leave names out
            return None
        try:
            found = [_RECORD.fullmatch(info.name) async for info in self._lower.list_dir(array)]
        except NotFound:
            found = []
        except (StoreError, ReadError):
            return None
        await self._check()
        return sorted(int(match[1]) for match in found if match)

    def _identity(self, info: Info) -> tuple[object, ...]:
        """Return the attributes of a version: ETags alone may be equal, and listings have finer times than HEAD."""
        tick = 1 if self._remote is None else 1_000_000_000
        return info.identity, info.size, info.mtime_ns and info.mtime_ns // tick

    def _named(self, key: str, exc: StoreError | ReadError) -> ReadError:
        """Return the failure of a file of the set under the file's full name."""
        if isinstance(exc, StoreError):
            return ReadError(self._shown(key), exc.reason or exc.__doc__ or "")
        return exc.at(self._shown(key))

    def _shown(self, key: str) -> str:
        """Return the name of a file of the set for messages."""
        if self._remote is None:
            return os.path.join(self._place, shown(key))
        head, _, archive = without_secrets(self._place).partition("::")
        url, mark, query = head.partition("?")
        directory = url if url.endswith("://") else f"{url.rstrip('/')}/"  # "zip://" for the root of a zip file
        return f"{directory}{shown(key)}{mark}{query}" + (f"::{archive}" if archive else "")

    async def _size(self, target: Target, begin: bool = False) -> int:
        url = target.url

        async def ask() -> int:
            return self._sizes.put(url, await self._targets.size(url, begin))

        size = self._sizes.get(url) if target.length is None else target.length
        return await self._asking.run(url, ask, lambda: self._sizes.get(url)) if size is None else size


def _record_files(grid: Grid, record_size: int) -> int:
    """Return the number of record files of an array if none is absent."""
    return -(-grid.size // record_size)


def _record_key(array: str, number: int) -> str:
    return join_key(array, f"refs.{number}.parq")


class _RangeValue(Value):
    """A value that is a range of a target."""

    __slots__ = ("_target", "_targets")

    def __init__(self, info: Info, targets: TargetReader, target: Target) -> None:
        super().__init__(info, ())
        self._targets, self._target = targets, target

    async def read(self, start: int, length: int) -> Buffer:
        stop, low = min(self.size, start + length), self._target.offset
        if start >= stop:
            return b""
        return await self._targets.read(self._target.url, low + start, stop - start, low, low + self.size)
