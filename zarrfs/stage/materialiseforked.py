"""What the forked processes of materialise() do: they write what asks for nothing, many entries at a time.

That is a file whose bytes this machine has, or a link, in a directory where nobody has been before. Whatever does not
go well is left to the ordinary way, which tells why. Threads wait for each other at every call of the system
(docs/archives.md).
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import trio

from zarrfs.errors import ZarrfsError
from zarrfs.stage.materialiseparts import broken_rule
from zarrfs.stage.materialisereport import Report
from zarrfs.stage.materialisewrite import LARGE, Done, Item, Writer
from zarrfs.stage.workers import Workers
from zarrfs.store.api import SET_IDS, Info, Kind, join_key
from zarrfs.store.filling import Filling, Folder, InTheWay
from zarrfs.store.index import IndexStore, Part
from zarrfs.store.indexentries import Entry

ENTRIES, _BYTES = 128, LARGE  # of a task
_FOLDER = Info("", Kind.DIRECTORY)
_KINDS = tuple(Kind)  # by their numbers
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")  # names that break no rule, which most are


class Batch(NamedTuple):
    """Entries of a directory that a process is to write; those in `left` are not for it."""

    folder: Folder
    entries: list[Entry]
    left: list[Entry]


# of a batch: the numbers of entries that were not written, and the SHA-256 of each entry that was, if they are told
Result = tuple[list[int], list[str | None] | None]


class Forked:
    """Writes the tree of `index` to a `filling` in which nothing is yet, in `jobs` processes.

    run() is for a thread of trio's, and is cancelled with it. `fail(key, exc)` is told of names that break a rule.
    """

    def __init__(
        self, index: IndexStore, filling: Filling, jobs: int, sums: bool, set_ids: bool,
        fail: Callable[[str, Exception], None],
    ) -> None:  # fmt: skip
        self._index, self._filling, self._fail = index, filling, fail
        self._mask = 0o7777 if set_ids else 0o7777 & ~SET_IDS
        self._sums = sums
        self._writer = Writer(filling, index, sums, lambda: None)
        self._alone = False  # a process with no place to write in
        self._workers = Workers(
            self._write, jobs, about=filling.path, begin=self._begin, pause=trio.from_thread.check_cancelled
        )

    def start(self) -> None:
        """Fork the processes, which end with the thread that does this. OSError."""
        self._filling.share()
        self._workers.start()

    def close(self) -> None:
        """End them."""
        self._workers.close()

    def run(self, root: Folder, hold: Callable[[Folder], None]) -> Iterator[list[tuple[Batch, Result]]]:
        """What has become of all entries, in the order of the tree, for note().

        Each batch holds its folder once, and so does every folder below. Blocks.
        """
        waiting: deque[list[Batch]] = deque()

        def tasks() -> Iterator[list[tuple[str, list[Entry]]]]:
            for task in self._tasks(root, hold):
                waiting.append(task)
                yield [(batch.folder.key, batch.entries) for batch in task]

        for results, _memory in self._workers.map(tasks()):
            yield list(zip(waiting.popleft(), results, strict=True))

    # -- which entries there are

    def _tasks(self, root: Folder, hold: Callable[[Folder], None]) -> Iterator[list[Batch]]:
        task: list[Batch] = []
        count = size = 0
        for batch in self._batches(root, hold):
            task.append(batch)
            count += len(batch.entries) + 1
            size += sum(map(held_of, batch.entries))
            if count >= ENTRIES or size >= _BYTES:
                yield task
                task, count, size = [], 0, 0
        if task:
            yield task

    def _batches(self, root: Folder, hold: Callable[[Folder], None]) -> Iterator[Batch]:
        levels = [(root, self._index.entries(root.key))]
        while levels:
            folder, listing = levels[-1]
            batch = Batch(folder, [], [])
            try:
                last = self._gather(batch, listing)
            except ZarrfsError as exc:  # of a damaged index
                self._fail(folder.key, exc)
                last = None
            if last is None:  # the hold of who lists the directory is the batch's from now on
                levels.pop()
            else:
                hold(folder)
                if last[1] == Kind.DIRECTORY:
                    hold(folder)
                    below = Folder(join_key(folder.key, last[0]), _info(last), folder)
                    below.wanted = True
                    levels.append((below, self._index.entries(below.key)))
            yield batch

    def _gather(self, batch: Batch, listing: Iterator[Entry]) -> Entry | None:
        """Fill a batch up to the next directory, or until it is full; the last entry, or None at the end."""
        folder, entries, left = batch
        room = _BYTES
        for entry in listing:
            name = entry[0]
            rule = None if _PLAIN.fullmatch(name) else broken_rule(name, folder)
            if rule is not None:
                self._fail(join_key(folder.key, name), InTheWay(rule))
                continue
            if entry[1] == Kind.DIRECTORY:
                return entry
            held = held_of(entry)
            unknown = entry[6] is None and entry[7] is None  # neither a link nor bytes at hand
            large = held > LARGE or (self._sums and (entry[2] or 0) > LARGE)  # zeros are summed, too
            if unknown or large or not (folder.fresh or self._made(folder)):
                left.append(entry)
            else:
                entries.append(self._ordinary(entry))
            room -= held
            if len(entries) + len(left) >= ENTRIES or room < 0:
                return entry
        return None

    def _made(self, folder: Folder) -> bool:
        """Whether a directory is there, and nobody else's."""
        if not folder.fresh:
            try:
                os.close(self._filling.open(folder))
            except (OSError, ZarrfsError):
                return False
        return folder.fresh

    def _ordinary(self, entry: Entry) -> Entry:
        """An entry whose mode has no bits that are not to be given."""
        if entry[3] is None or entry[3] & self._mask == entry[3]:
            return entry
        return *entry[:3], entry[3] & self._mask, *entry[4:]

    # -- in the processes

    def _begin(self) -> None:
        self._index.only_sound = True  # or each process would warn of the same place
        try:
            self._filling.forked()
        except OSError:  # no room for a directory: what there is room for is found out by whoever forked us
            self._alone = True

    def _write(self, task: list[tuple[str, list[Entry]]], memory: memoryview) -> list[Result]:
        results: list[Result] = []
        for key, entries in task:
            folder = Folder(key, _FOLDER, None)
            folder.fresh = True
            folder.holds += len(entries)
            items = [] if self._alone else [_item(folder, entry) for entry in entries]
            outcomes, _ = self._writer.write(items, go_on=True)
            done = [outcome.done for outcome in outcomes] + [None] * (len(entries) - len(outcomes))
            left = [number for number, one in enumerate(done) if one is None]
            results.append((left, [one and one.sha256 for one in done] if self._sums else None))
        return results


