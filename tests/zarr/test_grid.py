"""The regular chunk grid, compared with itertools and numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zarrfs.zarr.grid import Grid

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
        assert (grid.index(number), grid.name(number), grid.number(name)) == (index, name, number)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=5), st.data())
def test_names_and_numbers_of_huge_grids_are_inverse(counts: list[int], data: st.DataObject) -> None:
    grid = Grid(counts, [1] * len(counts))
    number = data.draw(st.integers(0, grid.size - 1))
    index = data.draw(st.tuples(*(st.integers(0, count - 1) for count in counts)))
    assert grid.number(grid.name(number)) == number
    found = grid.number(".".join(map(str, index)))
    assert found is not None
    assert grid.index(found) == index
    if grid.size < 2**63:
        assert found == np.ravel_multi_index(index, counts)
    assert next(grid.names(number, grid.size)) == grid.name(number)


@pytest.mark.parametrize(
    "name",
    ["", ".", "0", "0.", ".0", "0.0.0", "00.0", "0.01", "-1.0", "+1.0", "0.4", "3.0", "0 .0", "0.0\n", "0,0", "0/0",
     "٠.0", "²", "0x0.0", "1e0.0", "0.0.", "9" * 400, "0." + "9" * 5000, ".zarray"],
)  # fmt: skip
def test_other_names_are_not_taken_for_chunks(name: str) -> None:
    assert Grid([3, 4], [1, 1]).number(name) is None
