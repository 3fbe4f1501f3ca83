"""Forked processes that write the entries of a copy whose bytes are on this machine, many entries at a time.

An entry that a process fails to write is left to the threads, which report the reason. Processes are faster than
threads alone, which contend at every system call (docs/archives.md).
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import trio

from zarrfs.copying.copy_report import CopiedEntry, CopyReport
from zarrfs.copying.copy_threads import LARGE, BatchWriter, Item
from zarrfs.copying.destination_directory import DestinationDirectory, Folder, InTheWay, broken_rule
from zarrfs.errors import ZarrfsError
from zarrfs.store.api import SET_IDS, BlockingReader, Entry, Info, Kind, Part, Store, join_key
from zarrfs.store.division import Division
from zarrfs.store.keyglobs import Picking
from zarrfs.system.workers import Workers

ENTRIES, _BYTES = 128, LARGE  # entries and bytes after which a task is complete
_SEEN = 4096  # maximum number of entries examined for one batch
_FOLDER = Info("", Kind.DIRECTORY)
_KINDS = tuple(Kind)  # by number
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")  # names that certainly break no rule: most names


class Batch(NamedTuple):
    """Entries of a directory for a process to write; entries in `left` are written by the threads."""

    folder: Folder
    entries: list[Entry]
    left: list[Entry]


_HOW = ("", "copied", "kept", "resumed")
Task = list[tuple[str, bool, list[Entry]]]  # per batch: the key of its folder, whether the folder is fresh, entries
# per batch: the outcome of each entry as an index of _HOW, and with CopyOptions.sums the SHA-256 of each entry
Result = tuple[bytes, list[str | None] | None]


class CopyProcesses:
    """Processes that write the entries that `picking` selects from `store` to `filling`.

    run() must be called in a thread of trio, and is cancelled with it. It calls `fail(key, exc)` for names that break
    a rule, and for directories that cannot be listed.
    """

    def __init__(
        self, store: Store, reader: BlockingReader, filling: DestinationDirectory, picking: Picking, jobs: int,
        sums: bool, set_ids: bool, fail: Callable[[str, Exception], None], division: Division | None = None,
    ) -> None:  # fmt: skip
        self._reader, self._filling, self._picking, self._fail = reader, filling, picking, fail
        self._division = division
        self._mask = 0o7777 if set_ids else 0o7777 & ~SET_IDS
        self._sums = sums
        self._writer = BatchWriter(filling, store, sums, lambda: None)
        self._unusable = False  # True in a process that could not create its staging directory
        self._workers = Workers(
            self._write, jobs, about=filling.path, begin=self._begin, pause=trio.from_thread.check_cancelled
        )

    def start(self) -> None:
        """Fork the processes, which end when the calling thread ends. Raise OSError."""
        self._workers.start()

    def close(self) -> None:
        """End the processes."""
        self._workers.close()

    def run(self, root: Folder, hold: Callable[[Folder], None]) -> Iterator[list[tuple[Batch, Result]]]:
        """Yield the outcomes of all entries, in the order of the tree, for note(). Blocks.

        Every batch has one hold of its folder, and every folder one of its parent: `hold` is BatchWriter.hold().
        """
        waiting: deque[list[Batch]] = deque()

        def tasks() -> Iterator[Task]:
            for task in self._tasks(root, hold):
                waiting.append(task)
                yield [(batch.folder.key, batch.folder.fresh, batch.entries) for batch in task]

        for results, _memory in self._workers.map(tasks()):
            yield list(zip(waiting.popleft(), results, strict=True))

    # -- selection of entries

    def _tasks(self, root: Folder, hold: Callable[[Folder], None]) -> Iterator[list[Batch]]:
        task: list[Batch] = []
        count = size = 0
        for batch in self._batches(root, hold):
            trio.from_thread.check_cancelled()
            task.append(batch)
            count += len(batch.entries) + 1
            size += sum(map(held_of, batch.entries))
            if count >= ENTRIES or size >= _BYTES:
                yield task
                task, count, size = [], 0, 0
        if task:
            yield task

    def _batches(self, root: Folder, hold: Callable[[Folder], None]) -> Iterator[Batch]:
        levels = [(root, self._picking.root, self._reader.entries(root.key))]
        while levels:
            folder, chosen, listing = levels[-1]
            batch = Batch(folder, [], [])
            try:
                last, picked = self._gather(batch, chosen, listing)
            except ZarrfsError as exc:  # the index is damaged
                self._fail(folder.key, exc)
                last = None
            if last is None:  # the hold of the listing passes to this last batch
                levels.pop()
            else:
                hold(folder)
                if last[1] == Kind.DIRECTORY:
                    hold(folder)
                    below = Folder(join_key(folder.key, last[0]), _info(last), folder)
                    if picked and self._is_mine(below.key, last):
                        below.want()
                    levels.append((below, picked, self._reader.entries(below.key)))
            yield batch

    def _gather(self, batch: Batch, chosen: bool, listing: Iterator[Entry]) -> tuple[Entry | None, bool]:
        """Fill a batch up to the next directory, or until it is full. `chosen`: whether the whole folder is selected.

        Return the last entry examined, None at the end of the listing, and whether that entry is selected.
        """
        folder, entries, left = batch
        room, seen, usable, globs = _BYTES, 0, folder.fresh, not self._picking.everything
        for entry in listing:
            name, seen = entry[0], seen + 1
            picked = self._picking.picked(join_key(folder.key, name), chosen) if globs else True
            if picked is None:
                continue
            rule = None if _PLAIN.fullmatch(name) else broken_rule(name, folder)
            if rule is not None:
                if picked:
                    self._fail(join_key(folder.key, name), InTheWay(rule))
                continue
            if entry[1] == Kind.DIRECTORY:
                return entry, picked
            if picked and self._is_mine(join_key(folder.key, name), entry):
                folder.want()
                held = held_of(entry)
                # the entry is not a link, and a process cannot read its bytes
                unknown = not self._reader.opens_files and entry[6] is None and entry[7] is None
                large = held > LARGE or (self._sums and (entry[2] or 0) > LARGE)  # a checksum includes zeros of holes
                usable = usable or self._usable(folder)
                if unknown or large or not usable:
                    left.append(entry)
                else:
                    entries.append(self._ordinary(entry))
                room -= held
            if len(entries) + len(left) >= ENTRIES or room < 0 or seen >= _SEEN:
                return entry, picked
        return None, False

    def _is_mine(self, key: str, entry: Entry) -> bool:
        """Return whether a selected entry belongs to the share of this run."""
        if self._division is None:
            return True
        if entry[1] != Kind.FILE:
            return self._division.mine(key, 0)
        return self._division.mine(key, None if entry[2] is None else held_of(entry))

    def _usable(self, folder: Folder) -> bool:
        """Create a directory if it is missing; return whether it is on the file system of the staging directory."""
        try:
            os.close(self._filling.open(folder))
        except (OSError, ZarrfsError):
            return False
        return not folder.stages_itself

    def _ordinary(self, entry: Entry) -> Entry:
        """Return an entry without the mode bits that the copy must not set."""
        if entry[3] is None or entry[3] & self._mask == entry[3]:
            return entry
        return *entry[:3], entry[3] & self._mask, *entry[4:]

    # -- in the processes

    def _begin(self) -> None:
        self._writer.in_many_processes()
        try:
            self._filling.forked()
        except OSError:  # the disk may be full: the parent process finds out what can still be written
            self._unusable = True

    def _write(self, task: Task, memory: memoryview) -> list[Result]:
        results: list[Result] = []
        for key, fresh, entries in task:
            folder = Folder(key, _FOLDER, None)
            folder.fresh = fresh
            folder.holds += len(entries)
            items = [] if self._unusable else [_item(folder, entry) for entry in entries]
            outcomes, _ = self._writer.write(items, go_on=True)
            done = [outcome.done for outcome in outcomes] + [None] * (len(entries) - len(outcomes))
            how = bytes(0 if one is None else _HOW.index(one.how) for one in done)
            results.append((how, [one and one.sha256 for one in done] if self._sums else None))
        return results


def note(batch: Batch, result: Result, report: CopyReport, tell: Callable[[CopiedEntry], None] | None) -> None:
    """Count and report (`tell`) the entries of a batch that are in place now; add the others to `left`."""
    folder, entries, left = batch
    how, sums = result
    copied = entries
    if how.count(1) < len(entries):
        copied = [entry for entry, number in zip(entries, how, strict=True) if number == 1]
        left += [entry for entry, number in zip(entries, how, strict=True) if not number]
        report.kept += how.count(2)
        report.resumed += how.count(3)
    files = [entry for entry in copied if entry[1] == Kind.FILE]
    report.files += len(files)
    report.bytes += sum(map(held_of, files))
    report.links += len(copied) - len(files)
    if tell is not None:
        for entry, number, digest in zip(entries, how, sums or [None] * len(entries), strict=True):
            if number:
                name, kind, size, _mode, mtime_ns, *_ = entry
                tell(CopiedEntry(join_key(folder.key, name), Kind(kind), size or 0, mtime_ns, digest, _HOW[number]))


def _item(folder: Folder, entry: Entry) -> Item:
    content = None if entry[7] is None else [Part(*part) for part in entry[7]]
    return Item(folder, join_key(folder.key, entry[0]), _info(entry), content)


def _info(entry: Entry) -> Info:
    name, kind, size, mode, mtime_ns, held, target, _parts = entry
    return Info(name, _KINDS[kind], size, mode, mtime_ns, target, held)


def held_of(entry: Entry) -> int:
    """Return the size of an entry without its holes, in bytes."""
    size, held = entry[2] or 0, entry[5]
    return size if held is None else min(size, held)
