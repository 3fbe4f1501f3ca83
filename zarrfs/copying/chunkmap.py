"""Which chunks of a grid there are, as a picture of bounded size: two dimensions, and cells that count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zarrfs.zarr.grid import Grid

ROWS, COLUMNS = 64, 128  # cells at most
_LEVELS = 9  # of a cell, from none of its chunks to all


class ChunkMap:
    """Cells of a picture of the grid. Rows are the first dimensions, columns the last ones, in C order.

    The dimensions are split where that makes the picture most like a square; those of one dimension are folded
    into rows. A cell stands for one chunk or more.
    """

    def __init__(self, grid: Grid, most: tuple[int, int] = (ROWS, COLUMNS)) -> None:
        counts = grid.counts
        self.split = 0  # how many dimensions make the rows; 0: the only one is folded
        if len(counts) > 1:
            self.split = min(range(1, len(counts)), key=lambda at: _unlike(counts[:at], counts[at:]))
            self._height, self._width = math.prod(counts[: self.split]), math.prod(counts[self.split :])
        else:
            self._width = math.isqrt(max(grid.size - 1, 0)) + 1
            self._height = -(-grid.size // self._width)
        self._size = grid.size
        self.rows, self.columns = min(self._height, most[0]), min(self._width, most[1])
        self._found = [0] * (self.rows * self.columns)

    def add(self, number: int) -> None:
        """Count chunk `number` of the grid as one that there is."""
        row, column = divmod(number, self._width)
        self._found[row * self.rows // self._height * self.columns + column * self.columns // self._width] += 1

    def levels(self) -> str:
        """A digit a cell, row by row: from 0, none of its chunks is there, to 8, all are; "-": it stands for none."""
        return "".join(
            _level(self._found[row * self.columns + column], self._chunks(row, column))
            for row in range(self.rows)
            for column in range(self.columns)
        )

    def _chunks(self, row: int, column: int) -> int:
        """How many chunks a cell stands for."""
        top, bottom = _bounds(row, self.rows, self._height)
        left, right = _bounds(column, self.columns, self._width)
        whole = (bottom - top) * (right - left)
        last = self._size - (self._height - 1) * self._width  # chunks of the last row, where it was folded
        return whole - max(0, right - max(left, last)) if bottom == self._height else whole


def _unlike(rows: Sequence[int], columns: Sequence[int]) -> float:
    height, width = max(math.prod(rows), 1), max(math.prod(columns), 1)
    return abs(math.log(height) - math.log(width))


def _bounds(cell: int, cells: int, extent: int) -> tuple[int, int]:
    """[start, stop) of the rows or columns of chunks that a cell stands for."""
    return -(-cell * extent // cells), -(-(cell + 1) * extent // cells)


def _level(found: int, chunks: int) -> str:
    if not chunks:
        return "-"
    if found in (0, chunks):
        return "0" if not found else str(_LEVELS - 1)
    return str(1 + min(found * (_LEVELS - 2) // chunks, _LEVELS - 3))


def packed(levels: str) -> str:
    """Runs of the same digit as DIGIT or DIGITxCOUNT, with spaces between them."""
    found: list[str] = []
    start = 0
    for at in range(1, len(levels) + 1):
        if at == len(levels) or levels[at] != levels[start]:
            found.append(levels[start] if at - start == 1 else f"{levels[start]}x{at - start}")
            start = at
    return " ".join(found)
