"""Translation of chunk keys between a view and its source, name by name and directory by directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zarrfs.store.api import join_key, split_key
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata


class ChunkNames:
    """The keys of the chunks of `array` in its source and in a view, relative to the array.

    The view names chunks by the template `view`. Both templates have the same separator, so that directories of chunks
    correspond.
    """

    def __init__(self, array: ArrayMetadata, view: KeyTemplate, inner: Grid | None = None) -> None:
        """`inner`: the grid of the chunks in the view, if they are the inner chunks of shards."""
        self._grid, self._keys, self._view, self.inner = array.grid, array.keys, view, inner is not None
        grid = self._shown = inner or array.grid
        self._same = inner is None and view == array.keys
        self._per = [whole // part for whole, part in zip(array.grid.chunks, grid.chunks, strict=True)]
        self._more = array.keys.depth(array.grid) - view.depth(grid)  # path components of keys of the source

    def index(self, key: str) -> tuple[int, ...] | None:
        """Return the index of the chunk that the view calls `key`; None if no chunk has that key."""
        return self._view.index(key, self._shown)

    def source(self, key: str) -> tuple[str | None, bool]:
        """Return (key in the source, is a directory) of a chunk or a directory of chunks; key None for other keys."""
        numbers = self._view.numbers(key, self._shown)
        if numbers is None:
            return None, False
        depth = _depth(key)
        outer = tuple(number // per for number, per in zip(numbers, self._per, strict=False))
        path = self._keys.path(outer, depth + self._more, self._grid)
        return path, depth < self._view.depth(self._shown)

    def names(self, directory: str, name: str, is_directory: bool) -> Iterator[str] | None:
        """Return the names in the view's `directory` of the chunks, or directory, that the source calls `name`.

        Return None if `name` is not that of a chunk, or of a directory of chunks if `is_directory`.
        """
        above = self.source(directory)[0]
        key = join_key(above, name) if above else name
        numbers = self._keys.numbers(key, self._grid)
        if numbers is None or is_directory != (_depth(key) < self._keys.depth(self._grid)):
            return None
        return iter((name,)) if self._same else self._names(directory, numbers)

    def _names(self, directory: str, numbers: tuple[int, ...]) -> Iterator[str]:
        head = self._view.numbers(directory, self._shown) or ()
        sides = [
            range(number * per, min((number + 1) * per, count))
            for number, per, count in zip(numbers, self._per, self._shown.counts, strict=False)
        ]
        for inside in itertools.product(*sides[len(head) :]):
            yield split_key(self._view.path((*head, *inside), _depth(directory) + 1, self._shown))[1]


def _depth(key: str) -> int:
    return key.count("/") + 1 if key else 0
