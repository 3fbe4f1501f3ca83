"""Read-ahead across keys: predict the keys that a reader will open next, and prefetch their values."""

from __future__ import annotations

import logging
from collections import deque

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import ZarrfsError
from zarrfs.prefetch.sequences import REACH, DirectoryOrder, GridOrder, Index, Pattern, find_run, parse
from zarrfs.store.api import Store, split_key

log = logging.getLogger(__name__)

_FIRST = 4  # keys in the first read-ahead window; a later one has as many as were predicted correctly
_CHEAP = 1 << 20  # bytes of a window that may have four times as many keys as were predicted correctly
_MOST = 1024  # keys ahead of one reader
_PART = 4 << 20  # bytes: of a larger value only the beginning is prefetched
_PLACES = 64  # arrays and directories with a history; also the number of runs
_RECENT = 256  # reads in the history of an array or directory
_AGAIN = 512  # a value among so many latest reads is not prefetched
_LEAST, _LEAST_MOST = 3, 16  # reads in a row that start a run; doubled in a place where a run was wrong
_BATCHES = 2  # in flight for one run: the half that is being read, and the next one
_LOOKS = (_LEAST, 256)  # unpredicted reads between two looks at a listing, doubled while it does not explain them
_LOOKED_AT = 32  # last reads that a listing has to explain


class _Place:
    """The recent reads in an array, or in a directory whose files are not chunks."""

    def __init__(self) -> None:
        self.keys: LRU[str, None] = LRU(_RECENT)  # the last reads, oldest first
        self.chunks: LRU[Index, int] = LRU(_RECENT)  # those of chunks, by index in the grid, with their numbers
        self.least = _LEAST  # reads in a row that start a run
        self.wait = self.patience = _LOOKS[0]  # unpredicted reads until the next look at the listing


class _Run:
    """One reader that opens keys in a predictable order."""

    def __init__(self, order: GridOrder | DirectoryOrder, place: _Place) -> None:
        self.order, self.place = order, place
        self.trust = 0  # correct predictions, reduced when its reader jumps
        self.pending: dict[str, int] = {}  # predicted keys that are not read yet, with their numbers in the run
        self.made = 0  # number of predicted keys
        self.reached = 0  # one more than the number of the furthest key that was read
        self.late = 0  # how far behind `reached` keys are still read
        self.strays = 0  # unpredicted reads since the last predicted one
        self.used = self.dropped = 0
        self.cost = 0.0  # bytes of a value, on average
        self.busy = False  # its next keys are being predicted, or it is queued for that
        self.batches: set[trio.CancelScope] = set()

    def weigh(self, size: int) -> None:
        """Include the size of a value, in bytes, in the average."""
        size = min(size, _PART)
        self.cost += (size - self.cost) / 8 if self.cost else size


