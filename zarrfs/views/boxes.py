"""Flat ranges of an array as boxes, and boxes as pieces of chunks. Pure functions.

Everything is in C order: a flat range [start, stop) of an array consists of at most 2 ndim - 1 consecutive boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

Slices = tuple[slice, ...]


class Box(NamedTuple):
    """A part of an array: [start, stop) in each dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        """The number of items in each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


class Piece(NamedTuple):
    """The part of a box that is in one chunk."""

    number: int  # of the chunk in the grid, in C order
    inside: Slices  # the part as slices of the chunk
    where: Slices  # the part as slices of the box


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of the items [start, stop) of an array of `shape`, in order, none of them empty."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    below = shape[1:]
    row = math.prod(below)
    first, skipped = divmod(start, row)
    last, more = divmod(stop, row)
    if first == last:
        yield from _within(first, below, skipped, more)
        return
    if skipped:
        yield from _within(first, below, skipped, row)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in below)), (last, *below))
    if more:
        yield from _within(last, below, 0, more)


def _within(at: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for box in boxes(shape, start, stop):
        yield Box((at, *box.start), (at + 1, *box.stop))


def pieces(box: Box, chunks: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Piece]:
    """Yield the pieces of a box in chunks of shape `chunks`, in C order of their grid of shape `counts`."""
    sides = [
        [
            (at, slice(max(start - at * step, 0), min(stop - at * step, step)),
             slice(max(at * step - start, 0), min((at + 1) * step, stop) - start))
            for at in range(start // step, -(-stop // step))
        ]
        for start, stop, step in zip(box.start, box.stop, chunks, strict=True)
    ]  # fmt: skip
    if not sides:
        yield Piece(0, (), ())
        return
    for above in itertools.product(*sides[:-1]):
        row = 0
        for (at, _inside, _where), count in zip(above, counts[1:], strict=True):
            row = (row + at) * count
        inside_above = tuple(inside for _, inside, _ in above)
        where_above = tuple(where for _, _, where in above)
        for at, inside, where in sides[-1]:
            yield Piece(row + at, (*inside_above, inside), (*where_above, where))


def number_of_pieces(box: Box, chunks: tuple[int, ...]) -> int:
    """Return the number of pieces that pieces() yields."""
    sides = zip(box.start, box.stop, chunks, strict=True)
    return math.prod(-(-stop // step) - start // step for start, stop, step in sides)


def offset_of(inside: Slices, chunks: tuple[int, ...]) -> int | None:
    """Return the offset (items) of a part that is contiguous in a C-order chunk; None if it is not contiguous."""
    offset, run = 0, True  # run: the part has all of every dimension after this one
    size = 1
    for part, extent in zip(reversed(inside), reversed(chunks), strict=True):
        taken = part.stop - part.start
        if not run and taken != 1:
            return None
        offset += part.start * size
        run = run and taken == extent
        size *= extent
    return offset
