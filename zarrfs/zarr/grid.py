"""The regular chunk grid: which chunks an array has, what they are called, and how they are counted.

Source: Zarr v2 specification, "Chunks"; Zarr v3 core specification, "Regular grids".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

_NAME = re.compile(r"(?:0|[1-9][0-9]*)(?:\.(?:0|[1-9][0-9]*))*", re.ASCII)
_DIGITS_MAX = 255  # of a name: no longer one is that of a file
_SURE, _SURE_IN = 10**60, 64  # chunks, dimensions: with no more, no name is that long


class Grid:
    """Chunks numbered in C order (the last dimension varies fastest), from 0 to `size` - 1.

    A chunk's name joins its index in each dimension with "."; the one chunk of a scalar is "0". Numbers are
    plain ints: a grid may have more chunks than anything could hold.
    """

    def __init__(self, shape: object, chunks: object) -> None:
        """`shape` and `chunks` as JSON has them; ValueError names the rule that they break."""
        self.shape = _whole_numbers("shape", shape, 0)
        self.chunks = _whole_numbers("chunks", chunks, 1)
        if len(self.shape) != len(self.chunks):
            raise ValueError(f"shape has {len(self.shape)} dimensions, chunks has {len(self.chunks)}")
        self.counts = tuple(-(-extent // step) for extent, step in zip(self.shape, self.chunks, strict=True))
        self.size = math.prod(self.counts)
        long = self.size > _SURE or len(self.shape) > _SURE_IN
        if long and self.size and len(self.name(self.size - 1)) > _DIGITS_MAX:
            raise ValueError(f"shape: names of chunks over {_DIGITS_MAX} characters")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and (self.shape, self.chunks) == (other.shape, other.chunks)

    def __hash__(self) -> int:
        return hash((self.shape, self.chunks))

    def index(self, number: int) -> tuple[int, ...]:
        """The index of chunk `number`, which is in range."""
        found = []
        for count in reversed(self.counts):
            number, at = divmod(number, count)
            found.append(at)
        return tuple(reversed(found))

    def number_at(self, index: tuple[int, ...]) -> int:
        """The number of the chunk at `index`, which is in range."""
        found = 0
        for at, count in zip(index, self.counts, strict=True):
            found = found * count + at
        return found

    def name(self, number: int) -> str:
        """The name of chunk `number`, which is in range."""
        return ".".join(map(str, self.index(number))) or "0"

    def number(self, name: str) -> int | None:
        """The number of the chunk `name`; None where no chunk is called so."""
        if not self.counts:
            return 0 if name == "0" else None
        parts = name.split(".")
        if len(parts) != len(self.counts) or not _NAME.fullmatch(name):
            return None
        found = 0
        for part, count in zip(parts, self.counts, strict=True):
            if len(part) > _DIGITS_MAX:
                return None
            at = int(part)
            if at >= count:
                return None
            found = found * count + at
        return found

    def names(self, start: int, stop: int) -> Iterator[str]:
        """The names of the chunks `start` to `stop` - 1, in order; far quicker than name() of each."""
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


def _whole_numbers(name: str, value: object, least: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}: expected an array of whole numbers")  # noqa: TRY004
    for item in value:
        if type(item) is not int or item < least:
            raise ValueError(f"{name}: expected whole numbers, {least} or more")
    return tuple(value)
