"""Read-ahead across keys: predict which values a reader opens next, and prefetch them.

Chunks are predicted along the grid of their array, other files in the order of listings, as cp, tar and find read
them.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, cast

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import ZarrfsError
from zarrfs.store.api import Info, Kind, Store, join_key, split_key

log = logging.getLogger(__name__)

Index = tuple[int, ...]  # the position of a chunk in its grid

_LEAST = 3  # reads in order that start a run; one more if they are some steps apart
_FIRST, _MOST = 4, 1024  # keys in the first and in the largest window
_CHEAP = 1 << 20  # bytes of a window that may have four times as many keys as were predicted correctly
_PART = 4 << 20  # bytes: of a larger value only the beginning is prefetched
_REACH = 64  # positions by which the reads of concurrent readers may be out of order
_RUNS = 64  # runs at a time, and arrays with a history
_RECENT, _AGAIN = 256, 512  # reads in the history of an array, and of all; the latter are not prefetched again
_LOOKED_AT = 32  # last reads that a listing has to explain
_LOOKS = 256  # most unpredicted reads between two looks at a listing
_AXES, _DIGITS = 8, 18  # of the chunk keys that are predicted


class Pattern(NamedTuple):
    """The common part of an array's chunk keys, which also identifies the array."""

    prefix: str
    separator: str
    suffix: str
    axes: int


def parse(key: str) -> tuple[Pattern, Index] | None:
    """Split a chunk key (x/3.14, x/c/0/3/14, x/0.0.blosc) into its pattern and index; None for any other key."""
    above, slash, name = key.rpartition("/")
    parts, prefix, suffix = name.split(".", _AXES + 2), above + slash, ""
    if len(parts) > 1 and parts[-1][:1].isalpha() and parts[-1].isidentifier():
        suffix = "." + parts.pop()
    if parts[0] == "c" and len(parts) > 1:
        prefix += "c."
        del parts[0]
    separator = "."
    if len(parts) == 1 and _is_number(name.removesuffix(suffix)):
        separator, rest = "/", key.rsplit("/", _AXES)
        start = next((at for at in range(len(rest) - 2, -1, -1) if not _is_number(rest[at])), -1) + 1
        parts = [*rest[start:-1], *parts]
        prefix = key[: len(key) - len("/".join(rest[start:]))]
    if len(parts) > _AXES or not all(map(_is_number, parts)):
        return None
    return Pattern(prefix, separator, suffix, len(parts)), tuple(map(int, parts))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS and (text[0] != "0" or text == "0")


def _run_through(recent: LRU[Index, int], index: Index) -> tuple[int, int, list[Index]] | None:
    """Return (axis, step, chunks) of latest reads in order along one axis, among them `index`; None if there are none.

    `recent` maps the latest reads to increasing numbers.
    """
    steps = {(1, axis) for axis in range(len(index))}
    for other in itertools.islice(reversed(recent), 1, _LEAST):
        apart = [axis for axis in range(len(index)) if index[axis] != other[axis]]
        if len(apart) == 1:
            steps.add((abs(index[apart[0]] - other[apart[0]]), apart[0]))
    for step, axis in sorted(steps, key=lambda one: (one[0], -one[1])):
        before, after, low, high = index[:axis], index[axis + 1 :], index[axis], index[axis]
        while (*before, low - step, *after) in recent:
            low -= step
        while (*before, high + step, *after) in recent:
            high += step
        run = [(*before, at, *after) for at in range(low, high + 1, step)]
        if len(run) < _LEAST + (step > 1) or any(
            low < one[axis] < high and (one[axis] - low) % step and (one[:axis], one[axis + 1 :]) == (before, after)
            for one in recent
        ):  # too few, or several readers that only look like a stride
            continue
        numbers = [recent[one] for one in run]
        ascending = sum(1 if later > earlier else -1 for earlier, later in itertools.pairwise(numbers)) >= 0
        return (axis, step, run) if ascending else (axis, -step, run[::-1])
    return None


