"""Survey of a hierarchy: the metadata of every group and array, counts of existing chunks, and a map of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import trio

from zarrfs.errors import NotFound, ZarrfsError
from zarrfs.store.api import Info, Kind, Store, walk
from zarrfs.store.traversal import NOWHERE, followed, with_sizes
from zarrfs.views.hierarchy import Hierarchy, Node, raise_it
from zarrfs.zarr import DOCUMENTS, is_litter
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

ROWS, COLUMNS = 64, 128  # limits of a map, in cells
_LEVELS = 9  # levels of a cell: the lowest if none of its chunks exists, the highest if all of them exist


class ChunkMap:
    """A map of the existing chunks of a grid, of bounded size. Rows are the first dimensions, columns the last ones.

    The dimensions are split so that the map is nearly square; a single dimension is folded into rows. A cell covers
    one chunk or more; at the end of a folded map, it may cover none.
    """

    def __init__(self, grid: Grid, most: tuple[int, int] = (ROWS, COLUMNS)) -> None:
        counts = grid.counts
        self.split = 0  # the number of dimensions that make the rows; 0: the only dimension is folded
        if len(counts) > 1:
            self.split = min(range(1, len(counts)), key=lambda at: _unlike(counts[:at], counts[at:]))
            self._height, self._width = math.prod(counts[: self.split]), math.prod(counts[self.split :])
        else:
            self._width = math.isqrt(max(grid.size - 1, 0)) + 1
            self._height = -(-grid.size // self._width)
        self._size = grid.size
        self.rows, self.columns = min(self._height, most[0]), min(self._width, most[1])
        self._found = [0] * (self.rows * self.columns)

    def add(self, number: int) -> None:
        """Count chunk `number` of the grid (C order) as existing."""
        row, column = divmod(number, self._width)
        self._found[row * self.rows // self._height * self.columns + column * self.columns // self._width] += 1

    def levels(self) -> str:
        """Return a digit per cell, row by row: "0" (no chunk exists) to "8" (all exist); "-" if it covers no chunk."""
        return "".join(
            _level(self._found[row * self.columns + column], self._chunks(row, column))
            for row in range(self.rows)
            for column in range(self.columns)
        )

    def _chunks(self, row: int, column: int) -> int:
        """Return how many chunks a cell covers."""
        top, bottom = _bounds(row, self.rows, self._height)
        left, right = _bounds(column, self.columns, self._width)
        whole = (bottom - top) * (right - left)
        last = self._size - (self._height - 1) * self._width  # chunks of the last row, which is shorter if folded
        return whole - max(0, right - max(left, last)) if bottom == self._height else whole


def _unlike(rows: Sequence[int], columns: Sequence[int]) -> float:
    height, width = max(math.prod(rows), 1), max(math.prod(columns), 1)
    return abs(math.log(height) - math.log(width))


def _bounds(cell: int, cells: int, extent: int) -> tuple[int, int]:
    """Return [start, stop) of the rows or columns of chunks that a cell covers."""
    return -(-cell * extent // cells), -(-(cell + 1) * extent // cells)


def _level(found: int, chunks: int) -> str:
    if not chunks:
        return "-"
    if found in (0, chunks):
        return "0" if not found else str(_LEVELS - 1)
    return str(1 + min(found * (_LEVELS - 2) // chunks, _LEVELS - 3))


def packed(levels: str) -> str:
    """Run-length encode digits as DIGIT or DIGITxCOUNT, separated by spaces."""
    found: list[str] = []
    start = 0
    for at in range(1, len(levels) + 1):
        if at == len(levels) or levels[at] != levels[start]:
            found.append(levels[start] if at - start == 1 else f"{levels[start]}x{at - start}")
            start = at
    return " ".join(found)


_AT_ONCE = 16  # arrays whose chunks are counted concurrently
_SIZES = 64  # concurrent requests for sizes, per array


@dataclasses.dataclass
class ChunkStatistics:
    """The counts of an array's existing chunks, updated while they are listed."""

    initialised: int = 0
    stored: int = 0  # bytes of these chunks
    outside: int = 0  # files that are neither a chunk of the grid nor metadata
    unknown: int = 0  # chunks whose size is not known
    problem: str | None = None  # why there may be more chunks than were counted
    map: ChunkMap | None = None


