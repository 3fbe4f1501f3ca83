"""Orders in which keys are read: along a chunk grid, with any fastest axis and any stride, or through directories.

An order predicts the next keys. It knows neither reads in flight nor bytes.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, cast

from zarrfs.errors import NotDirectory, NotFound
from zarrfs.store.api import Info, Kind, Store, join_key, split_key

Index = tuple[int, ...]  # the position of a chunk in its grid
KeySize = tuple[str, int | None]  # a key that exists, and its size in bytes if known
Ask = Callable[[Sequence[str]], Awaitable[list[KeySize | None]]]  # looks keys up; None for those that do not exist

REACH = 64  # positions by which reads may be out of order: as many as there may be concurrent readers
_HOLES = 4  # consecutive absent chunks that end a line
_AXES = 8  # grids with more are not predicted
_FOUND_NEAR = 16  # latest reads that count for a stride or a run of the least length; for longer runs, all count
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


class Run(NamedTuple):
    """Chunks that were read in order along one axis, `step` apart, from `first` to `last`."""

    axis: int
    step: int
    first: Index
    last: Index


def find_run(recent: Mapping[Index, int], index: Index, least: int) -> Run | None:
    """Find a run of at least `least` chunks that includes the latest read, `index`; None if there is none.

    `recent` maps the latest reads, in their order, to increasing numbers. Runs of neighbours take precedence over
    strides.
    """
    late = recent[index] - _FOUND_NEAR
    for axis in range(len(index) - 1, -1, -1):
        run = _run_along(recent, index, axis, 1, 0)
        if len(run) > least or (len(run) == least and min(map(recent.__getitem__, run)) > late):
            return _directed(recent, run, axis, 1)
    for axis, step in _strides(recent, index):
        run = _run_along(recent, index, axis, step, late)
        if (len(run) > least or (len(run) == least and _is_latest(recent, run))) and _is_all(recent, run, axis, step):
            return _directed(recent, run, axis, step)
    return None


def _run_along(recent: Mapping[Index, int], index: Index, axis: int, step: int, late: int) -> list[Index]:
    """Return the unbroken run through `index` of chunks that were read after number `late`, in grid order."""
    before, at, after = index[:axis], index[axis], index[axis + 1 :]
    low = high = at
    while recent.get((*before, low - step, *after), late) > late:
        low -= step
    while recent.get((*before, high + step, *after), late) > late:
        high += step
    return [(*before, number, *after) for number in range(low, high + 1, step)]


def _strides(recent: Mapping[Index, int], index: Index) -> list[tuple[int, int]]:
    """Return (axis, step) from `index` to the chunks that were read just before it, shortest first."""
    found = set()
    for count, other in enumerate(reversed(cast(dict[Index, int], recent))):
        if count > _STRIDES:
            break
        apart = [axis for axis in range(len(index)) if index[axis] != other[axis]]
        if len(apart) == 1:
            step = abs(index[apart[0]] - other[apart[0]])
            if step > 1:
                found.add((step, apart[0]))
    return [(axis, step) for step, axis in sorted(found)]


def _is_latest(recent: Mapping[Index, int], run: list[Index]) -> bool:
    """Return True if a run is exactly the latest reads, in order or in reverse."""
    numbers = [recent[index] for index in run]
    return max(numbers) - min(numbers) == len(run) - 1 and numbers in (sorted(numbers), sorted(numbers, reverse=True))


def _is_all(recent: Mapping[Index, int], run: list[Index], axis: int, step: int) -> bool:
    """Return True if no chunk between those of a run was read. Otherwise, several readers only look like a stride."""
    first, last = run[0], run[-1]
    return not any(
        first[axis] < other[axis] < last[axis]
        and (other[axis] - first[axis]) % step
        and other[:axis] == first[:axis]
        and other[axis + 1 :] == first[axis + 1 :]
        for other in recent
    )


def _directed(recent: Mapping[Index, int], run: list[Index], axis: int, step: int) -> Run | None:
    """Return a run in the direction in which most of it was read."""
    numbers = [recent[index] for index in run]
    later = sum(1 if b > a else -1 for a, b in itertools.pairwise(numbers))
    if later >= 0:
        return Run(axis, step, run[0], run[-1])
    return Run(axis, -step, run[-1], run[0])


class Fit(enum.Enum):
    """The relation of an unpredicted read to a sequence."""

    NONE = 0
    BEHIND = 1  # one of several concurrent readers was late
    AHEAD = 2  # the read is ahead of the predictions so far
    ELSEWHERE = 3  # the read is at the beginning of a line that was not predicted


class GridOrder:
    """A continuation of a run of chunks: to the end of its line, then along the next lines, like an odometer.

    The axis of the run is fastest, then the other axes from last to first. A line begins where earlier lines began,
    and ends where they ended or no more chunks exist.
    """

    def __init__(self, pattern: Pattern, run: Run) -> None:
        self.pattern = pattern
        self.ended = False
        axes = range(pattern.axes)
        self._axes = [run.axis, *(axis for axis in reversed(axes) if axis != run.axis)]  # fastest first
        self._steps = [run.step if axis == run.axis else 1 if run.step > 0 else -1 for axis in axes]
        self._low = list(map(min, run.first, run.last))  # the bounds of all reads, per axis
        self._high = list(map(max, run.first, run.last))
        self._ends: list[int | None] = [None] * pattern.axes  # the last position on each axis, if known
        self._learned: set[int] = set()  # axes whose step was observed, not assumed
        self._read = run.last  # the latest read
        self._position = list(run.last)  # the next prediction
        self._position[run.axis] += run.step
        self._level = 0  # index in _axes of the axis that the latest change of line advanced; 0: no change so far
        self._on_line = False  # a chunk of the current line exists
        self._absent = 0  # consecutive absent chunks
        self._version = 0  # incremented when a read moves the position

    def read(self, index: Index) -> None:
        """Record a read that belongs to this sequence."""
        self._read = index
        self._note(index)

    def _note(self, index: Index) -> None:
        """Extend the bounds of lines to include a read."""
        for axis, at in enumerate(index):
            if at < self._low[axis]:
                self._low[axis] = at
            elif at > self._high[axis]:
                self._high[axis] = at
            end = self._ends[axis]
            if end is not None and (at - end) * self._steps[axis] > 0:
                self._ends[axis] = at

    def place(self, index: Index, jittered: bool, alone: bool) -> Fit:
        """Classify the read of a chunk that was not predicted. After ELSEWHERE, predictions continue from it.

        `jittered` means that concurrent readers take turns, so that the distance between two reads is not the step
        between lines. `alone` means that the grid has no other sequence to which the read may belong.
        """
        off = self._distance(index)
        if off is not None and -2 * REACH <= off <= REACH:
            self._note(index)
            return Fit.BEHIND if off < 0 else Fit.AHEAD
        level = max((n for n, axis in enumerate(self._axes) if index[axis] != self._read[axis]), default=0)
        return Fit.ELSEWHERE if level and alone and self._carries(index, level, jittered) else Fit.NONE

    def _distance(self, index: Index) -> int | None:
        """Return the number of chunks from the position to `index`; None if it is not in this order, or unknown."""
        chunks, off = 1, 0  # chunks: how many the faster axes hold together; 0: not known
        for axis in self._axes:
            turns, rest = divmod(index[axis] - self._position[axis], self._steps[axis])
            if rest or (turns and not chunks):
                return None
            off += turns * chunks
            end = self._ends[axis]
            first = self._low[axis] if self._steps[axis] > 0 else self._high[axis]
            chunks *= 0 if end is None else max(0, (end - first) // self._steps[axis] + 1)
        return off

    async def take(self, count: int, ask: Ask) -> list[KeySize]:
        """Return the next `count` chunks that exist; fewer at the end."""
        found: list[KeySize] = []
        while len(found) < count and not self.ended:
            line = self._line(max(count - len(found), _HOLES))
            if not line:
                self._end_line()
                continue
            version = self._version
            answers = await ask([self.pattern.key(index) for index in line])
            if version != self._version:
                found.clear()
                continue
            for index, answer in zip(line, answers, strict=True):
                self._go_on()
                if answer is not None:
                    found.append(answer)
                    self._on_line, self._absent = True, 0
                    if len(found) == count:
                        break
                elif self._misses(index):
                    break
        return found

    # -- parts

    def _line(self, count: int) -> list[Index]:
        """Return the next `count` positions of the line; fewer at its end."""
        fast = self._axes[0]
        at, step, end = self._position[fast], self._steps[fast], self._ends[fast]
        if end is not None:
            count = min(count, (end - at) // step + 1)
        if step < 0:
            count = min(count, at // -step + 1)
        before, after = tuple(self._position[:fast]), tuple(self._position[fast + 1 :])
        return [(*before, at + number * step, *after) for number in range(count)]

    def _go_on(self) -> None:
        self._position[self._axes[0]] += self._steps[self._axes[0]]

    def _misses(self, index: Index) -> bool:
        """Record that a chunk does not exist. Return True if that ends the line."""
        self._absent += 1
        fast, begun = self._axes[0], self._on_line or not self._level  # the first line began with a read
        if self._absent < _HOLES or (begun and self._ends[fast] is not None):
            return False
        if begun:
            self._ends[fast] = index[fast] - self._absent * self._steps[fast]
        self._end_line()
        return True

    def _end_line(self) -> None:
        """Move to the beginning of the next line. A line without chunks ends the axis along which it was reached."""
        level = 1
        if self._level and not self._on_line:
            axis = self._axes[self._level]
            self._ends[axis] = self._position[axis] - self._steps[axis]
            level = self._level + 1
        self._absent, self._on_line = 0, False
        for turned in range(level, len(self._axes)):
            for faster in self._axes[:turned]:
                self._position[faster] = self._low[faster] if self._steps[faster] > 0 else self._high[faster]
            axis = self._axes[turned]
            at, end = self._position[axis] + self._steps[axis], self._ends[axis]
            if at >= 0 and (end is None or (end - at) * self._steps[axis] >= 0):
                self._position[axis], self._level = at, turned
                return
        self.ended = True

    def _carries(self, index: Index, level: int, jittered: bool) -> bool:
        """Continue at a read if it can begin the next line; earlier lines then end at their last read."""
        axis, fast = self._axes[level], self._axes[0]
        step = index[axis] - self._read[axis]
        if step != self._steps[axis] and (jittered or axis in self._learned or abs(step) > REACH):
            return False
        if step * self._steps[axis] < 0 and abs(step) > 1:  # more likely the start of another pass
            return False
        for faster in self._axes[:level]:
            first, end = (self._low, self._high) if self._steps[faster] > 0 else (self._high, self._low)
            each = self._steps[faster]
            off, left = (index[faster] - first[faster]) // each, (end[faster] - index[faster]) // each
            if off > (REACH // 2 if faster == fast else 0) or left < 0:
                return False
        for faster in self._axes[:level]:
            self._ends[faster] = self._high[faster] if self._steps[faster] > 0 else self._low[faster]
        self._learned.add(axis)
        self._steps[axis] = step
        self.read(index)
        self._position = list(index)
        self._go_on()
        self._level, self._on_line, self._absent, self.ended = level, True, 0, False
        self._version += 1
        return True


class DirectoryOrder:
    """A depth-first walk over the files of a tree in the order of listings, as cp, tar and find read them.

    It starts after the key `after`, and continues in the following directories until the end of the tree.
    """

    def __init__(self, store: Store, after: str) -> None:
        self.ended = False
        self._store = store
        prefix, name = split_key(after)
        self._levels = [(prefix, self._listing(prefix, name))]
        self._ahead: deque[KeySize] = deque()  # files from give_back(), which take() returns first

    async def take(self, count: int) -> list[KeySize]:
        """Return the next `count` files; fewer at the end, or after many directories without files."""
        found: list[KeySize] = []
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
                found.append((join_key(prefix, info.name), info.size))
        return found

    def give_back(self, found: Sequence[KeySize]) -> None:
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
