"""The Zarr arrays in a reference set: how many chunks each should have, and how many it has."""

from __future__ import annotations

from typing import Any

from zarrfs.errors import StoreError
from zarrfs.store.api import Store, join_key
from zarrfs.zarr.documents import NODE_DOCUMENTS, parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata, nested

_TAILS_MAX = 1 << 17  # chunks along the last dimension whose names are kept


class Array:
    """One array: its grid, and how many of its chunks have been seen."""

    def __init__(self, key: str, grid: Grid, keys: KeyTemplate, other: KeyTemplate | None = None) -> None:
        """`other`: how chunks may be called too, where the metadata leaves that open."""
        self.key, self.grid, self.present = key, grid, 0
        self._templates = (keys,) if other is None else (keys, other)
        self._separator = keys.separator
        last = grid.counts[-1] if grid.counts and not keys.suffix else _TAILS_MAX + 1
        self._tails = {str(number) for number in range(last)} if last <= _TAILS_MAX else None
        self._above: str | None = None  # of the last chunk: neighbours share it

    @property
    def missing(self) -> int:
        """How many chunks are not there: readers see the fill value."""
        return self.grid.size - self.present

    def see(self, name: str) -> None:
        """Count `name`, a key below the array, if it is a chunk."""
        above, _, tail = name.rpartition(self._separator)
        if above == self._above and self._tails is not None:
            self.present += tail in self._tails
            return
        for keys in self._templates:
            if keys.index(name, self.grid) is not None:
                self.present, self._separator = self.present + 1, keys.separator
                self._above = name.rpartition(keys.separator)[0]
                return

    def as_json(self) -> dict[str, Any]:
        """The counts, ready for JSON."""
        return {"key": self.key, "expected": self.grid.size, "present": self.present, "missing": self.missing}


async def find_array(store: Store, directory: str) -> Array | None:
    """The array at `directory`, as inline metadata describes it; None where there is none, or no regular grid."""
    for name in NODE_DOCUMENTS:
        key = join_key(directory, name)
        try:
            if "inline" not in await store.locate(key):
                continue  # to fetch it is not what counting is for
            found = parse_node(name, await store.get(key))
        except (StoreError, MetadataError):
            continue
        if isinstance(found, ArrayMetadata):
            return Array(directory, found.grid, found.keys, nested(found))
    return None
