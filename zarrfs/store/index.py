"""A store over an SQLite index: names and inline values come from its rows, other bytes from a TargetReader."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.concurrency.tasks import for_each, in_background
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError, StoreError
from zarrfs.store.api import (
    Info,
    Kind,
    Store,
    Usage,
    Value,
    split_key,
)
from zarrfs.store.indexfile import ROOT, ContentKind, open_database
from zarrfs.store.targets import TargetReader
from zarrfs.system.buffers import Buffer

_COLUMNS = "name, kind, size, mode, mtime_ns, place, ref, start, held"
_LISTED = "name, kind, size, mode, mtime_ns, place, ref, held"
_FIRST_PAGE, _PAGE = 128, 1000  # rows of a listing's first query, few because a reader may stop early; of later ones
_AT_ONCE = 16  # regions of one read that are fetched in parallel
_FIRST_REGIONS = 16  # regions of a file that prefetch() fetches
_AHEAD = 16 << 20  # bytes: read-ahead window of a file made of regions
_NEAR = 2 << 20  # bytes by which sequential reads may be apart, because the kernel sends several in parallel
_REMEMBERED = 16_384  # entries of each cache: rows, URLs, ...
_COUNTED = 20_000  # entries that one query counts

_NEXT_REGIONS = """
SELECT start, length, target, offset FROM region WHERE owner=? AND start>=? AND start<? ORDER BY start LIMIT 256
"""


class _Row(NamedTuple):
    name: str
    kind: int
    size: int | None
    mode: int | None
    mtime_ns: int | None
    place: int | None
    ref: int
    start: int
    held: int | None


class IndexStore(Store):
    """A read-only store over an index file that IndexWriter wrote.

    Queries run on the calling thread, because the file is local and mostly in the page cache, and a lookup takes
    microseconds. `mtime_ns` is the mtime of entries that have none of their own; callers may set it.
    """

    immutable = True
    has_links = True

    def __init__(self, path: str, targets: TargetReader, mtime_ns: int | None = None) -> None:
        self._db = open_database(path)
        self._targets = targets
        self.sizes_known = self.meta.get("sizes") == "known"
        self.mtime_ns = mtime_ns
        # by owner of regions: begin and end of the current sequential read, end of what was prefetched
        self._read: LRU[int, tuple[int, int, int]] = LRU(_REMEMBERED)
        self._rows: LRU[str, _Row] = LRU(_REMEMBERED)
        self._urls: LRU[int, str] = LRU(_REMEMBERED)
        self._sizes: LRU[int, int] = LRU(_REMEMBERED)
        self._asking: SingleFlight[int] = SingleFlight()
        self._usage: Usage | None = None

    @property
    def meta(self) -> dict[str, str]:
        """The compiler's notes about the document."""
        return dict(self._db.execute("SELECT name, value FROM meta"))

    async def problems(self) -> list[tuple[str, str]]:
        return list(self._db.execute("SELECT entry, rule FROM problem"))

    async def about(self) -> dict[str, Any]:
        usage = await self.usage()
        problems = [f"{entry}: {rule}" for entry, rule in await self.problems()]
        (broken,) = self._db.execute("SELECT count(*) FROM entry WHERE place=?", (ContentKind.BROKEN,)).fetchone()
        return {"files": usage.files, "bytes": usage.bytes, "broken": broken, "problems": problems}

    # -- the Store interface

    async def info(self, key: str, sized: bool = True) -> Info:
        row = self._row_of_key(key)
        if row.size is None and (sized or row.ref in self._sizes):
            return self._info(row)._replace(size=await self._whole_size(row.ref))
        return self._info(row)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        parent, usual_ns, new, file = self._directory(prefix), self.mtime_ns, tuple.__new__, Kind.FILE
        size_of_page, broken = _FIRST_PAGE, int(ContentKind.BROKEN)
        while True:
            page = self._db.execute(
                f"SELECT {_LISTED} FROM entry WHERE parent=? AND name>? ORDER BY name LIMIT ?",
                (parent, after, size_of_page),
            ).fetchall()
            for name, kind, size, mode, mtime_ns, place, ref, held in page:
                if kind or place == broken:
                    yield self._info((name, kind, size, mode, mtime_ns, place, ref, None, held))
                    continue
                if mtime_ns is None:
                    mtime_ns = usual_ns
                # Info() takes three times as long
                yield new(Info, (name, file, size, mode, mtime_ns, None, held, 1, None, ""))
            if len(page) < size_of_page:
                return
            size_of_page = _PAGE
            after = page[-1][0]

    async def open(self, key: str) -> Value:
        row = self._row_of_key(key)
        if row.kind == Kind.DIRECTORY:
            raise IsDirectory(key)
        if row.kind == Kind.SYMLINK:
            raise ReadError(key, "is a symbolic link, which is not followed here")
        if row.place == ContentKind.BROKEN:
            raise ReadError(key, self._reason(row.ref))
        info = self._info(row)
        if row.size is None:
            info = info._replace(size=await self._whole_size(row.ref, begin=True))
        return _IndexValue(info, self, row)

    async def read_row(self, row: _Row, size: int, start: int, length: int) -> Buffer:
        """Return the bytes [start, start + length) of the file of `row`, which has `size` bytes; cut at its end."""
        stop = min(size, start + length)
        if start >= stop:
            return b""
        if row.place == ContentKind.RANGE:
            at = row.start
            return await self._targets.read(
                self._url(row.ref), at + start, stop - start, at, at + size
            )
        if row.place == ContentKind.WHOLE:
            return await self._targets.read(self._url(row.ref), start, stop - start, 0, size)
        if row.place == ContentKind.REGIONS:
            return await self._gather(row.ref, start, stop, size)
        if row.place == ContentKind.HOLE:
            return bytes(stop - start)
        return self._inline(row.ref, start, stop - start)

    @property
    def remote(self) -> bool:
        return self._targets.remote

    async def prefetch(self, keys: Sequence[str]) -> None:
        rows = []
        for key in keys:
            with contextlib.suppress(StoreError):
                rows.append(self._row_of_key(key))
        unknown = {row.ref for row in rows if row.kind == Kind.FILE and row.size is None} - self._sizes.keys()
        await for_each(self._try_size, unknown)
        await self._targets.prefetch([range_ for row in rows for range_ in self._ranges(row)])

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        row = self._row_of_key(key)
        if row.place == ContentKind.RANGE:
            return {"url": self._resolved(row.ref, shown), "offset": row.start, "length": row.size}
        if row.place == ContentKind.WHOLE:
            return {"url": self._resolved(row.ref, shown)}
        if row.place == ContentKind.REGIONS:
            regions = self._db.execute(
                "SELECT start, length, target, offset FROM region WHERE owner=? ORDER BY start", (row.ref,)
            )
            return {
                "regions": [
                    {"start": start, "length": length, "url": self._resolved(target, shown), "offset": offset}
                    for start, length, target, offset in regions
                ]
            }
        if row.place == ContentKind.HOLE:
            return {"hole": row.size}
        if row.place == ContentKind.BROKEN:
            return {"broken": self._reason(row.ref)}
        return {} if row.kind == Kind.DIRECTORY else {"inline": row.size}

    async def usage(self) -> Usage:
        if self._usage is None:
            # scans all rows: only at the first call, and in a worker thread
            self._usage = await trio.to_thread.run_sync(self._count)
        return self._usage

    async def aclose(self) -> None:
        self._db.close()
        await self._targets.aclose()

    # -- rows

    def _count(self) -> Usage:
        # total() is a float: the sum of declared sizes may overflow 64 bits
        total = "SELECT total(coalesce(held, size)), count(*) FROM entry WHERE kind=0 AND (parent, name) > (?, ?)"
        ahead = "SELECT parent, name FROM entry WHERE (parent, name) > (?, ?) ORDER BY parent, name LIMIT 1 OFFSET ?"
        held, files, start = 0.0, 0, (-1, "")
        while start is not None:  # in pieces, because a connection runs one query at a time
            stop = self._db.execute(ahead, (*start, _COUNTED - 1)).fetchone()
            until, bound = (" AND (parent, name) <= (?, ?)", stop) if stop is not None else ("", ())
            more = self._db.execute(total + until, (*start, *bound)).fetchone()
            held, files, start = held + more[0], files + more[1], stop
            time.sleep(0.0002)  # lets another thread take the connection's lock, which is not fair
        return Usage(min(int(held), 2**63 - 1), files, counted=True)

    def _info(self, row: tuple[Any, ...]) -> Info:
        name, kind, size, mode, mtime_ns, place, ref, _start, held = row
        if mtime_ns is None:
            mtime_ns = self.mtime_ns
        if kind == 0:
            unreadable = self._reason(ref) if place == ContentKind.BROKEN else ""
            return Info(name, Kind.FILE, size, mode, mtime_ns, None, held, unreadable=unreadable)
        if kind == 1:
            return Info(name, Kind.DIRECTORY, 0, mode, mtime_ns, None, None, size + 2)
        target = self._inline(ref, 0, size).decode()
        return Info(name, Kind.SYMLINK, size, mode, mtime_ns, target)

    def _row_of_key(self, key: str) -> _Row:
        row = self._rows.get(key)
        if row is None:
            if key.startswith("/"):  # not a key, but split_key() would return the root and a name
                raise NotFound(key)
            prefix, name = split_key(key)
            parent = self._directory(prefix) if key else 0
            try:
                found = self._db.execute(
                    f"SELECT {_COLUMNS} FROM entry WHERE parent=? AND name=?", (parent, name)
                ).fetchone()
            except UnicodeEncodeError:  # all names in an index are UTF-8
                raise NotFound(key) from None
            if found is None:
                raise NotFound(key)
            row = self._rows.put(key, _Row._make(found))
        return row

    def _directory(self, key: str) -> int:
        """Return the id of the directory `key`."""
        if not key:
            return ROOT
        row = self._rows.get(key)
        if row is None:
            for at, letter in enumerate(key):  # from the top, so that _row_of_key() does not recurse
                if letter == "/":
                    self._row_of_key(key[:at])
            row = self._row_of_key(key)
        if row.kind != Kind.DIRECTORY:
            raise NotDirectory(key)
        return row.ref

    # -- bytes

    def _reason(self, ref: int) -> str:
        """Return the rule that a BROKEN entry breaks."""
        with contextlib.closing(self._db.blobopen("value", "data", ref, readonly=True)) as blob:
            return blob.read().decode()

    def _inline(self, ref: int, start: int, length: int) -> bytes:
        with contextlib.closing(self._db.blobopen("value", "data", ref, readonly=True)) as blob:
            blob.seek(min(start, len(blob)))
            return blob.read(length).ljust(length, b"\0")  # zeros follow a value that is shorter than its file

    async def _gather(self, owner: int, start: int, stop: int, size: int) -> Buffer:
        """Return the bytes [start, stop) of a file made of regions, with zeros between them."""
        rows = self._db.execute(
            "SELECT start, length, target, offset FROM region WHERE owner=? AND start<? AND start+length>? "
            "AND start >= coalesce((SELECT max(start) FROM region WHERE owner=? AND start<=?), 0) "
            "ORDER BY start",
            (owner, stop, start, owner, start),
        ).fetchall()
        if self._targets.remote and stop < size:
            self._read_on(owner, start, stop)
        if len(rows) == 1 and rows[0][0] <= start and rows[0][0] + rows[0][1] >= stop:
            at, length, target, offset = rows[0]
            return await self._targets.read(
                self._url(target), offset + start - at, stop - start, offset, offset + length
            )
        out = bytearray(stop - start)

        async def fill(rows: Iterator[tuple[int, int, int, int]]) -> None:
            for at, length, target, offset in rows:
                low, high = max(at, start), min(at + length, stop)
                out[low - start : high - start] = await self._targets.read(
                    self._url(target), offset + low - at, high - low, offset, offset + length
                )

        await for_each(fill, [iter(rows)] * min(len(rows), _AT_ONCE))  # one iterator for all tasks
        return out

    def _read_on(self, owner: int, start: int, stop: int) -> None:
        """Prefetch regions ahead of a sequential reader: as many bytes as it has read, at most _AHEAD."""
        begin, last, until = self._read.get(owner, (0, 0, 0))
        if not last - _NEAR <= start <= last + _NEAR:
            begin, until = start, 0
        low, high = max(stop, until), stop + min(_AHEAD, stop - begin)
        wanted: list[tuple[str, int, int]] = []
        if low - stop <= (high - stop) // 2:
            for at, length, target, offset in self._db.execute(_NEXT_REGIONS, (owner, low, high)):
                wanted.append((self._url(target), offset, offset + length))
                until = at + length
        self._read.put(owner, (begin, stop, until))
        if wanted:
            in_background(self._targets.prefetch, wanted)

    def _ranges(self, row: _Row) -> Iterator[tuple[str, int, int]]:
        """Yield (url, low, high) of the parts of a file, as far as they are known without a request."""
        size = self._sizes.get(row.ref) if row.size is None else row.size
        if not size:
            return
        if row.place == ContentKind.RANGE:
            yield self._url(row.ref), row.start or 0, (row.start or 0) + size
        elif row.place == ContentKind.WHOLE:
            yield self._url(row.ref), 0, size
        elif row.place == ContentKind.REGIONS:
            query = f"SELECT length, target, offset FROM region WHERE owner=? ORDER BY start LIMIT {_FIRST_REGIONS}"
            for length, target, offset in self._db.execute(query, (row.ref,)):
                yield self._url(target), offset, offset + length

    async def _try_size(self, ref: int) -> None:
        with contextlib.suppress(ReadError):
            await self._whole_size(ref, begin=True)

    async def _whole_size(self, ref: int, begin: bool = False) -> int:
        async def ask() -> int:
            return self._sizes.put(ref, await self._targets.size(self._url(ref), begin))

        size = self._sizes.get(ref)
        return await self._asking.run(ref, ask, lambda: self._sizes.get(ref)) if size is None else size

    def _url(self, ref: int) -> str:
        url = self._urls.get(ref)
        if url is None:
            found: str = self._db.execute("SELECT url FROM target WHERE id=?", (ref,)).fetchone()[0]
            url = self._urls.put(ref, found)
        return url

    def _resolved(self, ref: int, shown: bool) -> str:
        return self._targets.resolve(self._url(ref), shown)


class _IndexValue(Value):
    __slots__ = ("_row", "_store")

    def __init__(self, info: Info, store: IndexStore, row: _Row) -> None:
        super().__init__(info, ())
        self._store, self._row = store, row

    async def read(self, start: int, length: int) -> Buffer:
        return await self._store.read_row(self._row, self.size, start, length)
