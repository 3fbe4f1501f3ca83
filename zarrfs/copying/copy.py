"""Copies of a store to a directory. One walk finds the entries, threads write them a batch at a time.

A thread reads by itself what is on this machine: files, inline values, and blobs in directories. Other values are
fetched on the event loop, many at a time, and then written by a thread. Each file appears under its name when it is
complete, and one that has the kind, size and time of its entry is not written again: a copy that was killed is resumed
by running it again, without notes about it anywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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
from zarrfs.store.api import Info, Kind, Part, Store, Value, join_key
from zarrfs.store.destination import sync_file_system
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.index import IndexStore
from zarrfs.store.keyglobs import Picking
from zarrfs.store.traversal import check_length, extents
from zarrfs.store.values import open_sized
from zarrfs.store.writing import NewFile
from zarrfs.system.buffers import Buffer, write_all
from zarrfs.system.sparse import copy_data

log = logging.getLogger(__name__)

T = TypeVar("T")
LARGE = 8 << 20  # bytes: a larger value that must be fetched is fetched and written in pieces
_BATCH, _BATCH_BYTES = 128, LARGE  # entries, and bytes, that a thread writes in one call
_IN_FLIGHT = 6  # batches at the same time; the threads write _THREADS of them
_THREADS = min(4, os.cpu_count() or 1)
_MEMORY = 64 << 20  # bytes that are fetched and not written yet
_UNKNOWN = 256 << 10  # bytes assumed for a value of unknown size
_PIECE, _PIECES = 4 << 20, 4  # bytes of a request for a part of a large value; requests at the same time
_FAILURES_KEPT = 1000


@dataclasses.dataclass
class CopyReport:
    """The counts of a copy, updated while it runs."""

    files: int = 0  # files in place, without links
    bytes: int = 0  # bytes of files that were written
    expected_files: int | None = None
    expected_bytes: int | None = None
    bad: int = 0  # entries that failed
    failed: list[str] = dataclasses.field(default_factory=list)  # a line for each of the first ones
    unmatched: list[str] = dataclasses.field(default_factory=list)  # globs of `include` without a match


@dataclasses.dataclass(slots=True)
class _Item:
    """An entry to write."""

    folder: Folder
    key: str
    info: Info
    parts: Sequence[Part] | None = None  # its bytes, once they are fetched


async def copy_store(
    store: Store, destination: str, report: CopyReport, include: Sequence[str] = (), exclude: Sequence[str] = (),
    overwrite: bool = False, share: Share = WHOLE, sync: bool = False,
) -> None:  # fmt: skip
    """Write the entries of `store`, or those of them that globs and `share` select, to the directory `destination`.

    Failures of entries are added to `report`. Raise UsageError if the destination cannot be used, and SourceError if
    nothing more can be written to it.
    """
    root = await store.info("")
    target = await trio.to_thread.run_sync(TargetDirectory, destination, root, overwrite)
    try:
        copier = _Copier(store, target, report, Picking(include, exclude), share)
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
        self, store: Store, target: TargetDirectory, report: CopyReport, picking: Picking, share: Share
    ) -> None:
        self._store, self._target, self._report, self._picking, self._share = store, target, report, picking, share
        self._files = store if isinstance(store, FileSystemStore) else None
        self._index = store if isinstance(store, IndexStore) else None
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
        send, receive = trio.open_memory_channel[tuple[_Item, int]](_BATCH)
        with self._scope:
            async with trio.open_nursery() as writers:
                for _ in range(_THREADS):
                    writers.start_soon(self._write_fetched, receive.clone())
                receive.close()
                async with send, trio.open_nursery() as nursery:
                    self._nursery, self._fetched = nursery, send
                    await self._walk(root)
                    await self._flush()
            await self._in_thread(self._finish)
        if self._fatal is not None:
            raise self._fatal
        if self._picking.everything:
            for entry, rule in (*await self._store.problems(), *(await self._store.left_out("")).items()):
                if self._share.has(entry):
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
                async with trio.open_nursery() as nursery:
                    for item in missing:
                        nursery.start_soon(self._fetch, item)
        finally:
            self._slots.release()

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
            if len(self._report.failed) < _FAILURES_KEPT:
                self._report.failed.append(f"{key or '/'}: {_rule(key, exc)}")

    def _count(self, files: int = 0, size: int = 0) -> None:
        with self._lock:
            self._report.files += files
            self._report.bytes += size

    # -- in threads

    def _write(self, batch: Sequence[_Item]) -> list[_Item]:
        """Write a batch; return the items whose bytes must be fetched first."""
        missing: list[_Item] = []
        for folder, group in itertools.groupby(batch, lambda item: item.folder):
            trio.from_thread.check_cancelled()
            items = list(group)
            directory = self._open(folder)
            if directory is None:
                continue
            try:
                local = self._local_parts(folder, items)
                for item in items:
                    if self._fatal is not None:
                        break
                    try:
                        if not self._write_one(directory, item, local):
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

    def _local_parts(self, folder: Folder, items: Sequence[_Item]) -> dict[str, list[Part] | None]:
        names = [item.info.name for item in items if item.parts is None and item.info.kind is Kind.FILE]
        return {} if self._index is None or not names else self._index.parts_in(folder.key, names)

    def _write_one(self, directory: int, item: _Item, local: dict[str, list[Part] | None]) -> bool:
        """Write one entry; return False if its bytes must be fetched first."""
        info, folder = item.info, item.folder
        there = self._target.compare(directory, folder, info)
        if is_special(info):
            if there is Existing.SAME:
                self._target.dress_special(directory, info)
            else:
                self._target.make_special(directory, folder, info, there)
            return True
        if there is Existing.SAME:
            self._count(1)
            return True
        if self._files is not None:
            source = self._files.open_file(item.key, info)
            try:
                self._write_file(directory, item, there, source)
            finally:
                os.close(source)
            return True
        parts = local.get(info.name) if item.parts is None else item.parts
        contents = None if parts is None else self._contents(parts)
        if contents is None:
            return False
        file = create(directory, folder, info)
        try:
            end = 0
            for start, data in contents:
                end = write_all(file.descriptor, data, start)
            if end != info.size:
                os.ftruncate(file.descriptor, info.size or 0)
            self._target.place(file, directory, folder, info, there)
        finally:
            file.close()
        self._count(1, sum(len(data) for _, data in contents))
        return True

    def _write_file(self, directory: int, item: _Item, there: Existing, source: int) -> None:
        """Write an entry whose bytes are those of the open file `source`."""
        with contextlib.closing(create(directory, item.folder, item.info)) as file:
            copy_data(source, file.descriptor, item.key, self._copied)
            self._target.place(file, directory, item.folder, item.info, there)
        self._count(1)

    def _copied(self, count: int) -> None:
        if count >= _PIECE:
            trio.from_thread.check_cancelled()
        self._count(size=count)

    def _contents(self, parts: Sequence[Part]) -> list[tuple[int, Buffer]] | None:
        """Return (start, verified bytes) of parts; None if the bytes of a part must be fetched."""
        contents: list[tuple[int, Buffer]] = []
        for part in parts:
            data = part.data
            if data is None:
                assert self._index is not None
                data = self._index.blob(part.url)
                if data is None:
                    return None
                data = data[part.offset : part.offset + part.length]
            contents.append((part.start, data))
        return contents

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
        """Fetch a value, and write it or pass it on to _write_fetched()."""
        try:
            info = item.info
            opening = self._store.open(item.key) if info.size is None else open_sized(self._store, item.key, info.size)
            with contextlib.closing(await opening) as value:
                time = value.info.mtime_ns if info.mtime_ns is None else info.mtime_ns
                item.info = info._replace(size=value.size, mtime_ns=time)
                known = item.info != info and item.folder.has(info.name)
                if known and await self._in_thread(self._in_place, item):
                    return
                if value.fileno() is not None:
                    await self._in_thread(self._write_open, item, value)
                elif _data_bytes(item.info) > LARGE:
                    await self._write_large(item, value)
                else:
                    await self._read(item, value)
        except Exception as exc:
            self._fail(item.key, exc)

    def _in_place(self, item: _Item) -> bool:
        """Return whether an entry, of which size and time are known now, is in place already."""
        with self._entered(item.folder) as directory:
            there = self._target.compare(directory, item.folder, item.info) is Existing.SAME
        self._count(int(there))
        return there

    @contextlib.contextmanager
    def _entered(self, folder: Folder) -> Iterator[int]:
        directory = self._target.enter(folder)
        try:
            yield directory
        finally:
            os.close(directory)

    def _write_open(self, item: _Item, value: Value) -> None:
        source = value.fileno()
        assert source is not None
        with self._entered(item.folder) as directory:
            self._write_file(directory, item, self._target.compare(directory, item.folder, item.info), source)

    async def _read(self, item: _Item, value: Value) -> None:
        room = max(_data_bytes(item.info), _MEMORY >> 10)  # a thousand values at most
        await self._budget.take(room)
        try:
            parts = []
            async for start, length in extents(self._store, item.key, item.info):
                data = await value.read(start, length)
                check_length(item.key, len(data), start, length)
                parts.append(Part(start, length, data))
            item.parts = parts
            await self._fetched.send((item, room))
        except BaseException:
            self._budget.give(room)
            raise

    async def _write_fetched(self, receive: trio.MemoryReceiveChannel[tuple[_Item, int]]) -> None:
        """Write fetched values; those that are waiting are written in one batch."""

        def waiting() -> Iterator[tuple[_Item, int]]:
            with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
                while True:
                    yield receive.receive_nowait()

        async with receive:
            async for first in receive:
                batch = [first, *itertools.islice(waiting(), _BATCH - 1)]
                await self._in_thread(self._write, [item for item, _ in batch])
                self._budget.give(sum(room for _, room in batch))

    async def _write_large(self, item: _Item, value: Value) -> None:
        file, there = await self._in_thread(self._begin, item)
        try:
            pieces = iter([piece async for piece in _pieces(self._store, item.key, item.info)])

            async def copy(pieces: Iterator[tuple[int, int]]) -> None:
                for start, length in pieces:
                    await self._budget.take(length)
                    try:
                        data = await value.read(start, length)
                        check_length(item.key, len(data), start, length)
                        await self._in_thread(write_all, file.descriptor, data, start)
                        self._count(size=length)
                    finally:
                        self._budget.give(length)

            await for_each(copy, [pieces] * _PIECES)  # one iterator for all tasks
            await self._in_thread(self._end, item, file, there)
        finally:
            file.close()

    def _begin(self, item: _Item) -> tuple[NewFile, Existing]:
        with self._entered(item.folder) as directory:
            there = self._target.compare(directory, item.folder, item.info)
            return create(directory, item.folder, item.info), there

    def _end(self, item: _Item, file: NewFile, there: Existing) -> None:
        os.ftruncate(file.descriptor, item.info.size or 0)
        with self._entered(item.folder) as directory:
            self._target.place(file, directory, item.folder, item.info, there)
        self._count(1)


async def _pieces(store: Store, key: str, info: Info) -> AsyncIterator[tuple[int, int]]:
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
