"""The regular chunk grid, compared with itertools and numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import FLAT

SHAPES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=4)


def grid_of(pairs: list[tuple[int, int]]) -> Grid:
    return Grid([shape for shape, _ in pairs], [chunk for _, chunk in pairs])


@settings(max_examples=50)
@given(SHAPES)
def test_names_and_numbers_equal_those_of_itertools(pairs: list[tuple[int, int]]) -> None:
    grid = grid_of(pairs)
    assert grid.counts == tuple(math.ceil(shape / chunk) for shape, chunk in pairs)
    indices = list(itertools.product(*map(range, grid.counts)))
    names = [".".join(map(str, index)) or "0" for index in indices]
    assert grid.size == len(indices)
    assert list(grid.names(0, grid.size)) == names
    for number, (index, name) in enumerate(zip(indices, names, strict=True)):
        assert (grid.index(number), grid.name(number), grid.number_at(index)) == (index, name, number)
        assert FLAT.index(name, grid) == index


@settings(max_examples=50)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=5), st.data())
def test_names_and_numbers_of_huge_grids_are_inverse(counts: list[int], data: st.DataObject) -> None:
    grid = Grid(counts, [1] * len(counts))
    number = data.draw(st.integers(0, grid.size - 1))
    index = data.draw(st.tuples(*(st.integers(0, count - 1) for count in counts)))
    found = grid.number_at(index)
    assert grid.index(found) == FLAT.index(grid.name(found), grid) == index
    if grid.size < 2**63:
        assert found == np.ravel_multi_index(index, counts)
    assert next(grid.names(number, grid.size)) == grid.name(number)
