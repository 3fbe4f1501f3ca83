"""Read-ahead across keys: predict which values a reader opens next, and prefetch them.

Chunks are predicted along the grid of their array, other files in the order of listings, as cp, tar and find read
them. A sequence is one reader, or several, that read keys in such an order.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple, cast

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.store.api import Info, Kind, Store, join_key, split_key

log = logging.getLogger(__name__)

Index = tuple[int, ...]  # the position of a chunk in its grid
Work = Callable[[], Awaitable[None]]

_LEAST, _MOST_NEEDED = 3, 16  # reads in order that begin a sequence; one more if they are some steps apart
_FIRST, _MOST = 4, 1024  # keys in the first and in the largest window
_CHEAP = 1 << 20  # bytes of a window that may have four times as many keys as were predicted correctly
_PART = 4 << 20  # bytes: of a larger value only the beginning is prefetched
_REACH = 64  # positions by which the reads of concurrent readers may be out of order
_EXPECTED = 16_384  # predicted keys that are remembered
_STRAYS = 8  # unpredicted reads of its array that end a sequence
_SEQUENCES = 64  # sequences at a time, and arrays with a history
_RECENT, _AGAIN = 256, 512  # reads in the history of an array, and of all; the latter are not prefetched again
_LOOKED_AT = 32  # last reads that a listing has to explain
_LOOKS = 256  # most unpredicted reads between two looks at a listing
_AXES = 8  # of the chunk keys that are predicted

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(rf"(c\.)?((?:{_NUMBER.pattern})(?:\.(?:{_NUMBER.pattern})){{0,{_AXES - 1}}})(\.[A-Za-z]\w*)?", re.A)


class Pattern(NamedTuple):
    """The common part of an array's chunk keys, which also identifies the array."""

    prefix: str
    separator: str
    suffix: str
    axes: int


def parse(key: str) -> tuple[Pattern, Index] | None:
    """Split a chunk key (x/3.14, x/c/0/3/14, x/0.0.blosc) into its pattern and index; None for any other key."""
    above, slash, name = key.rpartition("/")
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    mark, numbers, suffix = found[1] or "", found[2].split("."), found[3] or ""
    if mark or len(numbers) > 1:
        return Pattern(above + slash + mark, ".", suffix, len(numbers)), tuple(map(int, numbers))
    while slash and len(numbers) < _AXES and _NUMBER.fullmatch((parts := above.rpartition("/"))[2]):
        above, slash = parts[:2]
        numbers.insert(0, parts[2])
    return Pattern(above + slash, "/", suffix, len(numbers)), tuple(map(int, numbers))


class _Array:
    """The latest reads of an array's chunks, with increasing numbers."""

    def __init__(self) -> None:
        self.recent: LRU[Index, int] = LRU(_RECENT)
        # The number of reads in order that begin a sequence. Each sequence that begins doubles it. A correct
        # prediction lowers it by one, and so does a read next to one of the last two, because a line may be short.
        self.needed = _LEAST

    def line(self, index: Index) -> tuple[int, int, list[Index]] | None:
        """Return (axis, step, chunks) of latest reads in order along one axis, among them `index`, or None."""
        recent = self.recent
        steps = {(1, -axis) for axis in range(len(index))}
        for other in itertools.islice(reversed(recent), 1, _LEAST):
            apart = [axis for axis in range(len(index)) if index[axis] != other[axis]]
            if len(apart) == 1:
                step = abs(index[apart[0]] - other[apart[0]])
                steps.add((step, -apart[0]))
                self.needed = max(_LEAST, self.needed - (step == 1))
        for step, axis in ((step, -axis) for step, axis in sorted(steps)):
            before, after, low, high = index[:axis], index[axis + 1 :], index[axis], index[axis]
            while (*before, low - step, *after) in recent:
                low -= step
            while (*before, high + step, *after) in recent:
                high += step
            line = [(*before, at, *after) for at in range(low, high + 1, step)]
            if len(line) < self.needed + (step > 1) or any(
                low < one[axis] < high
                and (one[axis] - low) % step
                and (one[:axis], one[axis + 1 :]) == (before, after)
                for one in recent
            ):  # too few, or several readers that only look like a stride
                continue
            later = sum(1 if recent[two] > recent[one] else -1 for one, two in itertools.pairwise(line))
            return (axis, step, line) if later >= 0 else (axis, -step, line[::-1])
        return None


