"""The `.zmetadata` of a reference set in the Parquet layout, and the tree that it describes.

Source: fsspec's LazyReferenceMapper, which writes and reads the layout; there is no other specification of it.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any, NamedTuple

from zarrfs.errors import SourceError
from zarrfs.references.keys import printable, set_key_rule
from zarrfs.store.api import Kind, split_key
from zarrfs.zarr.grid import Grid, one_for_empty

DOCUMENT = ".zmetadata"
RECORD_SIZE = b'"record_size"'  # distinguishes a set's document from a Zarr store's
RECORD_SIZE_MAX = 2**31 - 1  # rows of a record file, which is read as a whole
_REPORTED_MAX = 20  # problems that are reported as warnings; more are only counted
json_text = json.JSONEncoder(separators=(",", ":")).encode


class Bound(NamedTuple):
    """A limit in bytes, and the option that sets it, if there is one."""

    size: int
    option: str = ""

    def __str__(self) -> str:
        return f"more than {self.size} bytes" + (f" (-o {self.option}=)" if self.option else "")


def is_parquet_layout(document: bytes) -> bool:
    """Return whether a `.zmetadata` belongs to the layout; that of a Zarr store has no record_size."""
    if RECORD_SIZE not in document:  # parsing large consolidated metadata takes seconds
        return False
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "record_size" in found


def check_package(source: str) -> None:
    """Raise SourceError if pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        rule = "the Parquet layout needs the package pyarrow: it comes with zarrfs's extra parquet (docs/install.md)"
        raise SourceError(source, rule)


class ParquetSet:
    """The contents of `.zmetadata`: directories, the documents in them, and the grids of the arrays."""

    def __init__(self, document: bytes, metadata: dict[str, Any], record_size: int) -> None:
        self.document, self.record_size = document, record_size
        self.problems: list[tuple[str, str]] = []  # (printable entry, rule)
        self.grids: dict[str, Grid | None] = {}  # by array; None if the grid is unknown
        self.broken: dict[str, str] = {}  # by array: why its grid is None
        self._metadata: dict[str, Any] = {}  # parsed JSON, or its bytes once text() was called
        self._children: dict[str, dict[str, Kind]] = {"": {DOCUMENT: Kind.FILE}}
        for key, value in metadata.items():
            if key == DOCUMENT:
                continue  # fsspec returns the file itself
            rule = set_key_rule(key)
            if rule:
                self._add_problem(key, f"not a key: {rule}: left out")
                continue
            self._metadata[key] = value
            self._add_directory(split_key(key)[0])
        for key in [key for key in self._metadata if key in self._children]:
            self._add_problem(key, "is a file and a directory: the file is left out")
            del self._metadata[key]
        for key, value in self._metadata.items():
            prefix, name = split_key(key)
            self._children[prefix][name] = Kind.FILE
            if name == ".zarray":
                self._add_array(prefix, key, value)
        for prefix, names in self._children.items():
            self._children[prefix] = dict(sorted(names.items()))

    def is_directory(self, key: str) -> bool:
        """Return whether `key` is a directory."""
        return key in self._children

    def children(self, prefix: str) -> dict[str, Kind]:
        """Return the documents and directories in the directory `prefix`, without chunks, sorted by name."""
        return self._children[prefix]

    def text(self, key: str) -> bytes | None:
        """Return the bytes of the document `key`; None if there is none."""
        if key == DOCUMENT:
            return self.document
        value = self._metadata.get(key, self)
        if value is self:
            return None
        if not isinstance(value, bytes):
            value = self._metadata[key] = json_text(value).encode()
        return value

    def directory_above(self, key: str) -> tuple[str, str]:
        """Return (the nearest directory above `key`, the rest of the key)."""
        prefix = split_key(key)[0]
        while prefix not in self._children:
            prefix = split_key(prefix)[0]
        return prefix, key[len(prefix) + 1 :] if prefix else key

    def documents(self) -> int:
        """Return the number of documents."""
        return len(self._metadata) + 1

    def reported_warnings(self) -> tuple[str, ...]:
        """Return the problems as warnings, with a count of those that are not listed."""
        more = len(self.problems) - _REPORTED_MAX
        warnings = [f"{entry}: {rule}" for entry, rule in self.problems[:_REPORTED_MAX]]
        return (*warnings, f"{more} more problems: see zarrfs check") if more > 0 else tuple(warnings)

    def _add_directory(self, prefix: str) -> None:
        while prefix not in self._children:
            self._children[prefix] = {}
            parent, name = split_key(prefix)
            self._add_directory(parent)
            self._children[parent][name] = Kind.DIRECTORY
            prefix = parent

    def _add_array(self, prefix: str, key: str, value: object) -> None:
        try:
            self.grids[prefix] = grid_of(value)
        except ValueError as exc:
            self.grids[prefix] = None
            self.broken[prefix] = f"{exc}: the array's chunks cannot be read"
            self._add_problem(key, self.broken[prefix])

    def _add_problem(self, key: str, rule: str) -> None:
        self.problems.append((printable(key), rule))


def grid_of(value: object) -> Grid:
    """Return the grid of a `.zarray`. Raise ValueError, with the reason, if the layout cannot hold its chunks."""
    if not isinstance(value, dict):
        raise ValueError("expected an object")  # noqa: TRY004
    for name in ("shape", "chunks"):
        if name not in value:
            raise ValueError(f"no {name}")
    grid = Grid(value["shape"], one_for_empty(value["shape"], value["chunks"]))
    separator = value.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise ValueError('dimension_separator: expected "." or "/"')
    if separator == "/" and len(grid.counts) > 1:
        raise ValueError('dimension_separator: the Parquet layout has chunk names with ".", not "/"')
    return grid


def read_set(source: str, document: bytes) -> ParquetSet:
    """Parse the `.zmetadata` called `source`. Raise SourceError if it is not that of a reference set."""
    try:
        found = json.loads(document)
    except RecursionError:
        raise SourceError(source, "not JSON: nested too deeply") from None
    except ValueError as exc:
        raise SourceError(source, f"not JSON: {exc}") from None
    if not isinstance(found, dict):
        raise SourceError(source, "expected a JSON object")
    metadata, record_size = found.get("metadata"), found.get("record_size")
    if not isinstance(metadata, dict):
        raise SourceError(source, "expected an object" if "metadata" in found else "missing", "metadata")
    if type(record_size) is not int or not 1 <= record_size <= RECORD_SIZE_MAX:
        rule = f"expected a whole number from 1 to {RECORD_SIZE_MAX}" if "record_size" in found else "missing"
        raise SourceError(source, rule, "record_size")
    return ParquetSet(document, metadata, record_size)
