"""The writer that the threads of a copy run. Each call writes a batch of entries, to save changes of thread."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import trio

from zarrfs.copying.copy_report import CopiedEntry
from zarrfs.copying.destination_directory import DestinationDirectory, Folder, Staged, ends_all
from zarrfs.store.api import BlockingReader, Info, Kind, Part, Store
from zarrfs.system.buffers import Buffer, write_all
from zarrfs.system.sparse import copy_data, data_extents

log = logging.getLogger(__name__)

LARGE = 8 << 20  # bytes: a larger file is written in pieces
_HOLES = 16 << 30  # bytes of holes above which a sparse file is not hashed: hashing the zeros would take too long
_HASHED = 256 << 10  # bytes that are read and hashed at a time


@dataclasses.dataclass(slots=True)
class Item:
    """A unit of work: an entry to write, or with `closing` the end of a directory."""

    folder: Folder
    key: str
    info: Info
    content: Sequence[Part] | None = None  # the bytes; None: from `descriptor`, or still to be read
    descriptor: int = -1  # a file with the bytes
    link: str | None = None  # the target of a symbolic link that replaces the copy
    closing: bool = False
    new: bool | None = None  # whether the name is free at the destination; None: not known yet

    @property
    def unread(self) -> bool:
        """Return whether the item is a file whose bytes are neither in memory nor in an open file."""
        return self.info.kind is Kind.FILE and self.content is None and self.descriptor < 0 and self.link is None


class Outcome(NamedTuple):
    """The outcome of an item; without `done` and `error`, its bytes must be fetched first."""

    item: Item
    done: CopiedEntry | None = None
    error: Exception | None = None


class Writing(NamedTuple):
    """A large file that is being written."""

    item: Item
    staged: Staged


class BatchWriter:
    """A writer of items to `filling`, from bytes that can be read without the event loop.

    With `sums`, it computes the SHA-256 of files.
    """

    def __init__(self, filling: DestinationDirectory, store: Store, sums: bool) -> None:
        self._filling, self._sums = filling, sums
        self._reader = store.blocking()
        self._lock = threading.Lock()
        self._ended: list[Outcome] = []  # of finished directories

    def write(self, items: Sequence[Item], go_on: bool) -> tuple[list[Outcome], float]:
        """Write items in order, up to the first failure unless `go_on`. Blocks.

        Return the outcomes, and the fraction of the time that was spent waiting or without a processor.
        """
        began, used = time.monotonic(), time.thread_time()
        outcomes = self._write(items, go_on)
        return outcomes, 1 - (time.thread_time() - used) / (time.monotonic() - began)

    def _write(self, items: Sequence[Item], go_on: bool) -> list[Outcome]:
        batch = _Batch(self._filling, self._reader, items)
        outcomes = []
        try:
            for item in items:
                try:
                    done = self._one(batch, item)
                except Exception as exc:
                    outcomes.append(Outcome(item, None, exc))
                    self.release(item.folder)
                    if not go_on or ends_all(exc):
                        break
                else:
                    if not item.closing:
                        outcomes.append(Outcome(item, done))
        finally:
            batch.close()
            close_all(items)
        return outcomes

    def _one(self, batch: _Batch, item: Item) -> CopiedEntry | None:
        """Write one item; return None if its bytes must be fetched first, or for the end of a directory."""
        if item.closing:
            self.release(item.folder)
            return None
        directory = batch.enter(item.folder)
        done = self._judged(directory, item)
        if done is None:
            if item.link is not None or item.info.kind is Kind.SYMLINK:
                done = self._link(directory, item)
            elif item.descriptor >= 0:
                done = self._copied(directory, item)
            elif self._reader is not None and self._reader.opens_files and item.content is None:
                item.descriptor = self._reader.open_file(item.key)
                try:
                    done = self._copied(directory, item)
                finally:
                    close_all([item])
            else:
                parts = item.content if item.content is not None else batch.parts(item)
                contents = None if parts is None else self._contents(parts)
                if contents is None:
                    return None
                done = self._written(directory, item, contents)
        self.release(item.folder)
        return done

    def _judged(self, directory: int, item: Item) -> CopiedEntry | None:
        """Return the entry if it is in place already, else None."""
        if item.folder.fresh:
            # never replace: if the file system folds case or Unicode, a second name for the same file is an error
            item.new = True
        elif item.new is None:
            info = item.info
            if item.link is not None:
                info = info._replace(kind=Kind.SYMLINK, target=item.link, mtime_ns=None)
            verdict = self._filling.compare_existing(directory, info)
            if verdict == "resumed" and item.link is not None:
                return _done(item, "linked")
            if verdict in ("kept", "resumed"):
                digest = self._digest_of(directory, item) if self._sums else None
                return _done(item, verdict, digest)
            item.new = verdict == "new"
        return None

    def _link(self, directory: int, item: Item) -> CopiedEntry:
        info, target = item.info, item.info.target or ""
        if item.link is not None:
            info, target = info._replace(mtime_ns=None), item.link
        self._filling.symlink(item.folder, directory, info, target, bool(item.new))
        return _done(item, "copied" if item.link is None else "linked")

    def _contents(self, parts: Sequence[Part]) -> list[tuple[int, Buffer]] | None:
        """Return (start, verified bytes) of parts; None if the bytes of a part must be fetched."""
        contents: list[tuple[int, Buffer]] = []
        for part in parts:
            data = part.data
            if data is None:
                assert self._reader is not None
                data = self._reader.blob(part.url)
                if data is None:
                    return None
                if part.offset or len(data) != part.length:
                    data = data[part.offset : part.offset + part.length]
            contents.append((part.start, data))
        return contents

    def _written(self, directory: int, item: Item, contents: list[tuple[int, Buffer]]) -> CopiedEntry:
        staged = self._filling.create(item.folder, directory, item.info.mode)
        try:
            at = 0
            for start, data in contents:
                at = start + os.pwrite(staged.descriptor, data, start)
                if at != start + len(data):
                    at = write_all(staged.descriptor, memoryview(data)[at - start :], at)
            size = item.info.size or 0
            if at != size:
                os.ftruncate(staged.descriptor, size)
            digest = self._digest_written(staged.descriptor, item.key, contents, size) if self._sums else None
        except BaseException:
            self._filling.discard(staged)
            raise
        self._placed(staged, directory, item)
        return _done(item, "copied", digest)

    def _placed(self, staged: Staged, directory: int, item: Item) -> None:
        try:
            self._filling.place(staged, directory, item.info, bool(item.new))
        except BaseException:
            self._filling.discard(staged, opened=False)
            raise

    def _copied(self, directory: int, item: Item) -> CopiedEntry:
        """Copy the data extents of the file that the item has a descriptor of."""
        staged = self._filling.create(item.folder, directory, item.info.mode)
        try:
            size = os.fstat(item.descriptor).st_size
            item.info = item.info._replace(size=size)
            copy_data(item.descriptor, staged.descriptor, size, item.key)
            digest = self._digest(staged.descriptor, item.key) if self._sums else None
        except BaseException:
            self._filling.discard(staged)
            raise
        self._placed(staged, directory, item)
        return _done(item, "copied", digest)

    # -- large files

    def begin(self, item: Item) -> Outcome | Writing:
        """Begin a file that is written in pieces; return an Outcome if it is in place or cannot be written. Blocks."""
        try:
            directory = self._filling.open(item.folder)
            try:
                done = self._judged(directory, item)
                if done is None:
                    return Writing(item, self._filling.create(item.folder, directory, item.info.mode))
            finally:
                os.close(directory)
            self.release(item.folder)
        except Exception as exc:
            self.release(item.folder)
            return Outcome(item, None, exc)
        return Outcome(item, done)

    def fill(self, writing: Writing, parts: Sequence[Part]) -> int:
        """Write parts up to the first part that must be fetched; return the number of parts written.

        Blocks. Raise OSError, ReadError.
        """
        for count, part in enumerate(parts):
            contents = self._contents([part])
            if contents is None:
                return count
            write_all(writing.staged.descriptor, contents[0][1], part.start)
        return len(parts)

    def summed(self, writing: Writing) -> str | None:
        """Set the final size of a file; return its SHA-256 if sums are requested. Blocks. Raise OSError."""
        os.ftruncate(writing.staged.descriptor, writing.item.info.size or 0)
        return self._digest(writing.staged.descriptor, writing.item.key) if self._sums else None

    def end(self, writing: Writing, digest: str | None, error: Exception | None) -> Outcome:
        """Rename the file into place, or remove it if there is an `error`. Blocks."""
        item, staged = writing
        try:
            if error is not None:
                self._filling.discard(staged)
                return Outcome(item, None, error)
            try:
                directory = self._filling.open(item.folder)
            except BaseException:
                self._filling.discard(staged)
                raise
            try:
                self._placed(staged, directory, item)
            finally:
                os.close(directory)
            return Outcome(item, _done(item, "copied", digest))
        except Exception as exc:
            return Outcome(item, None, exc)
        finally:
            self.release(item.folder)

    # -- directories

    def hold(self, folder: Folder) -> None:
        """Keep `folder` unfinished until one more release()."""
        with self._lock:
            folder.holds += 1

    def release(self, folder: Folder) -> None:
        """Drop one hold of `folder`. With the last hold, set its mode and time, and drop its hold of the parent."""
        at: Folder | None = folder
        while at is not None:
            with self._lock:
                at.holds -= 1
                if at.holds:
                    return
            if at.parent is not None and at.wanted:
                outcome = self._dressed(at)
                with self._lock:
                    self._ended.append(outcome)
            at = at.parent

    def ended(self) -> list[Outcome]:
        """Return the outcomes of directories that were finished since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def _dressed(self, folder: Folder) -> Outcome:
        item = Item(folder, folder.key, folder.info)
        try:
            return Outcome(item, _done(item, "copied" if self._filling.set_attributes(folder) else "kept"))
        except Exception as exc:
            return Outcome(item, None, exc)

    # -- sums

    def _digest_of(self, directory: int, item: Item) -> str | None:
        """Return the SHA-256 of the existing entry of an item; None unless the item is a file."""
        if item.info.kind is not Kind.FILE:
            return None
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(os.fsencode(item.info.name), flags, dir_fd=directory)
        try:
            return self._digest(descriptor, item.key)
        finally:
            os.close(descriptor)

    def _digest_written(
        self, descriptor: int, key: str, contents: list[tuple[int, Buffer]], size: int
    ) -> str | None:
        """Return the SHA-256 of a file that was just written; of the bytes in memory if they are complete."""
        if len(contents) == 1 and contents[0][0] == 0 and len(contents[0][1]) == size:
            return hashlib.sha256(contents[0][1]).hexdigest()
        return self._digest(descriptor, key)

    def _digest(self, descriptor: int, key: str) -> str | None:
        """Return the SHA-256 of a file; None, with a warning, if it has more bytes of holes than _HOLES."""
        status = os.fstat(descriptor)
        if status.st_size - 512 * status.st_blocks > _HOLES:  # holes, or the file system compresses
            data = sum(stop - start for start, stop in data_extents(descriptor, status.st_size))
            if status.st_size - data > _HOLES:
                log.warning("%s: is not hashed, as %d bytes of it are holes", key, status.st_size - data)
                return None
        digest, buffer, at = hashlib.sha256(), bytearray(_HASHED), 0
        while count := os.preadv(descriptor, [buffer], at):
            trio.from_thread.check_cancelled()
            digest.update(memoryview(buffer)[:count])
            at += count
        return digest.hexdigest()


