"""Reading everything in a store, in bounded memory, and saying what cannot be read."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from zarrfs.errors import NotDirectory, NotFound, ReadError, ZarrfsError
from zarrfs.stage.walk import PIECE, walk
from zarrfs.store.api import Info, Kind, Store
from zarrfs.store.index import IndexStore
from zarrfs.store.links import follow

if TYPE_CHECKING:
    from zarrfs.stage.arraycheck import ArrayChecks

log = logging.getLogger("zarrfs")

READERS = 16  # files read at the same time
# as ReadError.kind and Unsound.kind
BAD_KINDS = (
    "missing", "unreadable", "wrong hash", "out of range", "changed", "bad metadata", "undecodable",
    "outside grid",
)  # fmt: skip


class Unsound(ZarrfsError):
    """A file that can be read, but is not what the metadata of Zarr says; `kind` is one of BAD_KINDS."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        super().__init__(reason)


class Bad(NamedTuple):
    """An entry that cannot be read."""

    key: str
    kind: str  # one of BAD_KINDS
    url: str | None  # where its bytes should be
    reason: str


@dataclasses.dataclass
class Report:
    """What a check has found so far; it grows while the check runs."""

    keep: int = 20  # how many of each list are kept
    ok: int = 0
    read: int = 0  # bytes
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # of bad ones
    bad: list[Bad] = dataclasses.field(default_factory=list)
    links: int = 0  # symbolic links
    dangling: int = 0  # of them, those that lead nowhere within the tree: not an error
    left_out: int = 0  # entries that the document's compiler refused
    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (entry, rule) of those
    expected_files: int | None = None
    expected_bytes: int | None = None

    @property
    def files(self) -> int:
        """Files that have been dealt with."""
        return self.ok + self.counts.total()

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.counts and not self.left_out

    def add(self, key: str, exc: BaseException, url: str | None = None) -> None:
        """Count an entry that cannot be read."""
        bad = bad_entry(key, exc, url)
        self.counts[bad.kind] += 1
        if len(self.bad) < self.keep:
            self.bad.append(bad)

    def as_json(self) -> dict[str, Any]:
        """The report, ready for JSON."""
        return {
            "clean": self.clean,
            "ok": self.ok,
            **{kind.replace(" ", "_"): self.counts[kind] for kind in BAD_KINDS},
            "left_out": self.left_out,
            "bytes_read": self.read,
            "links": self.links,
            "links_dangling": self.dangling,
            "bad": [bad._asdict() for bad in self.bad],
            "problems": [{"entry": entry, "rule": rule} for entry, rule in self.problems],
        }


def bad_entry(key: str, exc: BaseException, url: str | None = None) -> Bad:
    """An entry that cannot be read, for that reason; `url`: where its bytes should be, if the reason does not say."""
    if isinstance(exc, ReadError):
        return Bad(key, exc.kind, exc.where, exc.reason)
    if isinstance(exc, Unsound):
        return Bad(key, exc.kind, url, str(exc))
    if isinstance(exc, NotFound):
        return Bad(key, "missing", url, exc.reason or "is listed, but not there")
    return Bad(key, "unreadable", url, str(exc) or type(exc).__name__)


async def check(
    store: Store, key: str, report: Report, memory: int = 256 << 20, arrays: ArrayChecks | None = None
) -> None:
    """Read `key`, or everything below it, into `report`, holding no more than `memory` bytes of data.

    `arrays` have memory of their own.
    """
    await _expect(store, key, report)
    if arrays is not None:
        await arrays.find(key, report)
    piece = max(64 << 10, min(PIECE, memory // (2 * READERS)))
    send, receive = trio.open_memory_channel[tuple[str, Info]](READERS)
    async with trio.open_nursery() as nursery:
        for _ in range(READERS):
            nursery.start_soon(_reader, store, receive.clone(), report, piece, arrays)
        receive.close()
        async with send:
            top = await store.info(key)
            if top.kind is not Kind.DIRECTORY:
                await send.send((key, top))
            else:
                async for found in walk(store, key, report.add):
                    await send.send(found)
    if arrays is not None:
        arrays.missing(report)


async def _expect(store: Store, key: str, report: Report) -> None:
    """Note what there is to read, and what the compiler left out, where the store knows."""
    from zarrfs.sources.parquet import ParquetStore

    if isinstance(store, ParquetStore):
        await store.opened()
    elif not isinstance(store, IndexStore):
        return
    elif not key:
        usage = await store.usage()
        report.expected_files, report.expected_bytes = usage.files, usage.bytes
    problems = [
        (entry, rule)
        for entry, rule in store.problems()
        if not key or entry == key or entry.startswith(key + "/")
    ]
    report.left_out, report.problems = len(problems), problems[: report.keep]


async def _reader(
    store: Store, receive: trio.MemoryReceiveChannel[tuple[str, Info]], report: Report, piece: int,
    arrays: ArrayChecks | None,
) -> None:  # fmt: skip
    async with receive:
        async for key, info in receive:
            if info.kind is Kind.SYMLINK:
                await _check_link(store, key, report)
            elif info.kind is Kind.FILE:
                await _check_file(store, key, info, report, piece, arrays)


async def _check_link(store: Store, key: str, report: Report) -> None:
    """A link is never an error: where it leads is the business of whoever made it."""
    report.links += 1
    try:
        await follow(store, key)
    except (NotFound, NotDirectory):
        report.dangling += 1
    except (ZarrfsError, OSError):
        pass  # it leads to an entry, which is reported itself


async def _check_file(
    store: Store, key: str, info: Info, report: Report, piece: int, arrays: ArrayChecks | None
) -> None:
    bad: Exception | None = None
    try:
        if info.size is None:
            info = await store.info(key)
        if arrays is not None and arrays.whole(key, info.size or 0):
            await arrays.look(key, info.size or 0, report)
        else:
            async for start, length in extents(store, key, info):
                for at in range(start, start + length, piece):
                    wanted = min(piece, start + length - at)
                    data = await store.get(key, at, wanted)
                    report.read += len(data)
                    check_length(key, len(data), at, wanted)
    except (ZarrfsError, OSError) as exc:
        bad = exc
    except Exception as exc:
        log.debug("%s: nobody expected this", key, exc_info=exc)
        bad = exc
    if arrays is not None:
        misplaced = arrays.ended(key, bad is not None)
        bad = bad or misplaced
    if bad is None:
        report.ok += 1
    else:
        report.add(key, bad, await _url_of(store, key))


async def extents(store: Store, key: str, info: Info) -> AsyncIterator[tuple[int, int]]:
    """(start, length) of the parts of a file that hold data, its size known: a hole costs nothing, however large."""
    size = info.size or 0
    where = await store.locate(key) if info.allocated is not None else {}
    if "hole" in where:
        return
    if "regions" not in where:
        yield 0, size
        return
    for region in where["regions"]:
        start = min(region["start"], size)
        yield start, min(region["length"], size - start)


async def _url_of(store: Store, key: str) -> str | None:
    """The first place where the bytes of `key` should be, if it has one."""
    try:
        where = await store.locate(key)
    except (ZarrfsError, OSError):
        return None
    url: str | None = where.get("url") or next((part["url"] for part in where.get("regions", ())), None)
    return url


def check_length(key: str, count: int, start: int, length: int) -> None:
    """ReadError where a store has given fewer bytes than were asked for."""
    if count != length:
        raise ReadError(key, f"{count} bytes at {start}, not {length}")
