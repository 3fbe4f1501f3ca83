"""Orders in which keys are read: along a chunk grid, with any fastest axis and any stride, or through directories.

An order predicts the next keys. It knows neither reads in flight nor bytes.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, cast

from zarrfs.concurrency.lru import LRU
from zarrfs.errors import NotDirectory, NotFound
from zarrfs.store.api import Info, Kind, Store, join_key, split_key

Index = tuple[int, ...]  # the position of a chunk in its grid

REACH = 64  # positions by which reads may be out of order: as many as there may be concurrent readers
_AXES = 8  # grids with more are not predicted
_STRIDES = 4  # latest reads whose distance may be a stride
_DIRECTORIES = 64  # directories without files that one call of take() passes at most

# The index in 3.14, 0/3/14, c/0/3 ("c/" belongs to the prefix), 0.0.blosc: it begins after the last "/" that does not
# follow a number.
_CHUNK = re.compile(
    r"(?:^|(?<=/)|(?<=/c\.)|(?<=^c\.))((?:0|[1-9]\d{0,17})(?:(?:\.(?:0|[1-9]\d{0,17}))+|(?:/(?:0|[1-9]\d{0,17}))+)?)"
    r"(\.[A-Za-z]\w*)?$",
    re.ASCII,
)


class Pattern(NamedTuple):
    """The common part of an array's chunk keys, which also identifies the array."""

    prefix: str
    separator: str
    suffix: str
    axes: int

    def key(self, index: Index) -> str:
        """Return the key of the chunk at `index`."""
        return self.prefix + self.separator.join(map(str, index)) + self.suffix


def parse(key: str) -> tuple[Pattern, Index] | None:
    """Split a chunk key into its pattern and index; None if `key` does not have the form of a chunk key."""
    match = _CHUNK.search(key)
    if match is None:
        return None
    text = match[1]
    separator = "/" if "/" in text else "."
    index = tuple(map(int, text.split(separator)))
    if len(index) > _AXES:
        return None
    return Pattern(key[: match.start()], separator, match[2] or "", len(index)), index


def find_run(recent: LRU[Index, int], index: Index, least: int) -> GridRun | None:
    """Find a run of at least `least` chunks that ends or begins with the latest read, `index`; None if there is none.

    `recent` maps the latest reads, in their order, to increasing numbers. A run is along one axis, its chunks a step
    apart; its direction is that in which most of it was read.
    """
    steps = {(1, axis) for axis in range(len(index))}
    for other in itertools.islice(reversed(recent), 1, 1 + _STRIDES):
        apart = [axis for axis in range(len(index)) if index[axis] != other[axis]]
        if len(apart) == 1:
            steps.add((abs(index[apart[0]] - other[apart[0]]), apart[0]))
    for step, axis in sorted(steps, key=lambda one: (one[0], -one[1])):
        run = _run_along(recent, index, axis, step)
        if len(run) >= least and (step == 1 or _is_all(recent, run, axis, step)):
            numbers = [recent[one] for one in run]
            ascending = sum(1 if later > earlier else -1 for earlier, later in itertools.pairwise(numbers)) >= 0
            return GridRun(axis, step, run) if ascending else GridRun(axis, -step, run[::-1])
    return None


class GridRun(NamedTuple):
    """Chunks that were read in this order along one axis, `step` apart."""

    axis: int
    step: int
    chunks: list[Index]


def _run_along(recent: LRU[Index, int], index: Index, axis: int, step: int) -> list[Index]:
    """Return the unbroken run through `index` of chunks that were read lately, in grid order."""
    before, at, after = index[:axis], index[axis], index[axis + 1 :]
    low = high = at
    while (*before, low - step, *after) in recent:
        low -= step
    while (*before, high + step, *after) in recent:
        high += step
    return [(*before, number, *after) for number in range(low, high + 1, step)]


def _is_all(recent: LRU[Index, int], run: list[Index], axis: int, step: int) -> bool:
    """Return whether no chunk between those of a run was read. Otherwise, several readers only look like a stride."""
    first, last = run[0], run[-1]
    return not any(
        first[axis] < other[axis] < last[axis]
        and (other[axis] - first[axis]) % step
        and other[:axis] == first[:axis]
        and other[axis + 1 :] == first[axis + 1 :]
        for other in recent
    )


