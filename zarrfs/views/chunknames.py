"""Translation of chunk keys between a view and its source, name by name and directory by directory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence

from zarrfs.store.api import join_key, split_key
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import KeyTemplate, sorted_numbers
from zarrfs.zarr.model import ArrayMetadata


class ChunkNames:
    """The chunk names of `array` in its source, and in a view that names chunks by the template `view`.

    Both templates have the same separator, so directories correspond. All keys are relative to the array.
    """

    def __init__(self, array: ArrayMetadata, view: KeyTemplate) -> None:
        self._grid, self._keys, self._view = array.grid, array.keys, view
        self._same = array.keys == view
        above, name = split_key(array.keys.prefix if array.ndim else array.keys.scalar)
        self._prefix = name if array.ndim else ""
        self._base = "" if self._same else "/".join(filter(None, (array.keys.directory, above)))

    def index(self, key: str) -> tuple[int, ...] | None:
        """Return the index of the chunk that the view calls `key`; None if no chunk has that key."""
        return self._view.index(key, self._grid)

    def source(self, key: str) -> tuple[str | None, bool]:
        """Return (key in the source, is a directory) of a chunk or directory of chunks, or (None, False)."""
        index = self._view.index(key, self._grid)
        if index is not None:
            return key if self._same else self._keys.key(index), False
        if self._view.is_directory(key, self._grid):
            return self.directory(key), True
        return None, False

    def directory(self, key: str) -> str:
        """Return the source directory of the view's directory of chunks `key`, which may be ""."""
        if self._same:
            return key
        if not key:
            return self._base
        return join_key(self._base, self._prefix + key)

    def view_names(self, directory: str) -> Callable[[str, bool], str | None]:
        """Return a function from (name in the source directory, is a directory) to the name in the view.

        `directory` is the view's directory of chunks; directory() returns its source directory. The function returns
        None if the name is not that of a chunk or a directory of chunks.
        """
        above, grid, keys, view = self.directory(directory), self._grid, self._keys, self._view
        start = above + "/" if above else ""
        cut = 0 if self._same or directory else len(self._prefix)

        def name_of(name: str, is_directory: bool) -> str | None:
            if is_directory:
                return name[cut:] if keys.is_directory(start + name, grid) else None
            index = keys.index(start + name, grid)
            if index is None:
                return None
            return name if self._same else split_key(view.key(index))[1]

        return name_of

    def source_name(self, directory: str, name: str) -> str | None:
        """Return the source name of the view's `name` in `directory`; None if no chunk or directory has that name.

        Return `name` unchanged and unchecked if the view has the keys of the source, or if it is "", with which a
        listing begins.
        """
        if self._same or not name:
            return name
        found, _is_directory = self.source(join_key(directory, name))
        return None if found is None else split_key(found)[1]


class InnerNames:
    """The names of inner chunks in a view, and of the shards of `array` that hold them.

    If keys are nested, a directory of inner chunks corresponds to one directory of shards in the source.
    """

    def __init__(self, array: ArrayMetadata, view: KeyTemplate, grid: Grid) -> None:
        """`view` is the template of the keys of inner chunks, and `grid` is their grid."""
        self.shards = ChunkNames(array, view)
        self._view, self._grid = view, grid
        self.per_shard = [shard // inner for shard, inner in zip(array.grid.chunks, grid.chunks, strict=True)]

    def index(self, key: str) -> tuple[int, ...] | None:
        """Return the index of the inner chunk that the view calls `key`; None if no chunk has that key."""
        return self._view.index(key, self._grid)

    def source(self, key: str) -> tuple[str | None, bool]:
        """Return (source key of the shard or directory of shards, is a directory), or (None, False)."""
        index = self.index(key)
        if index is not None:
            return self.shards.source(self._view.key(self._shard(index)))
        if self._view.is_directory(key, self._grid):
            return self.directory(key), True
        return None, False

    def directory(self, key: str) -> str:
        """Return the source directory of shards for the view's directory `key`."""
        numbers = self.numbers(key)
        if not numbers:
            return self.shards.directory(key)
        return self.shards.directory(self._view.prefix + "/".join(map(str, self._shard(numbers))))

    def numbers(self, directory: str) -> tuple[int, ...] | None:
        """Return the chunk numbers in the key of a directory of the view.

        None for the directory "" if keys have a prefix with a directory, such as "c/".
        """
        above = split_key(self._view.prefix)[0] if self._grid.counts else ""
        if directory == above:
            return ()
        if not directory:
            return None
        return tuple(map(int, directory[len(above) + 1 if above else 0 :].split("/")))

    def shard_names(self, directory: str) -> Callable[[str, bool], tuple[int, ...] | None]:
        """Return a function from (name in the source directory, is a directory) to the numbers in it, or None."""
        numbers, head = self.numbers(directory) or (), self._head
        within = self._view.prefix + "/".join(map(str, self._shard(numbers))) if numbers else directory
        view_name = self.shards.view_names(within)

        def numbers_of(name: str, is_directory: bool) -> tuple[int, ...] | None:
            found = view_name(name, is_directory)
            if found is None:
                return None
            return tuple(map(int, found[len(head) :].split(self._view.separator))) if self._grid.counts else ()

        return numbers_of

    def inner_names(
        self, directory: str, shards: Sequence[tuple[int, ...]], after: str
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, numbers in it) of the possible entries of a directory, sorted by name, after `after`.

        `shards` are the numbers in the names of existing shards, or directories of shards, sorted. Missing shards take
        no time, however large the grid is.
        """
        depth = len(self.numbers(directory) or ())
        end = depth + len(shards[0]) if shards else depth
        sides = list(zip(self.per_shard[depth:end], self._grid.counts[depth:end], strict=True))
        head = self._head if self._grid.counts else self._view.scalar
        yield from _names(shards, sides, head, self._view.separator, after)

    def shard_of(self, numbers: tuple[int, ...], directory: str) -> tuple[int, ...]:
        """Return the numbers of the shard, or directory of shards, for the `numbers` in a name in `directory`."""
        depth = len(self.numbers(directory) or ())
        return tuple(at // per for at, per in zip(numbers, self.per_shard[depth:], strict=False))

    @property
    def _head(self) -> str:
        """The text before the first number in a name."""
        return split_key(self._view.prefix)[1]

    def _shard(self, index: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(at // per for at, per in zip(index, self.per_shard, strict=False))


def _names(
    shards: Sequence[tuple[int, ...]], sides: Sequence[tuple[int, int]], head: str, separator: str, after: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, numbers) of the inner chunks of `shards`; `sides`: by axis, inner chunks per shard and in total."""
    if not sides:
        if shards and head > after:
            yield head, ()
        return
    per_shard, count = sides[0]
    groups = itertools.groupby(shards, lambda shard: shard[0])
    below = {first: [shard[1:] for shard in group] for first, group in groups}
    for number in _numbers(sorted(below), per_shard, count, head, after):
        name = f"{head}{number}"
        if len(sides) > 1:
            inner = _names(below[number // per_shard], sides[1:], name + separator, separator, after)
            for found, numbers in inner:
                yield found, (number, *numbers)
        elif name > after:
            yield name, (number,)


def _numbers(shards: Sequence[int], per_shard: int, count: int, head: str, after: str) -> Iterator[int]:
    """Yield the numbers below `count` of the inner chunks of `shards` in the order of their text: 1, 10, 2."""

    def has(start: int, stop: int) -> bool:
        at = bisect.bisect_left(shards, start // per_shard)
        return at < len(shards) and shards[at] * per_shard < stop

    return sorted_numbers(head, "", count, after, has)