class KeyReadAhead:
    """The read-ahead of a store: it observes the first read of each value, and prefetches the next keys in order.

    The orders are those of prefetch/sequences.py. Reads in no order cost microseconds, and nothing is prefetched. All
    readers together have at most `limit` bytes prefetched and not read. Predictions are cancelled when reads leave the
    order. All methods run on one trio loop.
    """

    def __init__(self, store: Store, limit: int) -> None:
        self._store = store
        self.limit = limit  # bytes
        self._reads = 0
        self._read: LRU[str, int] = LRU(_AGAIN)  # the numbers of the latest reads
        self._places: LRU[Pattern | str, _Place] = LRU(_PLACES)
        self._tree = _Place()  # reads in the whole tree, for orders across directories with few files
        self._runs: LRU[_Run, _Run] = LRU(_PLACES, self._drop)
        self._expected: dict[str, _Run] = {}
        self._due: deque[_Run | _Place] = deque()
        self._closing: list[DirectoryOrder] = []
        self._started = self._used = self._dropped = 0

    def opened(self, key: str, size: int) -> bool:
        """Note the first read of a value of `size` bytes (0: unknown); return whether advance() has work."""
        if not self.limit or not self._store.remote:
            return False
        self._reads += 1
        name, index = _place_of(key)
        place = self._places.use(name) or self._places.put(name, _Place())
        again = key in self._read
        self._read.put(key, self._reads)
        place.keys.put(key, None)
        self._tree.keys.put(key, None)
        if index is not None:
            place.chunks.put(index, self._reads)
        run = self._expected.pop(key, None)
        if run is not None:
            self._predicted(run, place, key, index, size)
        elif not again:
            self._unexpected(place, name, index)
        return bool(self._due)

    def stats(self) -> dict[str, int]:
        """Return the numbers of values that were prefetched, then read, or dropped unread; and of sequences."""
        return {"started": self._started, "used": self._used, "dropped": self._dropped, "sequences": len(self._runs)}

    def _predicted(self, run: _Run, place: _Place, key: str, index: Index | None, size: int) -> None:
        number = run.pending.pop(key)
        run.used, run.trust, run.strays, run.place = run.used + 1, run.trust + 1, 0, place
        if number >= run.reached:
            run.reached = number + 1
        else:
            run.late = min(REACH, max(run.late, run.reached - number))
        self._used += 1
        if size:
            run.weigh(size)
        self._runs.use(run)
        if index is not None and isinstance(run.order, GridOrder):
            run.order.read(index)
        place.least = _LEAST
        self._queue(run)

    def _unexpected(self, place: _Place, name: Pattern | str, index: Index | None) -> None:
        runs = [run for run in self._runs if run.place is place]
        for run in runs:
            order = run.order
            if index is None or not isinstance(order, GridOrder):
                continue
            if order.is_near(index):
                run.trust = max(run.trust, min(run.trust + 1, REACH))
                self._queue(run)
                if run.strays < (REACH if run.trust > 1 else 2 * _FIRST):
                    run.strays += 1
                    return
            elif len(runs) == 1 and order.turns(index, run.late + run.strays > 0):
                if run.late:  # there are several readers, and some may still read the predicted keys
                    run.reached = run.made
                else:
                    self._cancel(run)
                run.strays = 0
                self._queue(run)
                return
        for run in runs:
            run.strays += 1
            wasteful = run.dropped > 16 and run.dropped > run.used
            if run.strays > _FIRST + 2 * (run.late + len(runs)) or wasteful:
                self._drop(run)
        found = find_run(place.chunks, index, place.least) if index is not None else None
        if found is not None and isinstance(name, Pattern):
            for run in runs:
                if run in self._runs and run.strays > run.used:  # its reader has moved to the new run
                    self._drop(run)
            self._start(GridOrder(name, found), place)
        elif self._store.knows_names or (len(place.keys) >= 2 * _LEAST and not place.chunks):
            for one in (place, self._tree):  # rarely: a look at a listing is expensive
                one.wait -= 1
                if one.wait == 0:
                    self._due.append(one)

    def _queue(self, run: _Run) -> None:
        """Queue a run for advance() if half of its read-ahead window is used."""
        if not run.busy and self._wants_more(run):
            run.busy = True
            self._due.append(run)

    def _wants_more(self, run: _Run) -> bool:
        ahead = run.made - run.reached
        return not run.order.ended and len(run.batches) < _BATCHES and ahead <= self._window(run) // 2

    def _window(self, run: _Run) -> int:
        """Return the read-ahead window of a run, in keys, within its share of the bytes."""
        active = sum(1 for other in self._runs if other.pending) or 1
        cost = max(run.cost, 1.0)
        window = max(run.trust, min(4 * run.trust, int(_CHEAP / cost)), _FIRST)
        return max(1, min(window, _MOST, int(self.limit / active / cost)))

    def _start(self, order: GridOrder | DirectoryOrder, place: _Place) -> None:
        run = _Run(order, place)
        self._runs.put(run, run)
        self._queue(run)

    def _cancel(self, run: _Run) -> None:
        """Cancel the prefetches of a run, and drop its predicted keys that have not been read."""
        for batch in run.batches:
            batch.cancel()
        self._forget(run, list(run.pending))
        run.reached = run.made

    def _drop(self, run: _Run) -> None:
        """End a run that reads have left."""
        self._cancel(run)
        self._runs.pop(run, None)
        if run.used < run.dropped:
            run.place.least = min(2 * run.place.least, _LEAST_MOST)
        if isinstance(run.order, DirectoryOrder):
            self._closing.append(run.order)

    def _forget(self, run: _Run, keys: list[str]) -> None:
        for key in keys:
            del run.pending[key]
            del self._expected[key]
        run.dropped += len(keys)
        self._dropped += len(keys)

    # -- in the background

    async def advance(self) -> None:
        """Predict and prefetch for what opened() has queued. Raise nothing except cancellation."""
        try:
            while self._due and self.limit:
                due = self._due.popleft()
                if isinstance(due, _Place):
                    await self._look(due)
                elif due in self._runs:
                    await self._go_on(due)
                    break
            while self._closing:
                await self._closing.pop().aclose()
        except ZarrfsError as exc:
            log.debug("read-ahead: %s", exc)
        except Exception:  # no caller waits for this, and it must not end the mount
            log.debug("read-ahead", exc_info=True)

    async def aclose(self) -> None:
        """Close the open listings. No advance() may be running."""
        for run in list(self._runs):
            self._drop(run)
        while self._closing:
            await self._closing.pop().aclose()

    async def _go_on(self, run: _Run) -> None:
        """Prefetch the next keys of a run until its window is full."""
        while self._wants_more(run):
            run.busy, made = True, run.made
            try:
                keys = await self._predict(run)
            finally:
                run.busy = False
            if run.made == made or run not in self._runs:
                return
            with trio.CancelScope() as batch:
                run.batches.add(batch)
                self._started += len(keys)
                try:
                    await self._store.prefetch(keys)
                finally:
                    run.batches.discard(batch)

    async def _predict(self, run: _Run) -> list[str]:
        """Return the next keys to prefetch, except those just read and those that another run has predicted."""
        late = run.reached - 2 * REACH
        self._forget(run, [key for key, number in run.pending.items() if number < late])
        count = max(1, self._window(run) - (run.made - run.reached))
        order, fresh = run.order, list[str]()
        found = order.take(count) if isinstance(order, GridOrder) else await order.take(count)
        for key in found if run in self._runs else ():
            number, run.made = run.made, run.made + 1
            if key in self._read:
                run.reached, run.strays = number + 1, 0  # the reader was faster
                continue
            other = self._expected.get(key)
            if other is not None and other.pending[key] >= other.reached:  # both are in the same order
                weaker = run if other.used >= run.used else other
                self._drop(weaker)
                if weaker is run:
                    return []
                other = None
            if other is None:
                run.pending[key], self._expected[key] = number, run
                fresh.append(key)
        return fresh

    async def _look(self, place: _Place) -> None:
        """Start a run in the order of the directory if the last reads were in that order."""
        keys = list(place.keys)[-_LOOKED_AT:]
        if place is not self._tree:
            above = split_key(keys[-1])[0]
            keys = [key for key in keys if split_key(key)[0] == above]
        target = self._places.get(_place_of(keys[-1])[0])
        runs = [run for run in self._runs if run.place is target]
        order = None
        if target is not None and not any(isinstance(run.order, DirectoryOrder) for run in runs):
            order = await self._explained(keys, 0.9 if runs else 0.6)
            place.patience = _LOOKS[0] if order is not None else min(2 * place.patience, _LOOKS[1])
        place.wait = place.patience
        if order is not None and target is not None:
            for run in runs:
                if run in self._runs:
                    self._drop(run)
            self._start(order, target)

    async def _explained(self, keys: list[str], share: float) -> DirectoryOrder | None:
        """Return the listing order after `keys`, if they are at least a `share` of the files between them, or None."""
        keys = sorted(keys, key=lambda key: key.split("/"))
        if len(keys) < _LEAST:
            return None
        order = DirectoryOrder(self._store, keys[0])
        listed = await order.take(2 * len(keys))
        numbers = {key: number for number, key in enumerate(listed, 1)}
        last = max(numbers.get(key, 0) for key in keys)
        count = sum(key in numbers for key in keys) + 1
        if count < max(len(keys) * share, (last + 1) * share, _LEAST):
            await order.aclose()
            return None
        order.give_back(listed[last:])
        return order


def _place_of(key: str) -> tuple[Pattern | str, Index | None]:
    """Return (the array or directory of `key`, its index in the array's grid)."""
    return parse(key) or (split_key(key)[0], None)