class _Grid:
    """The order of chunks along one axis, then along the other axes from last to first, like an odometer.

    Lines begin and end at the bounds of what was read. The end is known once a reader has begun a second line.
    """

    def __init__(self, pattern: Pattern, axis: int, step: int, run: list[Index]) -> None:
        self.pattern, self._last, self._next = pattern, run[-1], list(run[-1])
        axes = range(pattern.axes)
        self._axes = [axis, *(one for one in reversed(axes) if one != axis)]  # fastest first
        self._steps = [step if one == axis else 1 if step > 0 else -1 for one in axes]
        self._low, self._high = list(map(min, run[0], run[-1])), list(map(max, run[0], run[-1]))
        self._bounded = 0  # number of axes, the fastest first, along which lines end at these bounds
        self._advance()

    async def take(self, count: int) -> list[str]:
        """Return the next `count` keys; fewer at the end."""
        found: list[str] = []
        while len(found) < count and self._next:
            found.append(self.pattern.prefix + self.pattern.separator.join(map(str, self._next)) + self.pattern.suffix)
            self._advance()
        return found

    def read(self, index: Index) -> None:
        """Note a read that belongs to this order."""
        self._last = index
        self._low, self._high = list(map(min, self._low, index)), list(map(max, self._high, index))

    def is_next(self, index: Index) -> bool:
        """Return whether a chunk is among the next predictions: its reader is ahead of them."""
        other = copy.copy(self)
        other._next = list(self._next)
        for _ in range(_REACH):
            if tuple(other._next) == index:
                return True
            if not other._next:
                break
            other._advance()
        return False

    def turns(self, index: Index) -> bool:
        """Go on from `index` if it begins another line; return whether it does."""
        level = max((at for at, axis in enumerate(self._axes) if index[axis] != self._last[axis]), default=0)
        step = index[self._axes[level]] - self._last[self._axes[level]]
        if not level or abs(step) > _REACH:
            return False
        fast = self._axes[0]
        if abs(index[fast] - self._first(fast)) > _REACH // 2 or not self._is_within(fast, index[fast]):
            return False
        if any(index[axis] != self._first(axis) for axis in self._axes[1:level]):
            return False
        self._bounded = level
        self._steps[self._axes[level]] = step
        self.read(index)
        self._next = list(index)
        self._advance()
        return True

    def _first(self, axis: int) -> int:
        return self._low[axis] if self._steps[axis] > 0 else self._high[axis]

    def _is_within(self, axis: int, at: int) -> bool:
        return self._low[axis] <= at <= self._high[axis]

    def _advance(self) -> None:
        for level, axis in enumerate(self._axes):
            at = self._next[axis] + self._steps[axis]
            if at >= 0 and (level >= self._bounded or self._is_within(axis, at)):
                self._next[axis] = at
                return
            self._next[axis] = self._first(axis)
        self._next = []


class _Listing:
    """The files after a key in the order of listings, depth first, to the end of the tree."""

    def __init__(self, store: Store, after: str) -> None:
        self._files = _files_after(store, after)

    async def take(self, count: int) -> list[str]:
        """Return the next `count` files; fewer at the end."""
        return [key for _ in range(count) if (key := await anext(self._files, ""))]

    async def aclose(self) -> None:
        await self._files.aclose()


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


class _Run:
    """One reader, or several, that open keys in a predictable order."""

    def __init__(self, order: _Grid | _Listing) -> None:
        self.order = order
        self.pending: dict[str, int] = {}  # predicted keys that are not read yet, with their numbers in the run
        self.made = 0  # number of predicted keys
        self.reached = 0  # one more than the number of the furthest key that was read
        self.used = self.strays = 0  # correct predictions; other reads of its array since the last one
        self.cost = 1.0  # bytes of a value, on average
        self.busy = self.ended = False
        self.batches: set[trio.CancelScope] = set()


