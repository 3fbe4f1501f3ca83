"""Flat ranges of an array as boxes, and boxes as pieces of chunks. Pure functions.

Everything is in C order, and an array has at least one dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Slices = tuple[slice, ...]
Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of an array: [start, stop) in each dimension."""

    start: Shape
    stop: Shape

    @property
    def extents(self) -> Shape:
        """The number of items in each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


class Piece(NamedTuple):
    """The part of a box that is in one chunk."""

    number: int  # of the chunk in the grid, in C order
    inside: Slices  # the part as slices of the chunk
    where: Slices  # the part as slices of the box


class Run(NamedTuple):
    """Consecutive items of a chunk."""

    number: int  # of the chunk
    start: int
    items: int


def boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of the items [start, stop), in order, none of them empty: at most 2 ndim - 1 of them."""
    rows = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    while start < stop:
        at = next(at for at, row in enumerate(rows) if start % row == 0 and row <= stop - start)
        low = _index(start, shape)
        high = min(low[at] + (stop - start) // rows[at], shape[at])
        yield Box(low, (*(each + 1 for each in low[:at]), high, *shape[at + 1 :]))
        start += (high - low[at]) * rows[at]


def pieces(box: Box, chunks: Shape, counts: Shape) -> Iterator[Piece]:
    """Yield the pieces of a box in chunks of shape `chunks`, in C order of their grid of shape `counts`."""
    sides = [
        [
            (at, slice(max(start - at * step, 0), min(stop - at * step, step)),
             slice(max(at * step - start, 0), min((at + 1) * step, stop) - start))
            for at in range(start // step, -(-stop // step))
        ]
        for start, stop, step in zip(box.start, box.stop, chunks, strict=True)
    ]  # fmt: skip
    for above in itertools.product(*sides[:-1]):
        index, inside, where = zip(*above, strict=True) if above else ((), (), ())
        row = _number(index, counts) * counts[-1]
        for at, part, place in sides[-1]:
            yield Piece(row + at, (*inside, part), (*where, place))


def runs(shape: Shape, chunks: Shape, counts: Shape, start: int, stop: int, most: int) -> list[Run]:
    """Return the items [start, stop) as runs, one for each chunk; [] if that needs more than `most` runs."""
    low, high = _index(start, shape), _index(stop - 1, shape)
    at = next((at for at in range(len(shape)) if low[at] != high[at]), len(shape) - 1)
    if chunks[at + 1 :] != shape[at + 1 :] or high[at] // chunks[at] - low[at] // chunks[at] >= most:
        return []
    row = math.prod(shape[at + 1 :])
    size = chunks[at] * row  # items of a chunk with one index in the dimensions before `at`
    first = low[at] * row + start % row
    skipped = _number([index % step for index, step in zip(low[:at], chunks, strict=False)], chunks) * size
    before = _number([index // step for index, step in zip(low[:at], chunks, strict=False)], counts) * counts[at]
    found = []
    for chunk in range(low[at] // chunks[at], high[at] // chunks[at] + 1):
        begin, end = max(first, chunk * size), min(first + stop - start, (chunk + 1) * size)
        found.append(Run(before + chunk, skipped + begin - chunk * size, end - begin))
    return found


def _index(number: int, shape: Shape) -> Shape:
    """Return the index of an item."""
    found = []
    for extent in reversed(shape):
        number, at = divmod(number, extent)
        found.append(at)
    return tuple(reversed(found))


def _number(index: Sequence[int], shape: Shape) -> int:
    """Return the number of the item at `index`, which may have fewer dimensions than `shape`."""
    number = 0
    for at, extent in zip(index, shape, strict=False):
        number = number * extent + at
    return number