class _Batch:
    """State of one batch: the directory that the thread has open, and the parts of the files."""

    def __init__(self, filling: DestinationDirectory, reader: BlockingReader | None, items: Sequence[Item]) -> None:
        self._filling, self._reader, self._items = filling, reader, items
        self._folder: Folder | None = None
        self._directory = -1
        self._parts: dict[str, dict[str, list[Part] | None]] = {}  # by directory and name

    def enter(self, folder: Folder) -> int:
        """Return a descriptor of `folder`, which the batch keeps open until it enters another folder."""
        if folder is not self._folder:
            self.close()
            self._directory = self._filling.open(folder)
            self._folder = folder
        return self._directory

    def parts(self, item: Item) -> list[Part] | None:
        """Return the parts of a file; None if they need the event loop."""
        if self._reader is None:
            return None
        found = self._parts.get(item.folder.key)
        if found is None:
            wanted = [one.info.name for one in self._items if one.folder is item.folder and one.unread]
            found = self._parts[item.folder.key] = self._reader.parts_in(item.folder.key, wanted)
        return found.get(item.info.name)

    def close(self) -> None:
        """Close the directory."""
        if self._directory >= 0:
            os.close(self._directory)
        self._directory, self._folder = -1, None


def close_all(items: Sequence[Item]) -> None:
    """Close the descriptors of items."""
    for item in items:
        if item.descriptor >= 0:
            os.close(item.descriptor)
            item.descriptor = -1


def _done(item: Item, how: str, digest: str | None = None) -> CopiedEntry:
    kind = Kind.SYMLINK if item.link is not None else item.info.kind
    size = len(os.fsencode(item.info.target or "")) if kind is Kind.SYMLINK and item.link is None else item.info.size
    return CopiedEntry(item.key, kind, size or 0, item.info.mtime_ns, digest, how)


def data_bytes(info: Info) -> int:
    """Return the size of a file without its holes, in bytes, as far as that is known; 0 if its size is not known."""
    size = info.size or 0
    return size if info.allocated is None else min(size, info.allocated)
