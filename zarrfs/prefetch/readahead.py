"""Read-ahead across keys: predict the keys that a reader will open next, and prefetch their values."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import ZarrfsError
from zarrfs.prefetch.sequences import (
    REACH,
    DirectoryOrder,
    Fit,
    GridOrder,
    Index,
    KeySize,
    Pattern,
    find_run,
    parse,
)
from zarrfs.store.api import Kind, Store, split_key

log = logging.getLogger(__name__)

_FIRST = 4  # keys in the first read-ahead window; a later one has as many as were predicted correctly
_CHEAP = 1 << 20  # bytes of a window that may have four times as many keys as were predicted correctly
_MOST = 1024  # keys ahead of one reader
_PART = 4 << 20  # bytes: of a larger value only the beginning is prefetched
_PLACES = 64  # arrays and directories with a history; also the number of sequences
_RECENT = 256  # reads in the history of an array or directory
# A value among so many latest reads is not prefetched. One that was read before them is prefetched only on a second
# pass.
_JUST_READ = 256
_RUN, _RUN_MOST = 3, 16  # reads in a row that start a sequence; doubled in a place where a sequence was wrong
_BATCHES = 2  # in flight for one sequence: the half that is being read, and the next one
_ASKED = 16  # info() calls at a time
_LOOKS = (_RUN, 256)  # unpredicted reads between two looks at a listing, doubled while it does not explain them
_LOOKED_AT = 32  # last reads that a listing has to explain


class _ReadHistory:
    """The recent reads in an array, or in a directory whose files are not chunks."""

    def __init__(self) -> None:
        self.keys: LRU[str, int] = LRU(_RECENT)  # the last reads, oldest first, with their numbers
        self.chunks: LRU[Index, int] = LRU(_RECENT)  # the same for chunks, by index in the grid
        self.run = _RUN  # reads in a row that start a sequence
        self.sequences: list[_Sequence] = []
        self.wait, self.patience = _LOOKS[0], _LOOKS[0]  # unpredicted reads until the next look at the listing
        self.last = ""  # the last key

    def add(self, key: str, index: Index | None, number: int) -> None:
        """Note a read."""
        self.keys.put(key, number)
        if index is not None:
            self.chunks.put(index, number)
        self.last = key


class _Sequence:
    """One reader that opens keys in a predictable order."""

    def __init__(self, order: GridOrder | DirectoryOrder, place: _ReadHistory) -> None:
        self.order = order
        self.place = place
        self.trust = 0  # correct predictions, reduced when its reader jumps
        self.pending: dict[str, int] = {}  # predicted keys that are not read yet, with their numbers in the sequence
        self.made = 0  # number of predicted keys
        self.reached = 0  # one more than the number of the furthest key that was read
        self.late = 0  # how far behind `reached` keys are still read
        self.strays = 0  # unpredicted reads since the last predicted one
        self.used = self.dropped = 0
        self.rereads = False  # its reader reads values again that were read before
        self.cost = 0.0  # bytes of a value, on average
        self.busy = self.due = False  # advance() is predicting its next keys; it is queued for that
        self.batches: set[trio.CancelScope] = set()

    def reads(self, number: int) -> None:
        """Note that a predicted key was read."""
        self.used += 1
        self.trust += 1
        self.strays = 0
        if number >= self.reached:
            self.reached = number + 1
        elif self.reached - number > self.late:
            self.late = min(REACH, self.reached - number)

    def weigh(self, size: int) -> None:
        """Include the size of a value, in bytes, in the average."""
        size = min(size, _PART)
        self.cost += (size - self.cost) / 8 if self.cost else size

    @property
    def wasteful(self) -> bool:
        """Return whether most predicted keys are not read."""
        return self.dropped > 16 and self.dropped > self.used


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
        self._just_read: LRU[str, int] = LRU(4 * _MOST)  # key: number of the read
        self._places: LRU[Pattern | str, _ReadHistory] = LRU(_PLACES, self._forget_place)
        self._tree = _ReadHistory()  # reads in the whole tree, for orders across directories with few files
        self._sequences: LRU[_Sequence, _Sequence] = LRU(_PLACES, self._drop)
        self._rereads = False  # the last key had been read before
        self._expected: dict[str, _Sequence] = {}
        self._due: deque[_Sequence | _ReadHistory] = deque()
        self._closing: list[DirectoryOrder] = []
        self._started = self._used = self._dropped = 0

    # -- called for each first read

    def opened(self, key: str, size: int) -> bool:
        """Note the first read of a value of `size` bytes (0: unknown); return whether advance() has work."""
        if not self.limit or not self._store.remote:
            return False
        self._reads += 1
        name, index = _place_of(key)
        place = self._places.use(name) or self._places.put(name, _ReadHistory())
        again = self._reads - self._just_read.get(key, -_JUST_READ) < _JUST_READ
        self._rereads = key in self._just_read
        self._just_read.put(key, self._reads)
        place.add(key, index, self._reads)
        self._tree.add(key, None, self._reads)
        sequence = self._expected.pop(key, None)
        if sequence is not None:
            self._predicted(sequence, place, key, index, size)
        elif not again:
            self._unexpected(place, name, index)
        return bool(self._due)

    def resize(self, limit: int) -> None:
        """Set the limit on bytes ahead; 0 disables read-ahead and cancels all requests."""
        self.limit = limit
        if not limit:
            for sequence in list(self._sequences):
                self._drop(sequence)
            for one in self._due:
                if isinstance(one, _ReadHistory):
                    one.wait = one.patience
            self._due.clear()

    def stats(self) -> dict[str, int]:
        """Return the numbers of values that were prefetched, then read, or dropped unread; and of sequences."""
        return {"started": self._started, "used": self._used, "dropped": self._dropped,
                "sequences": len(self._sequences)}  # fmt: skip

    def _predicted(self, sequence: _Sequence, place: _ReadHistory, key: str, index: Index | None, size: int) -> None:
        sequence.reads(sequence.pending.pop(key))
        sequence.rereads = self._rereads
        self._used += 1
        if size:
            sequence.weigh(size)
        self._sequences.use(sequence)
        if index is not None and isinstance(sequence.order, GridOrder):
            sequence.order.read(index)
        if sequence.place is not place:
            sequence.place.sequences.remove(sequence)
            place.sequences.append(sequence)
            sequence.place = place
        place.run = _RUN
        self._queue(sequence)

    def _unexpected(self, place: _ReadHistory, name: Pattern | str, index: Index | None) -> None:
        for sequence in list(place.sequences):
            order = sequence.order
            fit = Fit.NONE
            if index is not None and isinstance(order, GridOrder):
                fit = order.place(index, sequence.late + sequence.strays > 0, len(place.sequences) == 1)
            if fit is Fit.ELSEWHERE:
                if sequence.late:  # there are several readers, and some may still read the predicted keys
                    sequence.reached = sequence.made
                else:
                    self._cancel(sequence)
                sequence.trust //= 4
                sequence.strays = 0
                self._queue(sequence)
                return
            if fit is Fit.AHEAD and sequence.strays < REACH:
                sequence.trust = max(sequence.trust, min(sequence.trust + 1, REACH))
                self._queue(sequence)
            if fit is not Fit.NONE and sequence.strays < (REACH if sequence.trust else 2 * _FIRST):
                sequence.strays += 1
                return
        for sequence in list(place.sequences):
            sequence.strays += 1
            if sequence.strays > _FIRST + 2 * (sequence.late + len(place.sequences)) or sequence.wasteful:
                self._drop(sequence)
        if index is not None and isinstance(name, Pattern):
            run = find_run(place.chunks, index, place.run)
            if run is not None:
                for sequence in list(place.sequences):
                    if sequence.strays > sequence.used:  # its reader has moved to the new run
                        self._drop(sequence)
                self._start(GridOrder(name, run), place)
                return
        self._consider(place)

    def _consider(self, place: _ReadHistory) -> None:
        """Queue a look at the listing now and then. It is expensive, and few directories are read in listing order."""
        if not self._store.knows_names and not (len(place.keys) >= 2 * _RUN and not place.chunks):
            return
        for one in (place, self._tree):
            one.wait -= 1
            if one.wait == 0:
                self._due.append(one)

    def _queue(self, sequence: _Sequence) -> None:
        """Queue a sequence for advance() if half of its read-ahead window is used."""
        if not sequence.due and not sequence.busy and self._wants_more(sequence):
            sequence.due = True
            self._due.append(sequence)

    def _wants_more(self, sequence: _Sequence) -> bool:
        ahead = sequence.made - sequence.reached
        return not sequence.order.ended and len(sequence.batches) < _BATCHES and ahead <= self._goal(sequence) // 2

    def _goal(self, sequence: _Sequence) -> int:
        """Return the read-ahead window of a sequence, in keys, within its share of the bytes."""
        active = sum(1 for other in self._sequences if other.pending) or 1
        cost = max(sequence.cost, 1.0)
        window = max(sequence.trust, min(4 * sequence.trust, int(_CHEAP / cost)), _FIRST)
        return max(1, min(window, _MOST, int(self.limit / active / cost)))

    # -- histories and sequences

    def _forget_place(self, place: _ReadHistory) -> None:
        for sequence in list(place.sequences):
            self._drop(sequence)

    def _start(self, order: GridOrder | DirectoryOrder, place: _ReadHistory) -> _Sequence:
        sequence = _Sequence(order, place)
        sequence.rereads = self._rereads
        place.sequences.append(sequence)
        self._sequences.put(sequence, sequence)
        self._queue(sequence)
        return sequence

    def _cancel(self, sequence: _Sequence) -> None:
        """Cancel the prefetches of a sequence, and drop its predicted keys that have not been read."""
        for batch in sequence.batches:
            batch.cancel()
        self._forget(sequence, list(sequence.pending))
        sequence.reached = sequence.made

    def _drop(self, sequence: _Sequence) -> None:
        """End a sequence that reads have left."""
        self._cancel(sequence)
        sequence.order.ended = True
        self._sequences.pop(sequence, None)
        place = sequence.place
        place.sequences.remove(sequence)
        place.run = min(2 * place.run, _RUN_MOST) if sequence.used < sequence.dropped else place.run
        if isinstance(sequence.order, DirectoryOrder) and not sequence.busy:
            self._closing.append(sequence.order)

    def _merge(self, sequence: _Sequence, other: _Sequence) -> None:
        """Merge a sequence into `other`, which predicts the same keys: both are from readers in the same order."""
        for key in sequence.pending:
            self._expected[key] = other
            other.pending[key] = other.reached - 1
        sequence.pending.clear()
        other.trust += sequence.trust
        other.batches |= sequence.batches
        sequence.batches = set()
        self._drop(sequence)

    def _forget(self, sequence: _Sequence, keys: Sequence[str]) -> None:
        for key in keys:
            del sequence.pending[key]
            del self._expected[key]
        sequence.dropped += len(keys)
        self._dropped += len(keys)

    # -- in the background

    async def advance(self) -> None:
        """Predict and prefetch for the sequences that opened() has queued. Raise nothing except cancellation."""
        try:
            while self._closing:
                await self._closing.pop().aclose()
            while self._due and self.limit:
                due = self._due.popleft()
                if isinstance(due, _ReadHistory):
                    await self._look(due)
                elif due in self._sequences:
                    await self._go_on(due)
                    break
        except ZarrfsError as exc:
            log.debug("read-ahead: %s", exc)
        except Exception:  # no caller waits for this, and it must not end the mount
            log.debug("read-ahead", exc_info=True)

    async def aclose(self) -> None:
        """Close the open listings. No advance() may be running."""
        for sequence in list(self._sequences):
            self._drop(sequence)
        while self._closing:
            await self._closing.pop().aclose()

    async def _go_on(self, sequence: _Sequence) -> None:
        """Prefetch the next keys of a sequence until its window is full."""
        sequence.due = False
        while not sequence.busy and self._wants_more(sequence):
            sequence.busy, made = True, sequence.made
            try:
                keys = await self._predict(sequence)
            except BaseException:
                sequence.order.ended = True
                raise
            finally:
                sequence.busy = False
            if sequence not in self._sequences and isinstance(sequence.order, DirectoryOrder):
                await sequence.order.aclose()
            if sequence.made == made:
                return
            if not keys:
                await trio.lowlevel.checkpoint()
                continue
            with trio.CancelScope() as batch:
                sequence.batches.add(batch)
                self._started += len(keys)
                try:
                    await self._store.prefetch(keys)
                finally:
                    for one in self._sequences:  # after a merge, the batch belongs to another sequence
                        one.batches.discard(batch)

    async def _predict(self, sequence: _Sequence) -> list[str]:
        """Return the next keys to prefetch, except those just read and those that another sequence has predicted."""
        late = sequence.reached - 2 * REACH
        self._forget(sequence, [key for key, number in sequence.pending.items() if number < late])
        count = max(1, self._goal(sequence) - (sequence.made - sequence.reached))
        order = sequence.order
        found = await (order.take(count, self._ask) if isinstance(order, GridOrder) else order.take(count))
        if sequence not in self._sequences:  # dropped meanwhile
            return []
        fresh = []
        for key, size in found:
            number, sequence.made = sequence.made, sequence.made + 1
            if size is not None:
                sequence.weigh(size)
            last = self._just_read.get(key)
            if last is not None and not (sequence.rereads and self._reads - last >= _JUST_READ):
                sequence.reached, sequence.strays = number + 1, 0  # the reader was faster
                continue
            other = self._expected.get(key)
            if other is None:
                fresh.append(key)
            elif other is not sequence:
                ahead = other.pending[key] >= other.reached  # otherwise its reader has passed the key
                if ahead and other.used >= sequence.used:
                    self._merge(sequence, other)
                    break
                del other.pending[key]
                if ahead:
                    self._merge(other, sequence)
            sequence.pending[key] = number
            self._expected[key] = sequence
        return fresh

    async def _ask(self, keys: Sequence[str]) -> list[KeySize | None]:
        """Look keys up, in parallel if that takes requests; None for each that is not a file."""
        answers: list[KeySize | None] = [None] * len(keys)
        waiting = iter(range(len(keys)))

        async def ask() -> None:
            for number in waiting:
                try:
                    info = await self._store.info(keys[number], sized=False)
                except ZarrfsError:
                    continue
                if info.kind is Kind.FILE:
                    answers[number] = keys[number], info.size

        if self._store.knows_names:
            await ask()
        else:
            async with trio.open_nursery() as nursery:
                for _ in range(min(_ASKED, len(keys))):
                    nursery.start_soon(ask)
        return answers

    async def _look(self, place: _ReadHistory) -> None:
        """Start a sequence in the order of the directory if the last reads were in that order."""
        keys = list(place.keys)[-_LOOKED_AT:]
        if place is not self._tree:
            above = split_key(keys[-1])[0]
            keys = [key for key in keys if split_key(key)[0] == above]
        target = self._places.get(_place_of(keys[-1])[0])
        if target is None or any(isinstance(other.order, DirectoryOrder) for other in target.sequences):
            place.wait = place.patience
            return
        order = await self._explained(keys, 0.9 if target.sequences else 0.6)
        if order is None:
            place.patience = min(2 * place.patience, _LOOKS[1])
            place.wait = place.patience
            return
        place.wait = place.patience = _LOOKS[0]
        for sequence in list(target.sequences):
            self._drop(sequence)
        self._start(order, target)

    async def _explained(self, keys: list[str], share: float) -> DirectoryOrder | None:
        """Return the listing order after `keys`, if they are at least a `share` of the files between them, or None."""
        keys = sorted(keys, key=lambda key: key.split("/"))
        if len(keys) < _RUN:
            return None
        order = DirectoryOrder(self._store, keys[0])
        listed = await order.take(2 * len(keys))
        numbers = {key: number for number, (key, _size) in enumerate(listed, 1)}
        last = max(numbers.get(key, 0) for key in keys)
        count = sum(key in numbers for key in keys) + 1
        if count < len(keys) * share or count < (last + 1) * share or count < _RUN:
            await order.aclose()
            return None
        order.give_back(listed[last:])
        return order


def _place_of(key: str) -> tuple[Pattern | str, Index | None]:
    """Return (the array or directory of `key`, its index in the array's grid)."""
    return parse(key) or (split_key(key)[0], None)

