"""The check of a store: read every value, in bounded memory, and report values that cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from zarrfs.config.shares import WHOLE, Share
from zarrfs.copying.check_report import CheckReport
from zarrfs.errors import NotDirectory, NotFound, ReadError, ZarrfsError
from zarrfs.store.api import Info, Kind, Store
from zarrfs.store.traversal import PIECE, check_length, extents, follow, walk

if TYPE_CHECKING:
    from zarrfs.copying.array_check import ArrayChecks

log = logging.getLogger(__name__)

READERS = 16  # files read at the same time


async def check(
    store: Store, key: str, report: CheckReport, memory: int = 256 << 20, arrays: ArrayChecks | None = None,
    share: Share | None = None,
) -> None:  # fmt: skip
    """Read `key`, or everything below it, and fill `report`; hold at most `memory` bytes of data.

    `arrays` has a memory budget of its own. With a `share`, read only the files of that share; every share examines
    the metadata of arrays and lists all directories.
    """
    await _expect(store, key, report, share or WHOLE)
    if arrays is not None:
        await arrays.find(key, report)

    async def look(at: str, info: Info, piece: int) -> None:
        if info.kind is Kind.SYMLINK:
            await _check_link(store, at, report)
        elif info.kind is Kind.FILE:
            await _check_file(store, at, info, report, piece, arrays)
        elif arrays is not None:
            arrays.check_directory(at, report)

    def unlisted(at: str, exc: Exception) -> None:
        report.add(at, exc)

    def passed(at: str) -> None:
        if arrays is not None:
            arrays.passed(at)

    await _each(store, key, unlisted, memory, look, share, passed)
    if arrays is not None:
        await arrays.missing(report)
    if share is None or not share.index:
        await _count_absent_records(store, key, report)


async def _each(
    store: Store, key: str, failed: Callable[[str, Exception], None], memory: int,
    look: Callable[[str, Info, int], Awaitable[None]], share: Share | None,
    passed: Callable[[str], None],
) -> None:  # fmt: skip
    """Call `look(key, info, bytes per read)` for everything below `key`, or for `key` if it is no directory.

    Several tasks do so. Call `failed` for directories that cannot be listed, and `passed` for keys of other shares.
    """
    piece = max(64 << 10, min(PIECE, memory // (2 * READERS)))
    send, receive = trio.open_memory_channel[tuple[str, Info]](READERS)

    async def reader(receive: trio.MemoryReceiveChannel[tuple[str, Info]]) -> None:
        async with receive:
            async for at, info in receive:
                await look(at, info, piece)

    async with trio.open_nursery() as nursery:
        for _ in range(READERS):
            nursery.start_soon(reader, receive.clone())
        receive.close()
        async with send:
            top = await store.info(key)
            if top.kind is not Kind.DIRECTORY:
                if share is None or share.has(key):
                    await send.send((key, top))
                return
            async for at, info in walk(store, key, failed):
                if share is None or share.has(at):
                    await send.send((at, info))
                else:
                    passed(at)


async def _count_absent_records(store: Store, key: str, report: CheckReport) -> None:
    """Count the absent record files of a Parquet set. Called at the end, when all record files have been read."""
    try:
        found = await store.absences(key)
    except ReadError as exc:
        report.add(key, exc)
    else:
        report.absent_records = found.absent if found is not None else 0


async def _expect(store: Store, key: str, report: CheckReport, share: Share) -> None:
    """Set the expected counts, if the store knows them, and the entries that the compiler left out."""
    if not key and (usage := await store.usage()).counted:
        report.expected_files, report.expected_bytes = usage.files // share.count, usage.bytes // share.count
    problems = [
        (entry, rule)
        for entry, rule in await store.problems()
        if not key or entry == key or entry.startswith(key + "/")
    ]
    report.left_out, report.problems = len(problems), problems[: report.keep]


async def _check_link(store: Store, key: str, report: CheckReport) -> None:
    """Count a symbolic link. A dangling link is not an error, because its author may intend it."""
    report.links += 1
    try:
        await follow(store, key)
    except (NotFound, NotDirectory):
        report.dangling += 1
    except (ZarrfsError, OSError):
        pass  # the entry with this error is reported itself


async def _read(store: Store, key: str, info: Info, report: CheckReport, piece: int) -> None:
    """Read the data of a file in pieces, without its holes."""
    if info.size is None:
        info = await store.info(key)
    async for start, length in extents(store, key, info):
        for at in range(start, start + length, piece):
            wanted = min(piece, start + length - at)
            data = await store.get(key, at, wanted)
            report.read += len(data)
            check_length(key, len(data), at, wanted)


async def _check_file(
    store: Store, key: str, info: Info, report: CheckReport, piece: int, arrays: ArrayChecks | None
) -> None:
    bad: Exception | None = None
    try:
        if info.size is None:
            info = await store.info(key)
        if arrays is not None and arrays.whole(key, info.size or 0):
            await arrays.look(key, info.size or 0, report)
        else:
            await _read(store, key, info, report, piece)
    except (ZarrfsError, OSError) as exc:
        bad = exc
    except Exception as exc:
        log.debug("%s: unexpected failure", key, exc_info=exc)
        bad = exc
    if arrays is not None:
        misplaced = arrays.ended(key, bad is not None)
        bad = bad or misplaced
    if bad is None:
        report.ok += 1
    else:
        report.add(key, bad, await _url_of(store, key))


async def _url_of(store: Store, key: str) -> str | None:
    """Return the URL of the bytes of `key`, or of its first region; None if there is no URL."""
    try:
        where = await store.locate(key)
    except (ZarrfsError, OSError):
        return None
    url: str | None = where.get("url") or next((part["url"] for part in where.get("regions", ())), None)
    return url