class KeyReadAhead:
    """The read-ahead of a store: it observes the first read of each value, and prefetches the next keys in order.

    Reads in no order cost microseconds, and nothing is prefetched. All readers together have at most `limit` bytes
    prefetched and not read. Reads that leave the order cancel the predictions. All methods run on one trio loop.
    """

    def __init__(self, store: Store, limit: int) -> None:
        self._store = store
        self.limit = limit  # bytes
        self._read: LRU[str, int] = LRU(_AGAIN)  # the latest reads, and their numbers
        self._arrays: LRU[Pattern, LRU[Index, int]] = LRU(_RUNS)  # the latest reads of chunks
        self._runs: LRU[_Run, _Run] = LRU(_RUNS, self._drop)
        self._expected: dict[str, _Run] = {}
        self._due: deque[_Run] = deque()
        self._closing: list[_Listing] = []
        self._look = False  # a listing is due
        self._wait = self._patience = _LEAST  # unpredicted reads until the next look at a listing
        self._reads = self._started = self._used = self._dropped = 0

    def opened(self, key: str, size: int) -> bool:
        """Note the first read of a value of `size` bytes (0: unknown); return whether advance() has work."""
        if not self.limit or not self._store.remote:
            return False
        self._reads += 1
        again = key in self._read
        self._read.put(key, self._reads)
        chunk = parse(key)
        index = chunk[1] if chunk else None
        if chunk is not None:
            (self._arrays.use(chunk[0]) or self._arrays.put(chunk[0], LRU(_RECENT))).put(chunk[1], self._reads)
        run = self._expected.pop(key, None)
        if run is not None:
            self._used += 1
            number = run.pending.pop(key)
            run.reached = max(run.reached, number + 1)
            self._belongs(run, index, size)
        elif not again:
            self._unexpected(chunk, size)
        return bool(self._due) or self._look

    def stats(self) -> dict[str, int]:
        """Return the numbers of values that were prefetched, then read, or dropped unread; and of runs."""
        return {"started": self._started, "used": self._used, "dropped": self._dropped, "sequences": len(self._runs)}

    def _belongs(self, run: _Run, index: Index | None, size: int) -> None:
        """Note a read in the order of a run."""
        run.used, run.strays = run.used + 1, 0
        run.cost += (min(size, _PART) - run.cost) / (8 if run.used > 1 else 1)
        self._runs.use(run)
        if index is not None and isinstance(run.order, _Grid):
            run.order.read(index)
        self._queue(run)

    def _unexpected(self, chunk: tuple[Pattern, Index] | None, size: int) -> None:
        if chunk is not None:
            pattern, index = chunk
            for run in [run for run in self._runs if isinstance(run.order, _Grid) and run.order.pattern == pattern]:
                assert isinstance(run.order, _Grid)
                if run.order.is_next(index):
                    self._belongs(run, index, size)
                    return
                run.strays += 1
                if run.strays > 2 * _FIRST:
                    self._drop(run)
                elif run.order.turns(index):
                    self._cancel(run)
                    self._queue(run)
                    return
            found = _run_through(self._arrays[pattern], index)
            if found is not None:
                self._start(_Run(_Grid(pattern, *found)))
                return
        for run in [run for run in self._runs if isinstance(run.order, _Listing)]:
            run.strays += 1
            if run.strays <= _REACH:
                return
            self._drop(run)
        self._wait -= 1
        self._look = self._wait <= 0 and (self._store.knows_names or self._are_files_of_one_directory())

    def _are_files_of_one_directory(self) -> bool:
        """Return whether the latest reads make a listing worth its requests."""
        latest = list(itertools.islice(reversed(self._read), 2 * _LEAST))
        directories = {split_key(key)[0] for key in latest}
        return len(latest) == 2 * _LEAST and len(directories) == 1 and not any(map(parse, latest))

    def _start(self, run: _Run) -> None:
        self._runs.put(run, run)
        self._queue(run)

    def _queue(self, run: _Run) -> None:
        if not run.busy and self._wants_more(run):
            run.busy = True
            self._due.append(run)

    def _wants_more(self, run: _Run) -> bool:
        """Return whether half of the window of a run is used."""
        return not run.ended and len(run.batches) < 2 and run.made - run.reached <= self._window(run) // 2

    def _window(self, run: _Run) -> int:
        """Return the window of a run, in keys, within its share of the bytes."""
        active = sum(1 for other in self._runs if other.pending) or 1
        cost = max(run.cost, 1.0)
        window = max(run.used, min(4 * run.used, int(_CHEAP / cost)), _FIRST)
        return max(1, min(window, _MOST, int(self.limit / active / cost)))

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
        if isinstance(run.order, _Listing):
            self._closing.append(run.order)

    def _forget(self, run: _Run, keys: list[str]) -> None:
        for key in keys:
            del run.pending[key], self._expected[key]
        self._dropped += len(keys)

    # -- in the background

    async def advance(self) -> None:
        """Predict and prefetch for what opened() has queued. Raise nothing except cancellation."""
        try:
            if self._look:
                await self._follow_listing()
            if self._due:
                run = self._due.popleft()
                await self._go_on(run)
            await self._close()
        except ZarrfsError as exc:
            log.debug("read-ahead: %s", exc)
        except Exception:  # no caller waits for this, and it must not end the mount
            log.debug("read-ahead", exc_info=True)

    async def aclose(self) -> None:
        """Close the open listings. No advance() may be running."""
        for run in list(self._runs):
            self._drop(run)
        await self._close()

    async def _close(self) -> None:
        while self._closing:
            await self._closing.pop().aclose()

    async def _go_on(self, run: _Run) -> None:
        """Prefetch the next keys of a run until its window is full."""
        while run in self._runs and self._wants_more(run):
            run.busy = True
            try:
                keys = await self._predict(run)
            finally:
                run.busy = False
            if run in self._runs and keys:
                with trio.CancelScope() as batch:
                    run.batches.add(batch)
                    self._started += len(keys)
                    try:
                        await self._store.prefetch(keys)
                    finally:
                        run.batches.discard(batch)

    async def _predict(self, run: _Run) -> list[str]:
        """Return the next keys to prefetch, except those just read and those that another run has predicted."""
        late = run.reached - 2 * _REACH
        self._forget(run, [key for key, number in run.pending.items() if number < late])
        count = max(1, self._window(run) - (run.made - run.reached))
        found, fresh = await run.order.take(count), []
        run.ended = len(found) < count
        for key in found if run in self._runs else ():
            if key in self._read:  # the reader was faster
                run.reached = run.made + 1
            elif key not in self._expected:
                run.pending[key], self._expected[key] = run.made, run
                fresh.append(key)
            run.made += 1
        return fresh

    async def _follow_listing(self) -> None:
        """Start a run in the order of listings if the last reads were in that order."""
        self._look, keys = False, list(self._read)[-_LOOKED_AT:]
        self._patience = self._wait = min(2 * self._patience, _LOOKS)
        keys.sort(key=lambda key: key.split("/"))
        order = _Listing(self._store, keys[0])
        try:
            listed = {key: at for at, key in enumerate(await order.take(2 * len(keys)), 1)}
        finally:
            await order.aclose()
        seen = [listed[key] for key in keys if key in listed]
        if 1 + len(seen) >= max(0.6 * len(keys), 0.6 * (1 + max(seen, default=0)), _LEAST):
            self._patience = self._wait = _LEAST
            self._start(_Run(_Listing(self._store, keys[-1])))