class GridOrder:
    """The order of chunks along the line of a run, then along the next lines, like an odometer.

    The axis of the run is fastest, then the other axes from last to first. Lines begin and end at the bounds of what
    was read. Before a reader has begun a second line, the end is not known: chunks are predicted that may not exist.
    """

    def __init__(self, pattern: Pattern, run: GridRun) -> None:
        self.pattern = pattern
        first, self._last = run.chunks[0], run.chunks[-1]
        axes = range(len(first))
        self._axes = [run.axis, *(axis for axis in reversed(axes) if axis != run.axis)]  # fastest first
        self._steps = [run.step if axis == run.axis else 1 if run.step > 0 else -1 for axis in axes]
        self._low, self._high = list(map(min, first, self._last)), list(map(max, first, self._last))
        self._bounded: set[int] = set()  # axes along which lines end at these bounds
        self._learned: set[int] = set()  # axes whose step was observed, not assumed
        self._next: list[int] = list(self._last)  # the next prediction; empty at the end
        self._advance()

    @property
    def ended(self) -> bool:
        """Return whether there are no more predictions."""
        return not self._next

    def take(self, count: int) -> list[str]:
        """Return the next `count` keys; fewer at the end."""
        found: list[str] = []
        while len(found) < count and self._next:
            found.append(self.pattern.key(tuple(self._next)))
            self._advance()
        return found

    def read(self, index: Index) -> None:
        """Note a read that belongs to this order."""
        self._last = index
        for axis, at in enumerate(index):
            self._low[axis], self._high[axis] = min(self._low[axis], at), max(self._high[axis], at)

    def is_near(self, index: Index) -> bool:
        """Note the read of a chunk that was not predicted; return whether it is about to be, or was lately."""
        chunks, off = 1, 0  # chunks: how many the faster axes hold together; 0: not known
        for axis in self._axes if self._next else ():
            turns, rest = divmod(index[axis] - self._next[axis], self._steps[axis])
            if rest or (turns and not chunks):
                return False
            off += turns * chunks
            step = abs(self._steps[axis])
            chunks *= (self._high[axis] - self._low[axis]) // step + 1 if axis in self._bounded else 0
        if not self._next or not -2 * REACH <= off <= REACH:
            return False
        self.read(index)
        return True

    def turns(self, index: Index, jittered: bool) -> bool:
        """Go on from the read of a chunk that was not predicted, if it begins another line; return whether it does.

        `jittered`: several readers take turns, so that the distance of two reads is not the step between lines.
        """
        level = max((n for n, axis in enumerate(self._axes) if index[axis] != self._last[axis]), default=0)
        axis = self._axes[level]
        step, usual = index[axis] - self._last[axis], self._steps[axis]
        if not level or abs(step) > REACH or (step != usual and (jittered or axis in self._learned)):
            return False
        if step * usual < 0 and abs(step) > 1:  # more likely the start of another pass
            return False
        for faster in self._axes[:level]:
            off = abs(index[faster] - self._first(faster))
            if off > (REACH // 2 if faster == self._axes[0] else 0) or not self._is_within(faster, index[faster]):
                return False
        self._bounded.update(self._axes[:level])
        self._learned.add(axis)
        self._steps[axis] = step
        self.read(index)
        self._next = list(index)
        self._advance()
        return True

    def _first(self, axis: int) -> int:
        return self._low[axis] if self._steps[axis] > 0 else self._high[axis]

    def _is_within(self, axis: int, at: int) -> bool:
        return self._low[axis] <= at <= self._high[axis]

    def _advance(self) -> None:
        for axis in self._axes:
            at = self._next[axis] + self._steps[axis]
            if at >= 0 and (axis not in self._bounded or self._is_within(axis, at)):
                self._next[axis] = at
                return
            self._next[axis] = self._first(axis)
        self._next = []


class DirectoryOrder:
    """A depth-first walk over the files of a tree in the order of listings, as cp, tar and find read them.

    It starts after the key `after`, and continues in the following directories until the end of the tree.
    """

    def __init__(self, store: Store, after: str) -> None:
        self.ended = False
        self._store = store
        prefix, name = split_key(after)
        self._levels = [(prefix, self._listing(prefix, name))]
        self._ahead: deque[str] = deque()  # files from give_back(), which take() returns first

    async def take(self, count: int) -> list[str]:
        """Return the next `count` files; fewer at the end, or after many directories without files."""
        found: list[str] = []
        while self._ahead and len(found) < count:
            found.append(self._ahead.popleft())
        looked = 0
        while len(found) < count and not self.ended and looked < _DIRECTORIES:
            prefix, listing = self._levels[-1]
            try:
                info = await anext(listing, None)
            except (NotFound, NotDirectory):  # removed since its parent was listed
                info = None
            if info is None:
                await self._leave(prefix, listing)
                looked += 1
            elif info.kind is Kind.DIRECTORY:
                key = join_key(prefix, info.name)
                self._levels.append((key, self._listing(key)))
            elif info.kind is Kind.FILE:
                found.append(join_key(prefix, info.name))
        return found

    def give_back(self, found: Sequence[str]) -> None:
        """Put back the last files of the latest take(), so that the next one returns them again."""
        self._ahead.extendleft(reversed(found))

    async def aclose(self) -> None:
        """Close all open listings."""
        self.ended = True
        self._ahead.clear()
        while self._levels:
            await self._levels.pop()[1].aclose()

    def _listing(self, prefix: str, after: str = "") -> AsyncGenerator[Info, None]:
        return cast(AsyncGenerator[Info, None], self._store.list_dir(prefix, after))

    async def _leave(self, prefix: str, listing: AsyncGenerator[Info, None]) -> None:
        """Close a finished listing, and continue with its parent's."""
        self._levels.pop()
        await listing.aclose()
        if not self._levels:
            if prefix:
                above, name = split_key(prefix)
                self._levels.append((above, self._listing(above, name)))
            else:
                self.ended = True
