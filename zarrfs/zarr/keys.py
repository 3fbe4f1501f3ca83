"""How chunks are called: one template covers the keys of every generation.

Source: Zarr v3 core protocol draft, "Regular grids" (prefix, separator, suffix); Zarr v2, "Chunks"; Zarr v3 core,
"Chunk key encoding"; zarr-legacy-persistence (0.4.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from zarrfs.zarr.grid import Grid
from zarrfs.zarr.model import ArrayMetadata


@dataclasses.dataclass(frozen=True)
class KeyTemplate:
    """Names of chunks, relative to the array: directory/ prefix 0 separator 0 suffix. Prefix and suffix are literal.

    "c/0/0" has the prefix "c/", "0.0.blosc" the suffix ".blosc", "c0/1" (experimental v3) the prefix "c".
    """

    directory: str = ""  # without "/" at its end
    prefix: str = ""
    separator: str = "."
    suffix: str = ""
    scalar: str = "0"  # the whole name of the only chunk of a 0-D array, below the directory

    def key(self, index: tuple[int, ...]) -> str:
        """The key of the chunk at `index`, relative to the array."""
        raise NotImplementedError

    def index(self, key: str, grid: Grid) -> tuple[int, ...] | None:
        """The index of the chunk called `key`; None for what is no chunk of this grid: the strict inverse of key()."""
        raise NotImplementedError

    @property
    def directories(self) -> bool:
        """Whether keys of chunks go through directories."""
        raise NotImplementedError

    def is_directory(self, key: str, grid: Grid) -> bool:
        """Whether keys of chunks of this grid go through the directory `key` (relative to the array; "" too)."""
        raise NotImplementedError

    def children(self, directory: str, grid: Grid, after: str = "") -> Iterator[tuple[str, bool]]:
        """(name, whether a directory) of what chunks make in `directory`, sorted by name, after the name `after`.

        Streams: a million chunks take no memory. Nothing where `directory` is none of chunks.
        """
        raise NotImplementedError


def nested(array: ArrayMetadata) -> KeyTemplate | None:
    """The other way in which chunks of `array` may be called ("0/0"), where its document leaves that open.

    None where the document says it, or both are the same. Who can look at names decides: old stores nest.
    """
    raise NotImplementedError
