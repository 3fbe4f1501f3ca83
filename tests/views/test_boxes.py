"""Ranges of flat arrays as boxes and pieces of chunks, compared with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarrfs.views.boxes import boxes, offset_of, pieces

SIDES = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=4)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Draw (shape, chunks, start, stop) with 0 <= start <= stop <= size."""
    sides = draw(SIDES)
    shape, chunks = tuple(extent for extent, _ in sides), tuple(step for _, step in sides)
    stop = draw(st.integers(0, math.prod(shape)))
    return shape, chunks, draw(st.integers(0, stop)), stop


@given(ranges())
def test_boxes_are_the_range_in_order(case: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> None:
    shape, _chunks, start, stop = case
    items = np.arange(math.prod(shape)).reshape(shape)
    found: list[int] = []
    parts = list(boxes(shape, start, stop))
    for box in parts:
        assert math.prod(box.extents) > 0
        part = items[tuple(map(slice, box.start, box.stop))]
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(ranges())
def test_pieces_fill_their_box(case: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> None:
    shape, chunks, start, stop = case
    counts = tuple(-(-extent // step) for extent, step in zip(shape, chunks, strict=True))
    items = np.arange(math.prod(shape)).reshape(shape)
    padded = np.full([count * step for count, step in zip(counts, chunks, strict=True)], -1)
    padded[tuple(map(slice, shape))] = items
    for box in boxes(shape, start, stop):
        wanted = items[tuple(map(slice, box.start, box.stop))]
        found = np.full(box.extents, -1)
        numbers = []
        for piece in pieces(box, chunks, counts):
            index = np.unravel_index(piece.number, counts) if shape else ()
            corner = [int(at) * step for at, step in zip(index, chunks, strict=True)]
            chunk = padded[tuple(slice(at, at + step) for at, step in zip(corner, chunks, strict=True))]
            assert (np.asarray(found[piece.where]) == -1).all(), "filled twice"
            found[piece.where] = chunk[piece.inside]
            numbers.append(piece.number)
            offset = offset_of(piece.inside, chunks)
            flat = np.ascontiguousarray(chunk).reshape(-1).tolist()
            run = np.asarray(chunk[piece.inside]).reshape(-1).tolist()
            if offset is not None:
                assert flat[offset : offset + len(run)] == run
            elif len(run) > 1:
                there = np.arange(len(flat)).reshape(chunks)[piece.inside].reshape(-1)
                assert (np.diff(there) != 1).any(), "it was in one run"
        assert (found == wanted).all()
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("ndim", [1, 32, 64])
def test_one_item_is_one_box_and_one_piece_in_up_to_64_dimensions(ndim: int) -> None:
    shape = (2, *(1 for _ in range(ndim - 1)))
    (box,) = boxes(shape, 1, 2)
    assert (box.start, box.stop) == ((1, *(0 for _ in shape[1:])), (2, *(1 for _ in shape[1:])))
    (piece,) = pieces(box, shape, (1,) * ndim)
    assert (piece.number, offset_of(piece.inside, shape)) == (0, 1)
