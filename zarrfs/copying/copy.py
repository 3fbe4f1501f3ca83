"""Copies of a store to a directory. One walk finds the entries, threads write them a batch at a time.

A thread copies files of this machine by itself. Other values are fetched on the event loop, many at a time. A thread
writes the small ones of a batch; large ones are written in pieces. Each file appears under its name when it is
complete. A file that has the kind, size and time of its entry is not written again, so an interrupted copy is resumed
by running it again; no other state is stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import trio

from zarrfs.concurrency.budget import MemoryBudget
from zarrfs.concurrency.tasks import for_each
from zarrfs.config.shares import WHOLE, Share
from zarrfs.copying.target_directory import (
    Existing,
    Folder,
    InTheWay,
    TargetDirectory,
    broken_rule,
    create,
    ends_all,
    is_special,
)
from zarrfs.errors import ReadError, SourceError, StoreError, ZarrfsError, internal_error, reason_of
from zarrfs.store.api import Info, Kind, Store, Value, join_key
from zarrfs.store.destination import sync_file_system
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.keyglobs import Picking
from zarrfs.store.traversal import check_length, extents
from zarrfs.store.values import open_sized
from zarrfs.store.writing import NewFile
from zarrfs.system.buffers import Buffer, write_all
from zarrfs.system.sparse import copy_data

log = logging.getLogger(__name__)

T = TypeVar("T")
LARGE = 8 << 20  # bytes: a larger value that must be fetched is fetched and written in pieces
_BATCH, _BATCH_BYTES = 64, LARGE  # entries, and bytes, that a thread writes in one call
_IN_FLIGHT = 6  # batches at the same time
_REMOTE, _LOCAL = 32, 4  # values of a batch that are fetched at the same time: each takes a task
_THREADS = min(4, os.cpu_count() or 1)
_MEMORY = 64 << 20  # bytes of pieces of large values that are fetched and not written yet
_UNKNOWN = 256 << 10  # bytes assumed for a value of unknown size; it counts as large if it has more
_PIECE, _PIECES = 4 << 20, 4  # bytes of a request for a part of a large value; requests at the same time


@dataclasses.dataclass
class CopyReport:
    """The counts of a copy, updated while it runs."""

    files: int = 0  # files in place, without links
    bytes: int = 0  # bytes of files that were written
    expected_files: int | None = None
    expected_bytes: int | None = None
    bad: int = 0  # entries that failed
    unmatched: list[str] = dataclasses.field(default_factory=list)  # globs of `include` without a match


@dataclasses.dataclass(slots=True)
class _Item:
    """An entry to write."""

    folder: Folder
    key: str
    info: Info
    value: Value | None = None  # open, if it must be fetched
    parts: list[tuple[int, Buffer]] | None = None  # (start, bytes) of a small value that was fetched
    large: bool = False  # whether `value` is to be copied in pieces

    @property
    def ready(self) -> bool:
        """Return whether a thread can write the bytes: they were fetched, or are in a local file."""
        return self.parts is not None or (self.value is not None and self.value.fileno() is not None)


async def copy_store(
    store: Store, destination: str, report: CopyReport, warn: Callable[[str], None], include: Sequence[str] = (),
    exclude: Sequence[str] = (), overwrite: bool = False, share: Share = WHOLE, sync: bool = False,
) -> None:  # fmt: skip
    """Write the entries of `store`, or those of them that globs and `share` select, to the directory `destination`.

    `warn` is called in any thread with a line for each entry that fails. Raise UsageError if the destination cannot be
    used, and SourceError if nothing more can be written to it.
    """
    root = await store.info("")
    target = await trio.to_thread.run_sync(TargetDirectory, destination, root, overwrite)
    try:
        copier = _Copier(store, target, report, warn, Picking(include, exclude), share)
        await copier.run(root)
        if sync:
            try:
                await trio.to_thread.run_sync(sync_file_system, destination)
            except OSError as exc:  # the kernel reports lost writes only once, and not of which file
                rule = f"cannot be synced: {reason_of(exc)}: remove it, and copy again"
                raise SourceError(destination, rule) from exc
    finally:
        target.close()


class _Copier:
    """One call of copy_store()."""

    def __init__(
        self, store: Store, target: TargetDirectory, report: CopyReport, warn: Callable[[str], None],
        picking: Picking, share: Share,
    ) -> None:  # fmt: skip
        self._store, self._target, self._report, self._warn = store, target, report, warn
        self._picking, self._share = picking, share
        self._files = store if isinstance(store, FileSystemStore) else None
        self._threads = trio.CapacityLimiter(_THREADS)
        self._slots = trio.Semaphore(_IN_FLIGHT)
        self._budget = MemoryBudget(_MEMORY)
        self._folders: list[Folder] = []
        self._batch: list[_Item] = []
        self._batch_bytes = 0
        self._fatal: ZarrfsError | None = None
        self._scope = trio.CancelScope()
        self._lock = threading.Lock()  # of the report

    async def run(self, root: Info) -> None:
        """Copy everything. The failure that ends the run is raised itself, not in an exception group."""
        if self._picking.everything and (usage := await self._store.usage()).counted:
            self._report.expected_files = usage.files // self._share.count
            self._report.expected_bytes = usage.bytes // self._share.count
        with self._scope:
            async with trio.open_nursery() as self._nursery:
                await self._walk(root)
                await self._flush()
            await self._in_thread(self._finish)
        if self._fatal is not None:
            raise self._fatal
        for entry, rule in (*await self._store.problems(), *(await self._store.left_out("")).items()):
            if self._picking.has(entry) and self._share.has(entry):
                self._fail(entry, InTheWay(rule))  # an entry that is left out of the source, or of a view
        self._report.unmatched = self._picking.unused()

    # -- the walk

    async def _walk(self, root: Info) -> None:
        top = Folder("", root, None, own=True)
        top.wanted = True
        self._folders.append(top)
        levels: list[tuple[Folder, bool, AsyncIterator[Info]]] = []
        levels.append((top, self._picking.root, self._store.list_dir("")))
        while levels:
            folder, chosen, listing = levels[-1]
            try:
                info = await anext(listing, None)
            except (ZarrfsError, OSError) as exc:
                self._fail(folder.key, exc)
                info = None
            if info is None:
                levels.pop()
                continue
            key = join_key(folder.key, info.name)
            picked = self._picking.picked(key, chosen)
            if picked is None:
                continue
            if (rule := broken_rule(info.name)) is not None:
                if picked:
                    self._fail(key, InTheWay(rule))
            elif info.kind is Kind.DIRECTORY:
                below = Folder(key, info, folder, own=picked and self._share.has(key))
                self._folders.append(below)
                if picked:
                    below.want()
                levels.append((below, picked, self._store.list_dir(key)))
            elif picked:
                folder.want()
                if self._share.has(key):
                    await self._add(_Item(folder, key, info))

    async def _add(self, item: _Item) -> None:
        self._batch.append(item)
        self._batch_bytes += _UNKNOWN if item.info.size is None else _data_bytes(item.info)
        if len(self._batch) >= _BATCH or self._batch_bytes >= _BATCH_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        await self._slots.acquire()
        self._nursery.start_soon(self._copy, batch)

    async def _copy(self, batch: list[_Item]) -> None:
        try:
            if missing := await self._in_thread(self._write, batch):
                await self._store.prefetch([item.key for item in missing])
                await self._each(self._fetch, missing)
                await self._in_thread(self._write, [item for item in missing if item.ready])
                await self._each(self._copy_large, [item for item in missing if item.large])
        finally:
            for item in batch:
                if item.value is not None:
                    item.value.close()
            self._slots.release()

    async def _each(self, function: Callable[[_Item], Awaitable[None]], items: Sequence[_Item]) -> None:
        """Await `function` of all items, some of them concurrently, and note failures."""

        async def work(items: Iterator[_Item]) -> None:
            for item in items:
                try:
                    await function(item)
                except Exception as exc:
                    self._fail(item.key, exc)

        iterator = iter(items)  # one for all tasks
        await for_each(work, [iterator] * min(_REMOTE if self._store.remote else _LOCAL, len(items)))

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        found = await trio.to_thread.run_sync(function, *args, limiter=self._threads)
        if self._fatal is not None:
            self._scope.cancel()
        return found

    def _fail(self, key: str, exc: Exception) -> None:
        """Note a failure, in any thread. One that ends the run takes effect at the end of the call of the thread."""
        if not isinstance(exc, ZarrfsError | OSError):
            log.debug("%s: unexpected failure", key, exc_info=exc)
        with self._lock:
            if self._fatal is not None:
                return
            if ends_all(exc):
                self._fatal = SourceError(self._target.path, _rule(key, exc), key or "/")
                return
            self._report.bad += 1
            self._warn(f"{key or '/'}: {_rule(key, exc)}")

    def _count(self, files: int = 0, size: int = 0) -> None:
        with self._lock:
            self._report.files += files
            self._report.bytes += size

    # -- in threads

    def _write(self, batch: Sequence[_Item]) -> list[_Item]:
        """Write a batch; return the items whose bytes must be fetched first."""
        missing: list[_Item] = []
        for folder, items in itertools.groupby(batch, lambda item: item.folder):
            trio.from_thread.check_cancelled()
            directory = self._open(folder)
            if directory is None:
                continue
            try:
                for item in items:
                    if self._fatal is not None:
                        break
                    try:
                        if not self._write_one(directory, item):
                            missing.append(item)
                    except Exception as exc:
                        self._fail(item.key, exc)
            finally:
                os.close(directory)
        return missing

    def _open(self, folder: Folder) -> int | None:
        """Open a directory; return None if it, or one above it, cannot be, which is reported once."""
        chain = [folder]
        while (above := chain[-1].parent) is not None and above.names is None:
            chain.append(above)
        found = None
        for one in reversed(chain):
            if found is not None:
                os.close(found)
            if one.failed:
                return None
            try:
                found = self._target.enter(one)
            except (ZarrfsError, OSError) as exc:
                one.failed = True
                self._fail(one.key, exc)
                return None
        return found

    def _write_one(self, directory: int, item: _Item) -> bool:
        """Write one entry; return False if its bytes must be fetched first."""
        info, folder = item.info, item.folder
        there = self._target.compare(directory, folder, info)
        if is_special(info):
            if there is not Existing.SAME:
                self._target.make_special(directory, folder, info, there)
            self._target.dress_special(directory, info)
            return True
        if there is not Existing.SAME:
            if not item.ready and self._files is None:
                return False
            file = create(directory, folder, info)
            try:
                self._fill(file.descriptor, item)
                self._target.place(file, directory, folder, info, there)
            finally:
                file.close()
        self._count(1)
        return True

    def _fill(self, to: int, item: _Item) -> None:
        """Write all bytes of a small file, or of a file of this machine."""
        if item.parts is None:
            source = item.value.fileno() if item.value is not None else None
            if self._files is not None and source is None:
                source = self._files.open_file(item.key)
            assert source is not None
            try:
                copy_data(source, to, item.key, self._copied)
            finally:
                if item.value is None:
                    os.close(source)
            return
        end = 0
        for start, data in item.parts:
            end = write_all(to, data, start)
            self._count(size=len(data))
        if end != item.info.size:
            os.ftruncate(to, item.info.size or 0)

    def _copied(self, count: int) -> None:
        if count >= _PIECE:
            trio.from_thread.check_cancelled()
        self._count(size=count)

    def _finish(self) -> None:
        for folder in reversed(self._folders):
            trio.from_thread.check_cancelled()
            if not folder.wanted or (folder.names is None and not folder.own):
                continue  # another share makes it
            if (directory := self._open(folder)) is not None:
                try:
                    self._target.finish(directory, folder)
                except OSError as exc:
                    self._fail(folder.key, exc)
                finally:
                    os.close(directory)

    # -- bytes that must be fetched

    async def _fetch(self, item: _Item) -> None:
        """Open a value, and read it unless it is large or a local file."""
        store, key, info = self._store, item.key, item.info
        value = item.value = await (store.open(key) if info.size is None else open_sized(store, key, info.size))
        if info.size is None or info.mtime_ns is None:
            time = value.info.mtime_ns if info.mtime_ns is None else info.mtime_ns
            item.info = info._replace(size=value.size, mtime_ns=time)
        if item.ready:
            return
        item.large = _data_bytes(item.info) > (_UNKNOWN if info.size is None else LARGE)
        if not item.large:
            item.parts = [
                (start, await _read(item, start, length)) async for start, length in extents(store, key, item.info)
            ]

    async def _copy_large(self, item: _Item) -> None:
        pieces = iter([piece async for piece in _pieces(self._store, item)])
        file, there = await self._in_thread(self._begin, item)
        with contextlib.closing(file):

            async def copy(pieces: Iterator[tuple[int, int]]) -> None:
                for start, length in pieces:
                    await self._budget.take(length)
                    try:
                        data = await _read(item, start, length)
                        await self._in_thread(write_all, file.descriptor, data, start)
                        self._count(size=length)
                    finally:
                        self._budget.give(length)

            if there is not Existing.SAME:
                await for_each(copy, [pieces] * _PIECES)  # one iterator for all tasks
                await self._in_thread(self._end, item, file, there)
        self._count(1)

    def _begin(self, item: _Item) -> tuple[NewFile, Existing]:
        with self._entered(item.folder) as directory:
            there = self._target.compare(directory, item.folder, item.info)
            return create(directory, item.folder, item.info), there

    def _end(self, item: _Item, file: NewFile, there: Existing) -> None:
        os.ftruncate(file.descriptor, item.info.size or 0)
        with self._entered(item.folder) as directory:
            self._target.place(file, directory, item.folder, item.info, there)

    @contextlib.contextmanager
    def _entered(self, folder: Folder) -> Iterator[int]:
        directory = self._target.enter(folder)
        try:
            yield directory
        finally:
            os.close(directory)


async def _read(item: _Item, start: int, length: int) -> Buffer:
    assert item.value is not None
    data = await item.value.read(start, length)
    check_length(item.key, len(data), start, length)
    return data


async def _pieces(store: Store, item: _Item) -> AsyncIterator[tuple[int, int]]:
    """Yield (start, length) of pieces of a file without its holes; adjacent small extents are joined."""
    begin = stop = 0
    async for start, length in extents(store, item.key, item.info):
        if start == stop and stop - begin + length <= _PIECE:
            stop += length
            continue
        for at in range(begin, stop, _PIECE):
            yield at, min(_PIECE, stop - at)
        begin, stop = start, start + length
    for at in range(begin, stop, _PIECE):
        yield at, min(_PIECE, stop - at)


def _data_bytes(info: Info) -> int:
    """Return the size of a file without its holes, in bytes, as far as that is known; 0 if its size is not known."""
    size = info.size or 0
    return size if info.allocated is None else min(size, info.allocated)


def _rule(key: str, exc: Exception) -> str:
    """Return why an entry could not be copied, for a line that names it."""
    if isinstance(exc, StoreError):
        return exc.reason or type(exc).__doc__ or str(exc)
    if isinstance(exc, ReadError):
        return exc.reason_for(key)
    if isinstance(exc, ZarrfsError):
        return str(exc)
    return f"cannot be written: {reason_of(exc)}" if isinstance(exc, OSError) else internal_error(exc)