class _Sequence:
    """Keys in a predictable order, numbered from 0, of which some are prefetched."""

    def __init__(self, size: int) -> None:
        self.made = 0  # number of predicted keys
        self.reached = 0  # one more than the number of the furthest key that was read
        self.used = self.strays = 0  # correct predictions; other reads of its array since the last one
        self.size = max(float(size), 1.0)  # bytes of a value, on average
        self.predicting = self.ended = False
        self.batches: set[trio.CancelScope] = set()

    async def take(self, count: int) -> list[str]:
        """Return the next `count` keys; fewer at the end."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel all prefetches."""
        for batch in self.batches:
            batch.cancel()
        self.reached = self.made


class _Grid(_Sequence):
    """The chunks along one axis, then along the other axes from last to first, like an odometer.

    Lines begin and end at the bounds of what was read. The end is known once a reader has begun a second line.
    """

    def __init__(self, size: int, pattern: Pattern, axis: int, step: int, line: list[Index]) -> None:
        super().__init__(size)
        axes = range(pattern.axes)
        self.pattern, self._last, self._next = pattern, line[-1], list(line[-1])
        self._axes = [axis, *(one for one in reversed(axes) if one != axis)]  # fastest first
        self._steps = [step if one == axis else 1 if step > 0 else -1 for one in axes]
        self._low, self._high = list(map(min, line[0], line[-1])), list(map(max, line[0], line[-1]))
        self._bounded = 0  # number of axes, the fastest first, along which lines end at these bounds
        self._advance()

    async def take(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count and self._next:
            found.append(self.pattern.prefix + self.pattern.separator.join(map(str, self._next)) + self.pattern.suffix)
            self._advance()
        return found

    def note(self, index: Index) -> None:
        """Note a read that belongs to this order."""
        self._last = index
        self._low, self._high = list(map(min, self._low, index)), list(map(max, self._high, index))

    def is_next(self, index: Index) -> bool:
        """Return whether a chunk is among the next predictions: its reader is ahead of them."""
        distance, weight = 0, 1
        for level, (axis, at) in enumerate((axis, self._next[axis]) for axis in self._axes if self._next):
            steps, rest = divmod(index[axis] - at, self._steps[axis])
            if rest or not self._is_within(level, index[axis]) or (steps and level > self._bounded):
                return False
            distance += steps * weight
            weight *= (self._high[axis] - self._low[axis]) // abs(self._steps[axis]) + 1
        return bool(self._next) and 0 <= distance < _REACH

    def begins_line(self, index: Index, any_step: bool) -> bool:
        """Go on from `index` if it begins another line; return whether it does.

        `any_step`: also if it is the second line, however far from the first one, which has ended.
        """
        level = max((at for at, axis in enumerate(self._axes) if index[axis] != self._last[axis]), default=0)
        step = index[self._axes[level]] - self._last[self._axes[level]]
        fast = self._axes[0]
        ended = any_step and level > self._bounded and self._is_end(level)
        if (
            not level
            or (step != self._steps[self._axes[level]] and not ended)  # another reader, of a part further on
            or abs(index[fast] - self._first(fast)) > _REACH // 2
            or not self._low[fast] <= index[fast] <= self._high[fast]
            or any(index[axis] != self._first(axis) for axis in self._axes[1:level])
        ):
            return False
        self._bounded, self._steps[self._axes[level]], self.ended = level, step, False
        self.note(index)
        self._next = list(index)
        self._advance()
        return True

    def _is_end(self, level: int) -> bool:
        return all(
            self._last[axis] == (self._high[axis] if self._steps[axis] > 0 else self._low[axis])
            for axis in self._axes[:level]
        )

    def _first(self, axis: int) -> int:
        return self._low[axis] if self._steps[axis] > 0 else self._high[axis]

    def _is_within(self, level: int, at: int) -> bool:
        axis = self._axes[level]
        return at >= 0 and (level >= self._bounded or self._low[axis] <= at <= self._high[axis])

    def _advance(self) -> None:
        for level, axis in enumerate(self._axes):
            at = self._next[axis] + self._steps[axis]
            if self._is_within(level, at):
                self._next[axis] = at
                return
            self._next[axis] = self._first(axis)
        self._next = []


class _Listing(_Sequence):
    """The files after a key in the order of listings, depth first, to the end of the tree."""

    def __init__(self, size: int, store: Store, after: str) -> None:
        super().__init__(size)
        self._store, self._last = store, after

    async def take(self, count: int) -> list[str]:
        async with aclosing(_files_after(self._store, self._last)) as files:
            found = [key for _ in range(count) if (key := await anext(files, ""))]
        self._last = found[-1] if found else ""
        return found


async def _files_after(store: Store, after: str) -> AsyncGenerator[str, None]:
    while after:
        prefix, name = split_key(after)
        async with aclosing(cast(AsyncGenerator[Info, None], store.list_dir(prefix, name))) as listing:
            async for info in listing:
                key = join_key(prefix, info.name)
                if info.kind is Kind.DIRECTORY:
                    async with aclosing(cast(AsyncGenerator[str, None], store.list_prefix(key))) as below:
                        async for one in below:
                            yield one
                elif info.kind is Kind.FILE:
                    yield key
        after = prefix


class KeyReadAhead:
    """The read-ahead of a store: it observes the first read of each value, and prefetches the next keys in order.

    Reads in no order cost microseconds, and nothing is prefetched. All readers together have at most `limit` bytes
    prefetched and not read. Reads that leave the order cancel the predictions. All methods run on one trio loop.
    """

    def __init__(self, store: Store, limit: int) -> None:
        self._store = store
        self.limit = limit  # bytes
        self._read: LRU[str, None] = LRU(_AGAIN)  # the latest reads
        self._arrays: LRU[Pattern, _Array] = LRU(_SEQUENCES)
        self._sequences: LRU[_Sequence, _Sequence] = LRU(_SEQUENCES, _Sequence.cancel)
        self._expected: LRU[str, tuple[_Sequence, int]] = LRU(_EXPECTED)  # predicted keys, and their numbers
        self._wait = self._patience = _LEAST  # unpredicted reads until the next look at a listing
        self._reads = 0

    def opened(self, key: str, size: int) -> Work | None:
        """Note the first read of a value of `size` bytes (0: unknown); return what to do in the background, if any."""
        if not self.limit or not self._store.remote:
            return None
        self._reads += 1
        again, chunk, size = key in self._read, parse(key), min(size, _PART)
        self._read.put(key, None)
        if chunk is not None:
            array = self._arrays.use(chunk[0]) or self._arrays.put(chunk[0], _Array())
            array.recent.put(chunk[1], self._reads)
        sequence, number = self._expected.pop(key, (None, 0))
        if sequence is not None and sequence in self._sequences:
            sequence.reached = max(sequence.reached, number + 1)
            return self._belongs(sequence, chunk, size)
        return None if again else self._unexpected(chunk, size)

    def _belongs(self, sequence: _Sequence, chunk: tuple[Pattern, Index] | None, size: int) -> Work | None:
        """Note a read in the order of a sequence."""
        sequence.used, sequence.strays = sequence.used + 1, 0
        sequence.size += (max(size, 1) - sequence.size) / 8
        self._sequences.use(sequence)
        if isinstance(sequence, _Grid) and chunk is not None:
            sequence.note(chunk[1])
            array = self._arrays[chunk[0]]
            array.needed = max(_LEAST, array.needed - 1)
        return self._extended(sequence)

    def _unexpected(self, chunk: tuple[Pattern, Index] | None, size: int) -> Work | None:
        if chunk is not None:
            pattern, index = chunk
            array = self._arrays[pattern]
            grids = [one for one in self._sequences if isinstance(one, _Grid) and one.pattern == pattern]
            for grid in grids:
                if grid.is_next(index):
                    return self._belongs(grid, chunk, size)
            for grid in grids:
                grid.strays += 1
                if grid.strays > _STRAYS:
                    self._drop(grid)
            for any_step, grid in itertools.product((False, True), grids):
                if grid in self._sequences and grid.begins_line(index, any_step):
                    grid.cancel()
                    return self._extended(grid)
            if (line := array.line(index)) is not None:
                array.needed = min(2 * array.needed, _MOST_NEEDED)
                return self._begun(_Grid(size, pattern, *line))
        for listing in [one for one in self._sequences if isinstance(one, _Listing)]:
            listing.strays += 1
            if listing.strays <= _REACH:
                return None
            self._drop(listing)
        self._wait -= 1
        if self._wait > 0 or not (self._store.immutable or self._are_files_of_one_directory()):
            return None
        self._patience = self._wait = min(2 * self._patience, _LOOKS)
        return functools.partial(self._guarded, self._follow_listing, size)

    def _are_files_of_one_directory(self) -> bool:
        """Return whether the latest reads make a listing worth its requests."""
        latest = list(itertools.islice(reversed(self._read), 2 * _LEAST))
        directories = {split_key(key)[0] for key in latest}
        return len(latest) == 2 * _LEAST and len(directories) == 1 and not any(map(parse, latest))

    def _begun(self, sequence: _Sequence) -> Work | None:
        self._sequences.put(sequence, sequence)
        return self._extended(sequence)

    def _extended(self, sequence: _Sequence) -> Work | None:
        """Return the work of prefetching more keys; None unless half of the window is used."""
        if sequence.predicting or sequence.ended or self._lack(sequence) < self._window(sequence) // 2:
            return None
        sequence.predicting = True
        return functools.partial(self._guarded, self._extend, sequence)

    def _window(self, sequence: _Sequence) -> int:
        """Return the window of a sequence, in keys, within its share of the bytes."""
        active = sum(1 for other in self._sequences if other.made > other.reached) or 1
        window = max(sequence.used, min(4 * sequence.used, int(_CHEAP / sequence.size)), _FIRST)
        return max(1, min(window, _MOST, int(self.limit / active / sequence.size)))

    def _lack(self, sequence: _Sequence) -> int:
        """Return how many keys the window of a sequence lacks."""
        return self._window(sequence) - (sequence.made - sequence.reached)

    def _drop(self, sequence: _Sequence) -> None:
        sequence.cancel()
        self._sequences.pop(sequence, None)

    # -- in the background

    async def _guarded(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await work(*args)
        except Exception:  # no reader waits for this, and its own read reports the same error
            log.debug("read-ahead", exc_info=True)

    async def _extend(self, sequence: _Sequence) -> None:
        """Prefetch the next keys of a sequence until its window is full."""
        try:
            keys = await self._predict(sequence)
        finally:
            sequence.predicting = False
        if keys:
            with trio.CancelScope() as batch:
                sequence.batches.add(batch)
                try:
                    await self._store.prefetch(keys)
                finally:
                    sequence.batches.discard(batch)

    async def _predict(self, sequence: _Sequence) -> list[str]:
        """Return the next keys to prefetch, except those just read."""
        fresh: list[str] = []
        while (count := self._lack(sequence)) > 0 and not sequence.ended and sequence in self._sequences:
            found = await sequence.take(count)
            sequence.ended = len(found) < count
            for key in found if sequence in self._sequences else ():
                if key in self._read:  # the reader was faster
                    sequence.reached = sequence.made + 1
                else:
                    other, number = self._expected.get(key, (sequence, -1))
                    if other not in self._sequences or number < other.reached:  # not prefetched for another sequence
                        fresh.append(key)
                    self._expected.put(key, (sequence, sequence.made))
                sequence.made += 1
        return fresh

    async def _follow_listing(self, size: int) -> None:
        """Begin a sequence in the order of listings if the last reads were in that order."""
        keys = sorted(itertools.islice(reversed(self._read), _LOOKED_AT), key=lambda key: key.split("/"))
        listed = await _Listing(size, self._store, keys[0]).take(2 * len(keys))
        numbers = {key: number for number, key in enumerate(listed, 1)}
        seen = [numbers[key] for key in keys if key in numbers]
        if 1 + len(seen) >= max(0.6 * len(keys), 0.6 * (1 + max(seen, default=0)), _LEAST):
            self._patience = self._wait = _LEAST
            work = self._begun(_Listing(size, self._store, keys[-1]))
            if work is not None:
                await work()
