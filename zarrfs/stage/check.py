"""Reading everything in a store, in bounded memory, and saying what cannot be read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from zarrfs.errors import NotDirectory, NotFound, ReadError, ZarrfsError
from zarrfs.stage.checkreport import Report
from zarrfs.stage.walk import PIECE, check_length, extents, walk
from zarrfs.store.api import Info, Kind, Store
from zarrfs.store.index import IndexStore
from zarrfs.store.links import follow

if TYPE_CHECKING:
    from zarrfs.stage.arraycheck import ArrayChecks

log = logging.getLogger("zarrfs")

READERS = 16  # files read at the same time


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
    await _count_absent_records(store, key, report)


async def _count_absent_records(store: Store, key: str, report: Report) -> None:
    """Count the record files of a Parquet set that are absent; last, as all were read by then."""
    from zarrfs.sources.parquet import ParquetStore

    if not isinstance(store, ParquetStore):
        return
    try:
        found = await store.absences(key)
    except ReadError as exc:
        report.add(key, exc)
    else:
        report.absent_records = found.absent if found is not None else 0


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


async def _url_of(store: Store, key: str) -> str | None:
    """The first place where the bytes of `key` should be, if it has one."""
    try:
        where = await store.locate(key)
    except (ZarrfsError, OSError):
        return None
    url: str | None = where.get("url") or next((part["url"] for part in where.get("regions", ())), None)
    return url