def note(batch: Batch, result: Result, report: Report, tell: Callable[[Done], None] | None) -> None:
    """Count what a process has written of a batch, and `tell` of it; what it has not written is left, too."""
    folder, entries, left = batch
    missing, sums = result
    if missing:
        left += [entries[number] for number in missing]
        gone = set(missing)
        entries = [entry for number, entry in enumerate(entries) if number not in gone]
        sums = sums and [one for number, one in enumerate(sums) if number not in gone]
    files = [entry for entry in entries if entry[1] == Kind.FILE]
    report.files += len(files)
    report.bytes += sum(map(held_of, files))
    report.links += len(entries) - len(files)
    if tell is not None:
        told = sums or [None] * len(entries)
        for (name, kind, size, _mode, mtime_ns, *_), digest in zip(entries, told, strict=True):
            tell(Done(join_key(folder.key, name), Kind(kind), size or 0, mtime_ns, digest, "copied"))


def _item(folder: Folder, entry: Entry) -> Item:
    content = None if entry[7] is None else [Part(*part) for part in entry[7]]
    return Item(folder, join_key(folder.key, entry[0]), _info(entry), content)


def _info(entry: Entry) -> Info:
    name, kind, size, mode, mtime_ns, held, target, _parts = entry
    return Info(name, _KINDS[kind], size, mode, mtime_ns, target, held)


def held_of(entry: Entry) -> int:
    """Bytes of an entry that are not holes."""
    size, held = entry[2] or 0, entry[5]
    return size if held is None else min(size, held)
