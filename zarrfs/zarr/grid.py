"""The regular chunk grid: the chunks of an array, their names and their numbers.

Source: Zarr v2 specification, "Chunks"; Zarr v3 core specification, "Regular grids".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_NAME_MAX = 255  # characters: the limit of file names (NAME_MAX)
_SHORT_SIZE, _SHORT_NDIM = 10**60, 64  # no grid within these bounds has a name over _NAME_MAX


class Grid:
    """A regular grid whose chunks are numbered in C order (the last dimension varies fastest), from 0 to `size` - 1.

    A chunk's name is its key by keys.FLAT: its index, joined with "."; the only chunk of a scalar is "0". Numbers are
    Python ints: a grid may have more chunks than 64 bits can count.
    """

    def __init__(self, shape: object, chunks: object) -> None:
        """`shape` and `chunks` are lists of whole numbers, in items. Raise ValueError if they are invalid."""
        self.shape = _whole_numbers("shape", shape, 0)
        self.chunks = _whole_numbers("chunks", chunks, 1)
        if len(self.shape) != len(self.chunks):
            raise ValueError(f"shape has {len(self.shape)} dimensions, chunks has {len(self.chunks)}")
        self.counts = tuple(-(-extent // step) for extent, step in zip(self.shape, self.chunks, strict=True))
        self.size = math.prod(self.counts)
        large = self.size > _SHORT_SIZE or len(self.shape) > _SHORT_NDIM
        if large and self.size and len(self.name(self.size - 1)) > _NAME_MAX:
            raise ValueError(f"shape: names of chunks over {_NAME_MAX} characters")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and (self.shape, self.chunks) == (other.shape, other.chunks)

    def __hash__(self) -> int:
        return hash((self.shape, self.chunks))

    def index(self, number: int) -> tuple[int, ...]:
        """Return the index of chunk `number`, which must be in range."""
        found = []
        for count in reversed(self.counts):
            number, at = divmod(number, count)
            found.append(at)
        return tuple(reversed(found))

    def number_at(self, index: tuple[int, ...]) -> int:
        """Return the number of the chunk at `index`, which must be in range."""
        found = 0
        for at, count in zip(index, self.counts, strict=True):
            found = found * count + at
        return found

    def name(self, number: int) -> str:
        """Return the name of chunk `number`, which must be in range."""
        return ".".join(map(str, self.index(number))) or "0"

    def names(self, start: int, stop: int) -> Iterator[str]:
        """Yield the names of the chunks `start` to `stop` - 1 in order, far faster than calling name() for each."""
        if not self.counts:
            yield from ["0"][start:stop]
            return
        last = self.counts[-1]
        while start < stop:
            at = start % last
            row_stop = min(last, at + stop - start)
            above = self.name(start)[: -len(str(at))]
            yield from map(above.__add__, map(str, range(at, row_stop)))
            start += row_stop - at


def one_for_empty(shape: object, chunks: object) -> object:
    """Return `chunks` with 1 in place of each 0 where the shape is 0, too: zarr-python and kerchunk write these."""
    if isinstance(chunks, list) and 0 in chunks and isinstance(shape, list) and len(shape) == len(chunks):
        return [1 if step == 0 == extent else step for extent, step in zip(shape, chunks, strict=True)]
    return chunks


def _whole_numbers(name: str, value: object, least: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}: expected an array of whole numbers")  # noqa: TRY004
    for item in value:
        if type(item) is not int or item < least:
            raise ValueError(f"{name}: expected whole numbers, {least} or more")
    return tuple(value)
