"""Chunk keys of every generation, described by one kind of template.

Source: Zarr v3 core protocol draft, "Regular grids" (prefix, separator, suffix); Zarr v2, "Chunks"; Zarr v3 core,
"Chunk key encoding"; zarr-legacy-persistence (0.4.0).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from zarrfs.zarr import DOCUMENTS
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid

_NUMBER = "(0|[1-9][0-9]{0,254})"  # no longer than file names (NAME_MAX)
_DIGITS = frozenset("0123456789")


class _Level(NamedTuple):
    """The form of one path component of chunk keys."""

    dimensions: slice  # whose numbers it contains
    texts: tuple[str, ...]  # before, between and after the numbers
    pattern: re.Pattern[str]  # with a group for each number

    def name(self, numbers: tuple[int, ...]) -> str:
        """Return the name with `numbers`."""
        return self.texts[0] + "".join(f"{number}{text}" for number, text in zip(numbers, self.texts[1:], strict=True))


@dataclasses.dataclass(frozen=True)
class KeyTemplate:
    """The form of chunk keys relative to the array: prefix, index joined by the separator, suffix.

    Prefix and suffix are literal: "c/0/0" has the prefix "c/", "__zdata__/0.0.blosc" the suffix ".blosc", "c0/1"
    (experimental v3) the prefix "c". Raises MetadataError if keys would be ambiguous, or not be valid keys of chunks.
    """

    prefix: str = ""
    separator: str = "."
    suffix: str = ""
    scalar: str = "0"  # the key of the only chunk of a 0-D array

    def __post_init__(self) -> None:
        if not self.separator or _DIGITS & set(self.separator) or self.suffix[:1] in _DIGITS:
            raise MetadataError("chunk keys: the separator is empty or has digits, or the suffix begins with one")
        for key in (self.key((0, 0)), self.scalar):
            parts = key.split("/")
            if any(part in ("", ".", "..") or "\0" in part for part in parts) or parts[0] in DOCUMENTS:
                raise MetadataError(f"chunk keys: {key[:60]!r} is not a key")

    @classmethod
    @functools.lru_cache(256)
    def joined(cls, prefix: str = "", separator: str = ".", suffix: str = "") -> KeyTemplate:
        """Make the template of the v3 core protocol draft, which joins prefix, indices and suffix by the separator."""
        scalar = separator.join(filter(None, (prefix, suffix))) or "0"
        return cls(prefix and prefix + separator, separator, suffix and separator + suffix, scalar)

    def key(self, index: tuple[int | str, ...]) -> str:
        """Return the key of the chunk at `index`, relative to the array."""
        return self.prefix + self.separator.join(map(str, index)) + self.suffix if index else self.scalar

    def index(self, key: str, grid: Grid) -> tuple[int, ...] | None:
        """Return the index of the chunk at `key`; None if the grid has no such chunk. The strict inverse of key()."""
        numbers = self.numbers(key, grid)
        return numbers if key and key.count("/") + 1 == self.depth(grid) else None

    def is_directory(self, key: str, grid: Grid) -> bool:
        """Return True if `key`, relative to the array, is a directory in the keys of chunks; also for ""."""
        return self.numbers(key, grid) is not None and (not key or key.count("/") + 1 < self.depth(grid))

    def children(self, directory: str, grid: Grid, after: str = "") -> Iterator[tuple[str, bool]]:
        """Yield (name, is a directory) of the entries of `directory` in the keys of chunks, in C order, lazily.

        `after` is one of the names, after which the listing is resumed, or "". Yield nothing if is_directory() is
        False for `directory`.
        """
        if not grid.size or not self.is_directory(directory, grid):
            return
        levels, at = _levels(self, len(grid.counts)), directory.count("/") + 1 if directory else 0
        counts = grid.counts[levels[at].dimensions]
        names, match = Grid(counts, [1] * len(counts)), levels[at].pattern.fullmatch(after)
        number = 0 if match is None else names.number_at(tuple(map(int, match.groups()))) + 1
        while number < names.size:
            yield levels[at].name(names.index(number)), at + 1 < len(levels)
            number += 1

    def depth(self, grid: Grid) -> int:
        """Return the number of path components of keys."""
        return len(_levels(self, len(grid.counts)))

    def numbers(self, path: str, grid: Grid) -> tuple[int, ...] | None:
        """Return the numbers in the key of a chunk or in its first path components; None if no chunk has such a key.

        The path "" has no numbers, also without chunks.
        """
        levels, names = _levels(self, len(grid.counts)), path.split("/") if path else []
        if len(names) > len(levels) or (names and not grid.size):
            return None
        found: list[int] = []
        for level, name in zip(levels, names, strict=False):
            match = level.pattern.fullmatch(name)
            if match is None:
                return None
            found += map(int, match.groups())
        return tuple(found) if all(map(int.__lt__, found, grid.counts)) else None

    def path(self, numbers: tuple[int, ...], depth: int, grid: Grid) -> str:
        """Return the first `depth` path components of keys, which have `numbers`: the inverse of numbers()."""
        levels = _levels(self, len(grid.counts))[:depth]
        return "/".join(level.name(numbers[level.dimensions]) for level in levels)


@functools.lru_cache(256)
def _levels(template: KeyTemplate, ndim: int) -> tuple[_Level, ...]:
    """Return the path components of the keys of an array with `ndim` dimensions."""
    found, first = [], 0
    for part in template.key(("\0",) * ndim).split("/"):
        texts = tuple(part.split("\0"))
        pattern = re.compile(_NUMBER.join(map(re.escape, texts)), re.ASCII)
        found.append(_Level(slice(first, first + len(texts) - 1), texts, pattern))
        first += len(texts) - 1
    return tuple(found)


V0 = KeyTemplate("__zdata__/", suffix=".blosc", scalar="__zdata__/0.blosc")
FLAT = KeyTemplate()  # v1, v2, and the encoding "v2" of v3
NESTED = KeyTemplate(separator="/")
DEFAULT = KeyTemplate.joined("c", "/")  # the encoding "default" of v3
DRAFT = KeyTemplate(prefix="c", separator="/", scalar="c0")  # the experimental v3
