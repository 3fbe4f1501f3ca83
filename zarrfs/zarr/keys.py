"""How chunks are called: one template covers the keys of every generation.

Source: Zarr v3 core protocol draft, "Regular grids" (prefix, separator, suffix); Zarr v2, "Chunks"; Zarr v3 core,
"Chunk key encoding"; zarr-legacy-persistence (0.4.0).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid

_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_DIGITS = frozenset("0123456789")
_DIGITS_MAX = 255  # of a number in a key: a name is no longer
# documents.DOCUMENTS, which is defined in terms of this module
_DOCUMENTS = {"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", "__zmeta__", "__zattr__", "meta", "attrs"}
Part = tuple[str | int, ...]  # one name in a key: literal text, and the axes whose numbers stand there


@dataclasses.dataclass(frozen=True)
class KeyTemplate:
    """Names of chunks, relative to the array: directory/ prefix 0 separator 0 suffix. Prefix and suffix are literal.

    "c/0/0" has the prefix "c/", "0.0.blosc" the suffix ".blosc", "c0/1" (experimental v3) the prefix "c".
    MetadataError where chunks could not be told apart by such names, or names were none.
    """

    directory: str = ""  # without "/" at its end
    prefix: str = ""
    separator: str = "."
    suffix: str = ""
    scalar: str = "0"  # the whole name of the only chunk of a 0-D array, below the directory

    def __post_init__(self) -> None:
        if not self.separator or _DIGITS & set(self.separator) or self.suffix[:1] in _DIGITS:
            raise MetadataError("chunk keys: a separator or suffix that numbers cannot be told from")
        for name in (self.prefix + "0" + self.separator + "0" + self.suffix, self.scalar):
            parts = f"{self.directory}/{name}".removeprefix("/").split("/")
            if any(part in ("", ".", "..") or "\0" in part for part in parts) or parts[0] in _DOCUMENTS:
                raise MetadataError(f"chunk keys: {name[:60]!r} is not a key")

    @classmethod
    def joined(cls, prefix: str = "", separator: str = ".", suffix: str = "") -> KeyTemplate:
        """The template of the v3 core protocol draft: prefix, indices and suffix, joined by the separator."""
        scalar = separator.join(filter(None, (prefix, suffix))) or "0"
        return cls("", prefix and prefix + separator, separator, suffix and separator + suffix, scalar)

    def key(self, index: tuple[int, ...]) -> str:
        """The key of the chunk at `index`, relative to the array."""
        name = self.prefix + self.separator.join(map(str, index)) + self.suffix if index else self.scalar
        return f"{self.directory}/{name}" if self.directory else name

    def index(self, key: str, grid: Grid) -> tuple[int, ...] | None:
        """The index of the chunk called `key`; None for what is no chunk of this grid: the strict inverse of key()."""
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

    @property
    def directories(self) -> bool:
        """Whether keys of chunks go through directories (where there is more than one dimension)."""
        return "/" in (self.directory and "/") + self.prefix + self.separator + self.suffix

    def is_directory(self, key: str, grid: Grid) -> bool:
        """Whether keys of chunks of this grid go through the directory `key` (relative to the array; "" too)."""
        return self._below(key, grid) is not None

    def children(self, directory: str, grid: Grid, after: str = "") -> Iterator[tuple[str, bool]]:
        """(name, whether a directory) of what chunks make in `directory`, sorted by name, after the name `after`.

        Streams: a million chunks take no memory. Nothing where `directory` is none of chunks.
        """
        parts = self._below(directory, grid)
        if not parts:
            return
        if not grid.size:  # the directory is there without chunks: __zdata__
            above = f"{directory}/" if directory else ""
            name = self.directory.removeprefix(above).split("/")[0] if self.directory.startswith(above) else ""
            if name > after:
                yield name, True
            return
        inner = len(parts) > 1
        for name in _names(parts[0], grid, after):
            yield name, inner

    def _below(self, key: str, grid: Grid) -> tuple[Part, ...] | None:
        """The parts of the keys of chunks in the directory `key`; None where keys go nowhere through it."""
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
def _parts(template: KeyTemplate, ndim: int) -> tuple[Part, ...]:
    """The names, one below the other, in keys of chunks with so many dimensions."""
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


def _matches(part: Part, name: str, grid: Grid) -> bool:
    """Whether `name` is one that `part` stands for: numbers inside the grid."""
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


def _names(part: Part, grid: Grid, after: str, head: str = "") -> Iterator[str]:
    """The names that begin with `head` and that `part` stands for, sorted by code points, after `after`."""
    if part and isinstance(part[0], str):
        head, part = head + part[0], part[1:]
    if not part:
        if head > after:
            yield head
        return
    axis, rest = part[0], part[1:]
    text = rest[0] if rest and isinstance(rest[0], str) else ""
    numbers = _sorted_numbers(head, text, grid.counts[int(axis)], after)
    if len(rest) <= (1 if text else 0):
        for number in numbers:
            name = f"{head}{number}{text}"
            if name > after:
                yield name
    else:
        for number in numbers:
            yield from _names(rest, grid, after, f"{head}{number}")


def _sorted_numbers(head: str, text: str, count: int, after: str) -> Iterator[int]:
    """The numbers below `count` in the order of names head + number + text...; names up to `after` are skipped.

    What is skipped are whole subtrees (12 is below 1), so that to go on in a long listing costs nothing.
    """
    first = text[:1] < "0"  # 1 comes before 12, for "1." is less than "12."
    waiting = [(number, False) for number in range(min(10, count) - 1, -1, -1)]
    while waiting:
        number, opened = waiting.pop()
        if opened:
            yield number
            continue
        name = f"{head}{number}"
        if name < after and not after.startswith(name):
            continue  # and so is every name that begins with it
        if first:
            yield number
        else:
            waiting.append((number, True))
        if number and number * 10 < count:
            stop = min(number * 10 + 10, count)
            waiting += [(inner, False) for inner in range(stop - 1, number * 10 - 1, -1)]


V0 = KeyTemplate("__zdata__", suffix=".blosc")
FLAT = KeyTemplate()  # v1, v2, and v3's encoding "v2"
NESTED = KeyTemplate(separator="/")
DEFAULT = KeyTemplate.joined("c", "/")  # of v3
DRAFT = KeyTemplate(prefix="c", separator="/", scalar="c0")  # experimental v3
