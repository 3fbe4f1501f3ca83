"""Chunk keys of every generation: the template, its inverse, and listings of directories."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import DEFAULT, DRAFT, FLAT, NESTED, V0, KeyTemplate


@pytest.mark.parametrize(
    "key",
    [
        "0", "0.0.0", "00.0", "0.01", "-1.0", "+1.0", " 1.0", "1.0 ", "1.0\n", "٣.0", "1_0.0", "0.10", "3.0", "0/0",
        "c/0.0", "", ".", "0.", ".0", "0..0",
        "²", "0x0.0", "1e0.0", ".zarray", "0.0.blosc", "0.0.1f2e.partial", "9" * 5000 + ".0", "0." + "9" * 5000,
    ],
)  # fmt: skip
def test_other_keys_are_not_taken_for_chunks(key: str) -> None:
    assert FLAT.index(key, Grid([3, 10], [1, 1])) is None


@pytest.mark.parametrize(
    "parts",
    [
        {"separator": ""}, {"separator": "0"}, {"separator": ".1."}, {"suffix": "0"}, {"prefix": "../"},
        {"prefix": "/"}, {"prefix": "a//"}, {"separator": "/../"}, {"separator": "/./"}, {"suffix": "/"},
        {"prefix": "a\0"}, {"scalar": "zarr.json"}, {"scalar": ""}, {"scalar": ".zattrs"},
    ],
)  # fmt: skip
def test_invalid_templates_are_refused(parts: dict[str, str]) -> None:
    with pytest.raises(MetadataError, match="chunk keys"):
        KeyTemplate(**parts)


TEMPLATES = st.sampled_from([
    V0, FLAT, NESTED, DEFAULT, DRAFT, KeyTemplate.joined("c", "."), KeyTemplate.joined("data", "-", "bin"),
    KeyTemplate(separator="_", suffix="x"), KeyTemplate("a/b/c/d", "-/x", ".z/q", "a"), KeyTemplate("1", "~"),
])  # fmt: skip
SHAPES = st.lists(st.integers(0, 13), max_size=3).filter(lambda shape: len(shape) < 3 or max(shape) < 12)


def keys_of(template: KeyTemplate, grid: Grid) -> dict[str, tuple[int, ...]]:
    return {template.key(index): index for index in itertools.product(*map(range, grid.counts))}


@settings(max_examples=50)
@given(TEMPLATES, SHAPES)
def test_index_is_the_inverse_of_key(template: KeyTemplate, shape: list[int]) -> None:
    grid = Grid(shape, [1] * len(shape))
    found = keys_of(template, grid)
    assert len(found) == grid.size
    assert all(template.index(key, grid) == index for key, index in found.items())


@settings(max_examples=50)
@given(TEMPLATES, SHAPES, st.data())
def test_listings_equal_those_of_all_keys(template: KeyTemplate, shape: list[int], data: st.DataObject) -> None:
    """The expected listings come from all keys, split at every "/"."""
    grid = Grid(shape, [1] * len(shape))
    paths = keys_of(template, grid)
    listed: dict[str, dict[str, None]] = {"": {}}  # names in C order
    for path in paths:
        names = path.split("/")
        for depth, name in enumerate(names):
            inside = listed.setdefault("/".join(names[:depth]), {})
            if name:
                inside[name] = None
    for directory, inside in listed.items():
        children = dict(template.children(directory, grid))
        assert list(children) == list(inside)
        assert template.is_directory(directory, grid)
        for name, inner in children.items():
            assert inner == ((f"{directory}/{name}" if directory else name) in listed)
            assert inner == template.is_directory(f"{directory}/{name}" if directory else name, grid)
    directory = data.draw(st.sampled_from(sorted(listed)))
    if listed[directory]:
        after = data.draw(st.sampled_from(sorted(listed[directory])))
        rest = list(listed[directory])[list(listed[directory]).index(after) + 1 :]
        assert [name for name, _inner in template.children(directory, grid, after)] == rest


@settings(max_examples=50)
@given(st.lists(st.integers(1, 10**12), max_size=5), st.data())
def test_numbers_and_names_of_a_grid_are_those_of_its_indices_in_c_order(
    counts: list[int], data: st.DataObject
) -> None:
    grid = Grid([3 * count - 1 for count in counts], [3] * len(counts))
    index = data.draw(st.tuples(*(st.integers(0, count - 1) for count in counts)))
    number = grid.number_at(index)
    assert (grid.counts, grid.size) == (tuple(counts), math.prod(counts))
    assert grid.index(number) == FLAT.index(grid.name(number), grid) == index
    if counts and grid.size < 2**63:
        assert number == np.ravel_multi_index(index, counts)
    stop = min(number + 30, grid.size)
    assert list(grid.names(number, stop)) == [FLAT.key(grid.index(at)) for at in range(number, stop)]


@pytest.mark.parametrize("key", ["d", "c/3", "c/0/0", "c/00", "c/x", "0", "c/", "/", "c/0/0/0", "c/٣"])
def test_other_keys_are_not_taken_for_directories(key: str) -> None:
    grid = Grid([3, 3], [1, 1])
    assert not DEFAULT.is_directory(key, grid)
    assert not list(DEFAULT.children(key, grid))


def test_listings_of_a_huge_grid_are_lazy() -> None:
    """A grid larger than any memory is listed from any name without delay."""
    grid = Grid([10**40, 10**40], [1, 1])
    assert [name for name, _inner in itertools.islice(FLAT.children("", grid), 3)] == ["0.0", "0.1", "0.2"]
    above = "5" * 40
    rest = FLAT.children("", grid, f"{above}.7")
    assert [name for name, _inner in itertools.islice(rest, 2)] == [f"{above}.8", f"{above}.9"]
