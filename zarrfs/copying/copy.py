"""Copies of a store, or of selected keys, to a directory: many files at a time, resumed after an interruption.

A few threads write the entries, a batch at a time (copy_threads.py). This module fetches bytes that are not on this
machine, many values concurrently.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import trio

from zarrfs.concurrency.budget import MemoryBudget
from zarrfs.concurrency.tasks import for_each
from zarrfs.copying.check_report import bad_entry
from zarrfs.copying.copy_report import CopiedEntry, CopyOptions, CopyReport
from zarrfs.copying.copy_threads import LARGE, BatchWriter, Item, Outcome, Writing, close_all, data_bytes
from zarrfs.copying.destination_directory import (
    EXISTING,
    DestinationDirectory,
    Folder,
    InTheWay,
    broken_rule,
    ends_all,
)
from zarrfs.errors import ReadError, SourceError, StoreError, UsageError, ZarrfsError, reason_of
from zarrfs.store.api import Info, Kind, Part, Store, Value, join_key, ordinary_mode
from zarrfs.store.destination import sync_file_system
from zarrfs.store.keyglobs import Picking
from zarrfs.store.traversal import check_length, extents
from zarrfs.store.values import open_sized
from zarrfs.system.buffers import write_all
from zarrfs.system.sparse import copy_data

log = logging.getLogger(__name__)

_BATCH, _BATCH_BYTES = 128, LARGE  # entries, and bytes, that a thread writes in one call
_IN_FLIGHT = 4  # batches that are fetched over a network while others are written
_MEMORY = 64 << 20  # limit of fetched bytes that wait to be written
_WAITING = 256  # limit of fetched files that wait to be written, because each may hold a descriptor
_UNKNOWN = 256 << 10  # bytes assumed for a file of unknown size
_PIECE = 4 << 20  # maximum number of bytes in a request for a part of a large file
_PIECES = 4  # concurrent requests for parts of a large file
_SMALL = 64 << 10  # average file size of a batch, in bytes, up to which more threads contend more than they gain
_FAILURES_KEPT = 1000


Link = Callable[[str, Info], Awaitable[str | None]]


async def copy_store(
    store: Store,
    destination: str,
    choice: CopyOptions,
    report: CopyReport,
    done: Callable[[CopiedEntry], None] | None = None,
    link: Link | None = None,
) -> None:
    """Write the entries of `store` to the directory `destination`, and create it if it is missing.

    Every file appears whole or not at all, and nothing is written outside of `destination`. `done` is called for every
    entry that is in place; `link(key, info)` returns the target of a symbolic link to make instead of a copy, or None.

    Raise UsageError if the destination cannot be used, and SourceError, naming the entry, if an entry cannot be read
    or written: finished files stay, and a run with the same mark resumes the copy. With `choice.keep_going`, failures
    of single entries are added to `report` instead.
    """
    if choice.existing not in EXISTING:
        raise UsageError(f"{choice.existing}: is not one of {', '.join(EXISTING)}")
    globs = json.dumps([choice.include, choice.exclude]) if choice.include or choice.exclude else ""
    picks = globs and hashlib.sha256(globs.encode()).hexdigest()  # thousands of globs would not fit in a journal
    filling = await trio.to_thread.run_sync(
        DestinationDirectory, destination, choice.existing, choice.mark, picks, choice.share
    )
    try:
        root = await store.info("")
        run = _Copy(store, filling, choice, report, done, link)
        await run.everything(root)
        try:
            if choice.sync:
                try:
                    await trio.to_thread.run_sync(sync_file_system, destination)
                except OSError:
                    filling.distrust()
                    raise
            await trio.to_thread.run_sync(filling.finish, root, choice.root, choice.unfinished)
        except OSError as exc:
            raise SourceError(destination, f"cannot be written: {reason_of(exc)}") from exc
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(filling.abandon)
        raise


class _Copy:
    """One call of copy_store()."""

    def __init__(
        self, store: Store, filling: DestinationDirectory, choice: CopyOptions, report: CopyReport,
        done: Callable[[CopiedEntry], None] | None, link: Link | None,
    ) -> None:  # fmt: skip
        self._store, self._filling, self._choice, self._report = store, filling, choice, report
        self._done, self._link = done, link
        self._reader = store.blocking()
        self._picking = Picking(choice.include, choice.exclude)
        self._writer = BatchWriter(filling, store, choice.sums)
        jobs = choice.jobs or min(4, os.cpu_count() or 1)
        self._jobs, self._threads = jobs, trio.CapacityLimiter(jobs)
        self._small = trio.CapacityLimiter(choice.jobs or 1)  # threads that write small files
        self._slots = trio.Semaphore(jobs + _IN_FLIGHT)
        self._budget = MemoryBudget(_MEMORY)
        self._found = 0, 0  # files to write, and their bytes as far as sizes are known
        self._walked = False  # whether `_found` covers all entries, and the store had no counts to expect
        self._batch: list[Item] = []
        self._batch_bytes = 0
        self._scope = trio.CancelScope()
        self._fatal: ZarrfsError | None = None

    async def everything(self, root: Info) -> None:
        """Write all selected entries. The failure that ends the run is raised itself, not in an exception group."""
        if self._picking.everything and (usage := await self._store.usage()).counted:
            count = self._choice.share.count if self._choice.share is not None else 1
            self._report.expected_files, self._report.expected_bytes = usage.files // count, usage.bytes // count
        send, receive = trio.open_memory_channel[tuple[Item, int]](4 * _BATCH)
        with self._scope:
            async with trio.open_nursery() as writers:
                for _ in range(self._jobs):
                    writers.start_soon(self._write_fetched, receive.clone())
                receive.close()
                async with send, trio.open_nursery() as nursery:
                    self._nursery, self._fetched = nursery, send
                    folder = self._filling.root(root)
                    await self._walk(folder)
                    self._walked = self._report.expected_files is None
                    self._expect(0, 0)
                    await self._flush()
        for entry, rule in await self._store.problems() if self._picking.everything else ():
            self._fail(entry, UsageError(rule))  # an entry that is left out of the source
        self._account(())
        if self._fatal is not None:
            raise self._fatal
        self._report.unmatched = self._picking.unused()

    # -- selection of entries

    async def _walk(self, root: Folder) -> None:
        levels: list[tuple[Folder, bool, AsyncIterator[Info]]] = []
        levels.append((root, self._picking.root, self._store.list_dir("")))
        while levels:
            folder, chosen, listing = levels[-1]
            try:
                info = await anext(listing, None)
            except (ZarrfsError, OSError) as exc:
                self._fail(folder.key, exc)
                info = None
            if info is None:
                levels.pop()
                await self._add(Item(folder, folder.key, folder.info, closing=True), 0)
                continue
            key = join_key(folder.key, info.name)
            picked = self._picking.picked(key, chosen)
            if picked is None:
                continue
            rule = broken_rule(info.name, folder)
            if rule is not None:
                if picked:
                    self._fail(key, InTheWay(rule))
            elif info.kind is Kind.DIRECTORY:
                below = Folder(key, info, folder)
                self._writer.hold(folder)
                if picked and self._is_mine(key):
                    below.want()
                levels.append((below, picked, self._store.list_dir(key)))
            elif picked and self._is_mine(key):
                folder.want()
                await self._add_entry(folder, key, info)

    def _is_mine(self, key: str) -> bool:
        """Return whether a selected entry belongs to the share of this run."""
        return self._choice.share is None or self._choice.share.has(key)

    async def _add_entry(self, folder: Folder, key: str, info: Info) -> None:
        if info.mode is not None and not self._choice.set_ids:
            info = info._replace(mode=ordinary_mode(info))
        item = Item(folder, key, info)
        if self._link is not None and info.kind is Kind.FILE:
            try:
                item.link = await self._link(key, info)
            except (ZarrfsError, OSError) as exc:
                self._fail(key, exc)
                return
        self._writer.hold(folder)
        is_file = item.link is None and info.kind is Kind.FILE
        size = data_bytes(info) if is_file else 0
        self._expect(is_file, size)
        if info.size is None and item.link is None:
            size = _UNKNOWN
        if size > LARGE:
            await self._slots.acquire()
            self._nursery.start_soon(self._slot, self._write_large, item)
        else:
            await self._add(item, size)

    async def _add(self, item: Item, size: int) -> None:
        self._batch.append(item)
        self._batch_bytes += size
        if len(self._batch) >= _BATCH or self._batch_bytes >= _BATCH_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if self._batch:
            batch, self._batch, self._batch_bytes = self._batch, [], 0
            await self._slots.acquire()
            self._nursery.start_soon(self._slot, self._write_batch, batch)

    async def _slot(self, function: Callable[[Any], Awaitable[None]], what: Any) -> None:
        try:
            await function(what)
        finally:
            self._slots.release()

    def _expect(self, files: int, size: int) -> None:
        self._found = self._found[0] + files, self._found[1] + size
        if self._walked:
            self._report.expected_files, self._report.expected_bytes = self._found

    # -- outcomes

    def _account(self, outcomes: Sequence[Outcome]) -> list[Item]:
        """Count outcomes; return the items whose bytes must still be fetched."""
        missing = []
        for item, done, error in [*outcomes, *self._writer.ended()]:
            if error is not None:
                self._fail(item.key, error)
            elif done is None:
                missing.append(item)
            else:
                self._note(done, data_bytes(item.info))
        return missing

    def _note(self, done: CopiedEntry, size: int) -> None:
        """Count an entry that is in place; `size`: its bytes without holes."""
        report = self._report
        if done.how in ("kept", "resumed") and done.kind is not Kind.DIRECTORY:
            report.kept += done.how == "kept"
            report.resumed += done.how == "resumed"
        elif done.kind is Kind.FILE:
            report.files += 1
            report.bytes += size
        elif done.kind is Kind.DIRECTORY:
            report.directories += 1
        else:
            report.links += 1
        if self._done is not None:
            self._done(done)

    def _fail(self, key: str, exc: Exception) -> None:
        if self._fatal is not None:
            return
        if not isinstance(exc, ZarrfsError | OSError):
            log.debug("%s: unexpected failure", key, exc_info=exc)
        if isinstance(exc, InTheWay):
            key, exc = exc.key or key, InTheWay(f"{exc}{self._choice.advice}")
        self._report.bad += 1
        if len(self._report.failed) < _FAILURES_KEPT:
            self._report.failed.append(bad_entry(key, exc))
        if not self._choice.keep_going or ends_all(exc):
            self._fatal = _source_error(self._filling.path, key, exc)
            self._scope.cancel()

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(function, *args, limiter=self._threads)

    async def _write_batch(self, batch: list[Item]) -> None:
        if self._filling.begun:
            batch = await self._comparable(batch)
        try:
            outcomes = await self._written(batch)
        finally:  # descriptors are still open if the task was cancelled before its thread started
            close_all(batch)
        missing = self._account(outcomes)
        if not missing:
            return
        await self._store.prefetch([item.key for item in missing])
        async with trio.open_nursery() as nursery:
            for item in missing:
                nursery.start_soon(self._fetch, item)

    async def _comparable(self, batch: list[Item]) -> list[Item]:
        """Look up the size and time of files whose listing has neither; return the batch without files that fail.

        With neither to compare, a file that an earlier run wrote would stay even if the source has changed.
        """
        failed = set[int]()

        async def look(item: Item) -> None:
            try:
                await self._look_up(item)
            except Exception as exc:
                self._drop(item, exc)
                failed.add(id(item))

        unknown = [item for item in batch if item.unread and item.info.size is None and item.info.mtime_ns is None]
        await for_each(look, unknown)
        return [item for item in batch if id(item) not in failed]

    async def _look_up(self, item: Item) -> None:
        """Set the size of a file, and its time if the listing has none; a later run compares both."""
        found, info = await self._store.info(item.key), item.info
        # a listing may have coarser times, but a later run compares with its listing, too
        time = found.mtime_ns if info.mtime_ns is None else info.mtime_ns
        item.info = info._replace(size=found.size, mtime_ns=time)
        self._expect(0, data_bytes(item.info))

    async def _written(self, batch: list[Item]) -> list[Outcome]:
        """Write a batch in a thread.

        System calls for small files are so short that several threads only contend, unless they wait for a disk or a
        server. So, without CopyOptions.jobs, small files are written in one thread, and in more only as long as
        threads wait for most of their time.
        """
        go_on = self._choice.keep_going
        if sum(data_bytes(item.info) for item in batch if item.info.kind is Kind.FILE) > _SMALL * len(batch):
            outcomes, _ = await trio.to_thread.run_sync(self._writer.write, batch, go_on, limiter=self._threads)
            return outcomes
        outcomes, waited = await trio.to_thread.run_sync(self._writer.write, batch, go_on, limiter=self._small)
        if self._choice.jobs is None:
            self._small.total_tokens = self._jobs if waited > 0.5 else 1
        return outcomes

    def _drop(self, item: Item, exc: Exception) -> None:
        self._fail(item.key, exc)
        self._writer.release(item.folder)

    # -- bytes that must be fetched

    async def _fetch(self, item: Item) -> None:
        """Fetch the bytes of a file, or open it, for _write_fetched(); fetch and write a large file in pieces."""
        room = 0
        try:
            if item.info.size is None:
                await self._look_up(item)
            large = data_bytes(item.info) > LARGE
            if not large:
                size = max(data_bytes(item.info), _MEMORY // _WAITING)
                await self._budget.take(size)
                room = size
                with contextlib.closing(await open_sized(self._store, item.key, item.info.size or 0)) as value:
                    descriptor = value.fileno()
                    if descriptor is not None:
                        item.descriptor = os.dup(descriptor)
                    else:
                        item.content = await self._parts(item, value)
                await self._fetched.send((item, room))
        except BaseException as exc:
            self._budget.give(room)
            close_all([item])
            if not isinstance(exc, Exception):
                raise
            self._drop(item, exc)
            return
        if large:  # not in the try block: _write_large() reports failures and releases the folder itself
            await self._write_large(item)

    async def _parts(self, item: Item, value: Value) -> list[Part]:
        parts = []
        async for start, length in extents(self._store, item.key, item.info):
            data = await value.read(start, length)
            check_length(item.key, len(data), start, length)
            parts.append(Part(start, length, data))
        return parts

    async def _write_fetched(self, receive: trio.MemoryReceiveChannel[tuple[Item, int]]) -> None:
        """Write fetched items; items that are waiting are written in one batch."""

        def waiting() -> Iterator[tuple[Item, int]]:
            with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:
                    yield receive.receive_nowait()

        async with receive:
            try:
                async for first in receive:
                    batch = [first, *itertools.islice(waiting(), _BATCH - 1)]
                    items = [item for item, _ in batch]
                    try:
                        self._account(await self._written(items))
                    finally:
                        close_all(items)
                    self._budget.give(sum(room for _, room in batch))
            finally:  # if the run ends early, there are items with open files in the channel
                close_all([item for item, _ in waiting()])

    # -- large files

    async def _write_large(self, item: Item) -> None:
        begun = await self._in_thread(self._writer.begin, item)
        if isinstance(begun, Outcome):
            self._account([begun])
            return
        error: Exception | None = None
        digest: str | None = None
        self._report.unfinished[item.key] = 0
        try:
            with contextlib.closing(await open_sized(self._store, item.key, item.info.size or 0)) as value:
                descriptor = value.fileno()
                if descriptor is not None:
                    begun.item.info = begun.item.info._replace(size=value.size)
                    to, copied = begun.staged.descriptor, functools.partial(self._copied, item)
                    await self._in_thread(copy_data, descriptor, to, value.size, item.key, copied)
                else:
                    error = await self._pieces(begun, value)
            if error is None:
                digest = await self._in_thread(self._writer.summed, begun)
        except Exception as exc:  # unexpected exceptions, too, as for small files
            error = exc
        except BaseException as exc:
            with trio.CancelScope(shield=True):
                await self._in_thread(self._writer.end, begun, None, ReadError(item.key, type(exc).__name__))
            raise
        with trio.CancelScope(shield=True):  # a cancellation here would leave the staged file open
            outcome = await self._in_thread(self._writer.end, begun, digest, error)
        del self._report.unfinished[item.key]
        self._account([outcome])

    def _copied(self, item: Item, count: int) -> None:
        trio.from_thread.check_cancelled()
        self._report.unfinished[item.key] += count

    async def _pieces(self, writing: Writing, value: Value) -> Exception | None:
        """Write a file piece by piece; return the first failure, if any."""
        failed: list[Exception] = []
        some = trio.Semaphore(_PIECES)

        async def one(start: int, length: int) -> None:
            try:
                await self._piece(writing, value, start, length)
            except Exception as exc:
                failed.append(exc)
                nursery.cancel_scope.cancel()
            finally:
                some.release()

        key, info = writing.item.key, writing.item.info
        async with trio.open_nursery() as nursery:
            try:
                async for low, length in _stretches(self._store, key, info):
                    await some.acquire()
                    nursery.start_soon(one, low, length)
            except Exception as exc:
                failed.append(exc)
                nursery.cancel_scope.cancel()
        return failed[0] if failed else None

    async def _piece(self, writing: Writing, value: Value, start: int, length: int) -> None:
        parts = None if self._reader is None else self._reader.parts(writing.item.key, start, start + length)
        if parts is None:
            parts, at_hand = [Part(start, length, None)], 0
        else:
            at_hand = await self._in_thread(self._writer.fill, writing, parts)
        self._report.unfinished[writing.item.key] += sum(part.length for part in parts[:at_hand])
        for part in parts[at_hand:]:
            await self._budget.take(part.length)
            try:
                data = await value.read(part.start, part.length)
                check_length(writing.item.key, len(data), part.start, part.length)
                await self._in_thread(write_all, writing.staged.descriptor, data, part.start)
                self._report.unfinished[writing.item.key] += part.length
            finally:
                self._budget.give(part.length)


async def _stretches(store: Store, key: str, info: Info) -> AsyncIterator[tuple[int, int]]:
    """Yield (start, length) of pieces of a file without its holes; adjacent small extents are joined."""
    begin = stop = 0
    async for start, length in extents(store, key, info):
        if start == stop and stop - begin + length <= _PIECE:
            stop += length
            continue
        for at in range(begin, stop, _PIECE):
            yield at, min(_PIECE, stop - at)
        begin, stop = start, start + length
    for at in range(begin, stop, _PIECE):
        yield at, min(_PIECE, stop - at)


def _source_error(destination: str, key: str, exc: Exception) -> ZarrfsError:
    """Convert the failure that ends a run to a SourceError that names the entry."""
    if isinstance(exc, StoreError):
        rule = exc.reason or type(exc).__doc__ or str(exc)
    elif isinstance(exc, ReadError):
        rule = exc.reason_for(key)
    elif isinstance(exc, ZarrfsError):
        rule = str(exc)
    elif isinstance(exc, OSError):
        rule = f"cannot be written: {reason_of(exc)}"
    else:
        rule = f"{type(exc).__name__}: {exc}"
    return SourceError(destination, rule, key or "/")
