"""The Zarr arrays in a reference set: how many chunks each should have, and how many it has.

Source: Zarr v2 specification (`.zarray`, dimension_separator); Zarr v3 core (regular grid, chunk key encodings).
"""

from __future__ import annotations

import json
from typing import Any

from zarrfs.errors import StoreError
from zarrfs.store.api import ReferenceStore, join_key
from zarrfs.zarr.grid import Grid

_TAILS_MAX = 1 << 17  # chunks along the last dimension whose names are kept


class Array:
    """One array: its grid, and how many of its chunks have been seen."""

    def __init__(self, key: str, grid: Grid, separator: str, lead: str = "") -> None:
        """`lead` is what chunk names begin with: "c" in Zarr v3."""
        self.key, self.grid, self.present = key, grid, 0
        self._separator, self._lead = separator, lead + separator if lead and grid.counts else lead
        last = grid.counts[-1] if grid.counts else 0
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
        elif self._number(name) is not None:
            self.present, self._above = self.present + 1, above

    def as_json(self) -> dict[str, Any]:
        """The counts, ready for JSON."""
        return {"key": self.key, "expected": self.grid.size, "present": self.present, "missing": self.missing}

    def _number(self, name: str) -> int | None:
        if self._lead:
            if not self.grid.counts:
                return 0 if name == self._lead else None
            if not name.startswith(self._lead):
                return None
            name = name[len(self._lead) :]
        if self._separator == "/":
            name = "" if "." in name else name.replace("/", ".")
        return self.grid.number(name)


async def find_array(store: ReferenceStore, directory: str) -> Array | None:
    """The array at `directory`, as inline metadata describes it; None where there is none, or no regular grid."""
    for name, read in ((".zarray", _read_v2), ("zarr.json", _read_v3)):
        key = join_key(directory, name)
        try:
            if "inline" not in await store.locate(key):
                continue  # to fetch it is not what counting is for
            document = json.loads(bytes(await store.get(key)))
            return read(directory, document)
        except (StoreError, ValueError, TypeError, KeyError, RecursionError):
            continue
    return None


def _read_v2(key: str, document: dict[str, Any]) -> Array:
    separator = document.get("dimension_separator") or "."
    if separator not in (".", "/"):
        raise ValueError("dimension_separator")
    return Array(key, Grid(document["shape"], document["chunks"]), separator)


def _read_v3(key: str, document: dict[str, Any]) -> Array:
    grid = document["chunk_grid"]
    if grid["name"] != "regular":
        raise ValueError("chunk_grid")
    encoding = document.get("chunk_key_encoding") or {"name": "default"}
    usual, lead = ("/", "c") if encoding["name"] == "default" else (".", "")
    separator = (encoding.get("configuration") or {}).get("separator", usual)
    if separator not in (".", "/") or encoding["name"] not in ("default", "v2"):
        raise ValueError("chunk_key_encoding")
    return Array(key, Grid(document["shape"], grid["configuration"]["chunk_shape"]), separator, lead)