@dataclasses.dataclass
class NodeInfo:
    """A group or array. `chunks` is None for a group, and for an array that was not counted."""

    node: Node
    chunks: ChunkStatistics | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the node, ready for JSON. Sizes are in bytes; null means not known."""
        node, metadata = self.node, self.node.metadata
        about: dict[str, Any] = {"path": node.path, "type": "array" if node.childless else "group"}
        if metadata is None:
            return about | {"problem": node.problem}
        implied = isinstance(metadata, GroupMetadata) and metadata.implied
        about["generation"] = None if implied else metadata.generation
        if isinstance(metadata, ArrayMetadata):
            about |= _of_array(metadata)
            if self.chunks is not None:
                about |= _of_chunks(metadata, self.chunks)
        return about


@dataclasses.dataclass
class Survey:
    """All nodes of a hierarchy, groups before their members; updated while it is walked."""

    nodes: list[NodeInfo] = dataclasses.field(default_factory=list)
    files: int = 0  # chunks that were counted
    bytes: int = 0
    expected_files: int | None = None
    expected_bytes: int | None = None


async def survey(store: Store, found: Survey, key: str = "", count: bool = True, maps: bool = False) -> None:
    """Add every node at or below `key` to `found`; with `count`, list and count chunks; with `maps`, map them.

    `found` has no nodes afterwards if no directory has a metadata document.
    """
    limit = trio.CapacityLimiter(_AT_ONCE)

    async def one(facts: NodeInfo, array: ArrayMetadata, chunks: ChunkStatistics) -> None:
        async with limit:
            await _count(store, facts.node, array, chunks, found)

    async with trio.open_nursery() as nursery:
        async for node in nodes_of(store, Hierarchy(store), key):
            facts = NodeInfo(node)
            found.nodes.append(facts)
            if count and isinstance(node.metadata, ArrayMetadata):
                facts.chunks = ChunkStatistics(map=ChunkMap(node.metadata.grid) if maps else None)
                nursery.start_soon(one, facts, node.metadata, facts.chunks)
    if not any(facts.node.documents for facts in found.nodes):
        found.nodes.clear()


async def nodes_of(
    store: Store, hierarchy: Hierarchy, key: str, failed: Callable[[Exception], None] = raise_it
) -> AsyncIterator[Node]:
    """Yield the nodes of `store` at or below `key`, as Hierarchy.walk().

    Leave out those behind symbolic links, which have another path, too, and dangling links, which may have nothing to
    do with Zarr.
    """
    async for node in hierarchy.walk(key, failed=failed):
        if node.problem == NOWHERE:
            continue
        with suppress(NotFound):  # a node of the draft of v3 has no directory of its own
            if await followed(store, node.path) != node.path:
                continue
        yield node


async def files_of(store: Store, node: Node, chunks: ChunkStatistics) -> AsyncIterator[tuple[str, Info]]:
    """Yield (key relative to the array, entry) of every file of an array except metadata and litter.

    At the end set `chunks.problem` if a directory could not be listed.
    """
    prefix, failed = node.chunks, []
    above = len(prefix) + 1 if prefix else 0

    def keep(key: str, exc: Exception) -> None:
        failed.append(f"{key or '/'}: {exc}")

    async for key, info in walk(store, prefix, keep):
        if info.kind is Kind.FILE and key not in node.documents and not is_litter(info.name):
            yield key[above:], info
    chunks.problem = failed[0] if failed else None


async def _count(store: Store, node: Node, array: ArrayMetadata, chunks: ChunkStatistics, total: Survey) -> None:
    def unknown(key: str, exc: Exception) -> None:
        chunks.unknown += 1

    async def there() -> AsyncIterator[tuple[str, Info]]:
        async for key, info in files_of(store, node, chunks):
            index = array.keys.index(key, array.grid)
            if index is None:
                chunks.outside += key not in DOCUMENTS
                continue
            chunks.initialised += 1
            total.files += 1
            if chunks.map is not None:
                chunks.map.add(array.grid.number_at(index))
            yield f"{node.chunks}/{key}" if node.chunks else key, info

    try:
        async for _key, info in with_sizes(store, there(), _SIZES, unknown):
            chunks.stored += info.size or 0
            total.bytes += info.size or 0
    except (ZarrfsError, OSError) as exc:
        chunks.problem = str(exc)


def logical_bytes(array: ArrayMetadata) -> int | None:
    """Return the size of the decoded array in bytes; None if its items have no fixed size."""
    return math.prod(array.shape) * array.dtype.itemsize if array.dtype.itemsize else None


def inner_chunks(array: ArrayMetadata) -> list[int] | None:
    """Return the shape of the chunks inside the shards of an array; None without sharding."""
    for codec in array.codecs:
        if codec.shards:
            return list(codec.shards.inner_shape)
    return None


def _of_array(array: ArrayMetadata) -> dict[str, Any]:
    about = {
        "shape": list(array.shape),
        "dtype": array.dtype.text,
        "chunks": list(array.grid.chunks),
        "codecs": [{"name": spec.name, "configuration": dict(spec.configuration)} for spec in array.codecs],
        "logical_bytes": logical_bytes(array),
        "grid": list(array.grid.counts),
        "chunks_total": array.grid.size,
    }
    inner = inner_chunks(array)
    return about if inner is None else about | {"inner_chunks": inner}


def _of_chunks(array: ArrayMetadata, chunks: ChunkStatistics) -> dict[str, Any]:
    logical = logical_bytes(array)
    stored = None if chunks.unknown else chunks.stored
    about: dict[str, Any] = {
        "chunks_initialised": chunks.initialised,
        "initialised": chunks.initialised / array.grid.size if array.grid.size else None,
        "stored_bytes": stored,
        "ratio": logical / stored if logical is not None and stored else None,
        "outside_grid": chunks.outside,
        "problem": chunks.problem,
    }
    if chunks.map is not None:
        about["map"] = {
            "rows": chunks.map.rows, "columns": chunks.map.columns, "row_dimensions": chunks.map.split,
            "cells": packed(chunks.map.levels()),
        }  # fmt: skip
    return about
