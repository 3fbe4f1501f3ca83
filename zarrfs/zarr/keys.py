"""Chunk keys of every generation, described by one kind of template.

Source: Zarr v3 core protocol draft, "Regular grids" (prefix, separator, suffix); Zarr v2, "Chunks"; Zarr v3 core,
"Chunk key encoding"; zarr-legacy-persistence (0.4.0).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

from zarrfs.zarr import DOCUMENTS
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid

_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_DIGITS = frozenset("0123456789")
_DIGITS_MAX = 255  # of a number in a key: the limit of file names (NAME_MAX)
_Part = tuple[str | int, ...]  # one path component of a key: literal text, and axes (as int) whose index is inserted


@dataclasses.dataclass(frozen=True)
class KeyTemplate:
    """The form of chunk keys relative to the array: directory, "/", prefix, index joined by the separator, suffix.

    Prefix and suffix are literal: "c/0/0" has the prefix "c/", "0.0.blosc" the suffix ".blosc", "c0/1" (experimental
    v3) the prefix "c". Raises MetadataError if keys would be ambiguous, or would not be valid keys of chunks.
    """

    directory: str = ""  # without a trailing "/"
    prefix: str = ""
    separator: str = "."
    suffix: str = ""
    scalar: str = "0"  # the name of the only chunk of a 0-D array, below the directory

    def __post_init__(self) -> None:
        if not self.separator or _DIGITS & set(self.separator) or self.suffix[:1] in _DIGITS:
            raise MetadataError("chunk keys: the separator is empty or has digits, or the suffix begins with one")
        for name in (self.prefix + "0" + self.separator + "0" + self.suffix, self.scalar):
            parts = f"{self.directory}/{name}".removeprefix("/").split("/")
            if any(part in ("", ".", "..") or "\0" in part for part in parts) or parts[0] in DOCUMENTS:
                raise MetadataError(f"chunk keys: {name[:60]!r} is not a key")

    @classmethod
    def joined(cls, prefix: str = "", separator: str = ".", suffix: str = "") -> KeyTemplate:
        """Make the template of the v3 core protocol draft, which joins prefix, indices and suffix by the separator."""
        scalar = separator.join(filter(None, (prefix, suffix))) or "0"
        return cls("", prefix and prefix + separator, separator, suffix and separator + suffix, scalar)

    def key(self, index: tuple[int, ...]) -> str:
        """Return the key of the chunk at `index`, relative to the array."""
        name = self.prefix + self.separator.join(map(str, index)) + self.suffix if index else self.scalar
        return f"{self.directory}/{name}" if self.directory else name

    def index(self, key: str, grid: Grid) -> tuple[int, ...] | None:
        """Return the index of the chunk at `key`; None if the grid has no such chunk. The strict inverse of key()."""
        if self.directory:
            directory, key = key[: len(self.directory) + 1], key[len(self.directory) + 1 :]
            if directory != self.directory + "/":
                return None
        if not grid.counts:
            return () if key == self.scalar else None
        start, stop = len(self.prefix), len(key) - len(self.suffix)
        if stop <= start or not key.startswith(self.prefix) or not key.endswith(self.suffix):
            return None
        numbers = key[start:stop].split(self.separator)
        if len(numbers) != len(grid.counts):
            return None
        found = []
        for digits, count in zip(numbers, grid.counts, strict=True):
            if len(digits) > _DIGITS_MAX or not _NUMBER.fullmatch(digits):
                return None
            number = int(digits)
            if number >= count:
                return None
            found.append(number)
        return tuple(found)

    def is_directory(self, key: str, grid: Grid) -> bool:
        """Return True if `key`, relative to the array, is a directory in the keys of chunks; also for ""."""
        return self._below(key, grid) is not None

    def children(self, directory: str, grid: Grid, after: str = "") -> Iterator[tuple[str, bool]]:
        """Yield (name, is a directory) of the entries of `directory` in the keys of chunks, sorted, after `after`.

        Entries are generated one by one, so that a million chunks need no memory. Yield nothing if is_directory() is
        False for `directory`.
        """
        parts = self._below(directory, grid)
        if not parts:
            return
        if not grid.size:  # the directory of the template, such as __zdata__, exists without chunks, too
            above = f"{directory}/" if directory else ""
            name = self.directory.removeprefix(above).split("/")[0] if self.directory.startswith(above) else ""
            if name > after:
                yield name, True
            return
        inner = len(parts) > 1
        for name in _names(parts[0], grid, after):
            yield name, inner

    def _below(self, key: str, grid: Grid) -> tuple[_Part, ...] | None:
        """Return the path components of chunk keys below the directory `key`; None if it is no such directory."""
        parts = _parts(self, len(grid.counts))
        if not key:
            return parts
        names = key.split("/")
        depth = self.directory.count("/") + 1 if self.directory else 0
        if len(names) >= len(parts) or (len(names) > depth and not grid.size):
            return None
        if all(_matches(part, name, grid) for part, name in zip(parts, names, strict=False)):
            return parts[len(names) :]
        return None


@functools.lru_cache(256)
def _parts(template: KeyTemplate, ndim: int) -> tuple[_Part, ...]:
    """Return the path components of the keys of an array with `ndim` dimensions."""
    tokens: list[str | int] = [template.directory + "/" if template.directory else ""]
    if ndim:
        tokens.append(template.prefix)
        for axis in range(ndim):
            tokens += [template.separator, axis] if axis else [axis]
        tokens.append(template.suffix)
    else:
        tokens.append(template.scalar)
    parts: list[list[str | int]] = [[]]
    for token in tokens:
        if isinstance(token, int):
            parts[-1].append(token)
            continue
        for number, text in enumerate(token.split("/")):
            if number:
                parts.append([])
            if text and parts[-1] and isinstance(parts[-1][-1], str):
                parts[-1][-1] += text
            elif text:
                parts[-1].append(text)
    return tuple(map(tuple, parts))


def _matches(part: _Part, name: str, grid: Grid) -> bool:
    """Return True if `name` has the form of `part`, with numbers inside the grid."""
    at = 0
    for token in part:
        if isinstance(token, str):
            if not name.startswith(token, at):
                return False
            at += len(token)
            continue
        match = _NUMBER.match(name, at)
        if match is None or match.end() - at > _DIGITS_MAX or int(match[0]) >= grid.counts[token]:
            return False
        at = match.end()
    return at == len(name)


def _names(part: _Part, grid: Grid, after: str, head: str = "") -> Iterator[str]:
    """Yield the names of the form `head` + `part` that sort after `after`, in code point order."""
    if part and isinstance(part[0], str):
        head, part = head + part[0], part[1:]
    if not part:
        if head > after:
            yield head
        return
    axis, rest = part[0], part[1:]
    text = rest[0] if rest and isinstance(rest[0], str) else ""
    numbers = sorted_numbers(head, text, grid.counts[int(axis)], after)
    if len(rest) <= (1 if text else 0):
        for number in numbers:
            name = f"{head}{number}{text}"
            if name > after:
                yield name
    else:
        for number in numbers:
            yield from _names(rest, grid, after, f"{head}{number}")


def sorted_numbers(
    head: str, text: str, count: int, after: str, has: Callable[[int, int], bool] | None = None
) -> Iterator[int]:
    """Yield the numbers below `count`, sorted by the names head + number + text..., that follow `after`.

    The numbers are walked as a tree (12 is a child of 1). A subtree whose names all sort before `after` is skipped, so
    that resuming a long listing is cheap; a few earlier numbers remain, and the caller has to compare their names. A
    subtree without wanted numbers is skipped, too: has(start, stop) returns whether a number in [start, stop) is
    wanted. None means that all are.
    """

    def wanted(number: int) -> bool:  # whether `number`, or a number that begins with its digits, is wanted
        assert has is not None
        start, stop = number, number + 1
        while start < count:
            if has(start, stop):
                return True
            if not number:
                return False
            start, stop = start * 10, stop * 10
        return False

    parent_first = text[:1] < "0"  # 1 precedes 12 because "1." < "12."
    stack = [(number, False) for number in range(min(10, count) - 1, -1, -1)]
    while stack:
        number, children_done = stack.pop()
        if children_done:
            yield number
            continue
        name = f"{head}{number}"
        if name < after and not after.startswith(name):
            continue  # every name that begins with `name` is less than `after`, too
        if has is not None and not wanted(number):
            continue
        if has is None or has(number, number + 1):
            if parent_first:
                yield number
            else:
                stack.append((number, True))
        if number and number * 10 < count:
            stop = min(number * 10 + 10, count)
            stack += [(child, False) for child in range(stop - 1, number * 10 - 1, -1)]


V0 = KeyTemplate("__zdata__", suffix=".blosc")
FLAT = KeyTemplate()  # v1, v2, and the encoding "v2" of v3
NESTED = KeyTemplate(separator="/")
DEFAULT = KeyTemplate.joined("c", "/")  # the encoding "default" of v3
DRAFT = KeyTemplate(prefix="c", separator="/", scalar="c0")  # the experimental v3
