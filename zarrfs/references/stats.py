"""Statistics of a reference set: entries, bytes, targets, holes and overlaps, chunks of arrays.

Each reference takes 24 bytes of memory, and the number of URLs kept is bounded: ten million references take about
800 MB. A target is identified by a 64-bit hash of its URL: with ten million targets, two have the same hash in one of
400,000 runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zarrfs.config.redaction import without_secrets
from zarrfs.errors import StoreError
from zarrfs.store.api import Reference, Store, join_key
from zarrfs.zarr import NODE_DOCUMENTS
from zarrfs.zarr.documents import parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata, nested

_BATCH = 65_536  # references converted to arrays at a time
_NAMES = 65_536  # URLs kept in memory; a second pass finds others that are needed
_TAILS_MAX = 1 << 17  # chunks along the last dimension; with more, their names are not kept in a set

Numbers = npt.NDArray[np.int64]


class Sized(NamedTuple):
    """A reference and its length in bytes."""

    key: str
    length: int


class TargetCounts(NamedTuple):
    """The references to one target; `bytes` counts ranges only."""

    url: str
    references: int
    bytes: int


class ArrayCounts:
    """One Zarr array of the set: its grid, and the number of its chunks that were seen."""

    def __init__(self, key: str, grid: Grid, keys: KeyTemplate, other: KeyTemplate | None = None) -> None:
        """Start with no chunks seen. `other`: a second form of chunk names, if the metadata allows two."""
        self.key, self.grid, self.present = key, grid, 0
        self._templates = (keys,) if other is None else (keys, other)
        self._separator = keys.separator
        last = grid.counts[-1] if grid.counts and not keys.suffix else _TAILS_MAX + 1
        self._tails = {str(number) for number in range(last)} if last <= _TAILS_MAX else None
        self._above: str | None = None  # the name of the last chunk without its last index: neighbours share it

    @property
    def missing(self) -> int:
        """The number of absent chunks, for which readers get the fill value."""
        return self.grid.size - self.present

    def see(self, name: str) -> None:
        """Count `name`, the path of a key below the array, if it is the name of a chunk."""
        above, _, tail = name.rpartition(self._separator)
        if above == self._above and self._tails is not None:
            self.present += tail in self._tails
            return
        for keys in self._templates:
            if keys.index(name, self.grid) is not None:
                self.present, self._separator = self.present + 1, keys.separator
                self._above = name.rpartition(keys.separator)[0]
                return

    def leave(self) -> None:
        """Free the memory of see(), after the last name of the array."""
        self._tails = None

    def as_json(self) -> dict[str, Any]:
        """Return the counts as a dict for JSON."""
        return {"key": self.key, "expected": self.grid.size, "present": self.present, "missing": self.missing}


@dataclasses.dataclass
class Stats:
    """The statistics of a set; sizes are in bytes."""

    files: int = 0
    directories: int = 0
    inline: int = 0
    inline_bytes: int = 0
    ranges: int = 0  # references to a range of a target
    range_bytes: int = 0  # their lengths, added up
    whole: int = 0  # references to a whole target, whose size is not in the set
    targets: int = 0
    holes: int = 0  # bytes between a target's first and last referenced byte that no range covers
    overlaps: int = 0  # bytes that more than one range covers
    largest: Sized | None = None
    smallest: Sized | None = None
    top_by_bytes: list[TargetCounts] = dataclasses.field(default_factory=list)
    top_by_references: list[TargetCounts] = dataclasses.field(default_factory=list)
    arrays: list[ArrayCounts] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as a dict for JSON."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in found.items():
            if isinstance(value, list):
                found[name] = [one.as_json() if isinstance(one, ArrayCounts) else one._asdict() for one in value]
            elif isinstance(value, Sized):
                found[name] = value._asdict()
        return found


async def statistics(
    store: Store,
    top: int = 10,
    watched: Callable[[AsyncIterator[Reference]], AsyncIterator[Reference]] = lambda references: references,
) -> Stats:
    """Return statistics of a set. `watched` may wrap its references to show progress. Raise as store.references()."""
    stats, columns, tree = Stats(), _Columns(), _Tree(store)
    async for key, data, url, offset, length in watched(store.references()):
        parent, _, name = key.rpartition("/")
        if parent != tree.at:
            await tree.enter(parent)
        if tree.array is not None:
            tree.array.see(tree.below + name)
        if data is not None:
            stats.inline += 1
            stats.inline_bytes += len(data)
        elif length is None:
            columns.whole(url)
        else:
            columns.range(key, url, offset, length)
    columns.flush()
    stats.directories, stats.arrays = tree.directories, tree.arrays
    stats.ranges, stats.whole = columns.ranges, columns.wholes
    stats.files = stats.inline + stats.ranges + stats.whole
    stats.largest, stats.smallest = columns.largest, columns.smallest
    stats.targets, by_bytes, by_references = _count_targets(stats, columns, top)
    names = await _names(store, columns.names, {one.target for one in (*by_bytes, *by_references)})
    names = {target: without_secrets(url) for target, url in names.items()}
    stats.top_by_bytes = [TargetCounts(names[one.target], one.references, one.bytes) for one in by_bytes]
    stats.top_by_bytes.sort(key=lambda target: (-target.bytes, target.url))
    stats.top_by_references = [TargetCounts(names[one.target], one.references, one.bytes) for one in by_references]
    stats.top_by_references.sort(key=lambda target: (-target.references, target.url))
    return stats


class _Counted(NamedTuple):
    """TargetCounts with the hash of the URL in place of the URL."""

    target: int
    references: int
    bytes: int


class _Tree:
    """The current position in the tree of keys; enter() is called in the order of the tree."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.at: str | None = None  # the current directory
        self.directories = 0
        self.arrays: list[ArrayCounts] = []
        self.array: ArrayCounts | None = None  # the array that `at` belongs to
        self.below = ""  # the path from the array to `at`, with a trailing "/"

    async def enter(self, directory: str) -> None:
        """Move to `directory`, and count the directories not seen before."""
        last, self.at = self.at, directory
        parts, before = directory.split("/") if directory else [], last.split("/") if last else []
        common = 0
        while common < min(len(parts), len(before)) and parts[common] == before[common]:
            common += 1
        self.directories += len(parts) - common
        if self.array is not None and not f"{directory}/".startswith(f"{self.array.key}/" if self.array.key else ""):
            self.array.leave()
            self.array = None
        if last is None:
            self._found(await _find_array(self._store, ""))
        for depth in range(common + 1, len(parts) + 1):
            if self.array is None:
                self._found(await _find_array(self._store, "/".join(parts[:depth])))
        if self.array is not None:
            way = directory[len(self.array.key) :].strip("/")
            self.below = f"{way}/" if way else ""

    def _found(self, array: ArrayCounts | None) -> None:
        if array is not None:
            self.array = array
            self.arrays.append(array)


async def _find_array(store: Store, directory: str) -> ArrayCounts | None:
    """Return the array at `directory`; None if there is none with valid inline metadata and a regular grid."""
    for name in NODE_DOCUMENTS:
        key = join_key(directory, name)
        try:
            if "inline" not in await store.locate(key):
                continue  # counting must not fetch from targets
            found = parse_node(name, await store.get(key))
        except (StoreError, MetadataError):
            continue
        if isinstance(found, ArrayMetadata):
            return ArrayCounts(directory, found.grid, found.keys, nested(found))
    return None


class _Columns:
    """The references as columns of numbers: hash of the URL, offset, length."""

    def __init__(self) -> None:
        self.ranges = self.wholes = 0
        self.largest: Sized | None = None
        self.smallest: Sized | None = None
        self.names: dict[int, str] = {}
        self._keys: list[str] = []
        self._pending: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._done: tuple[list[Numbers], list[Numbers], list[Numbers]] = ([], [], [])
        self._whole: list[int] = []
        self._wholes: list[Numbers] = []

    def range(self, key: str, url: str, offset: int, length: int) -> None:
        """Add a reference to a range."""
        target = hash(url)
        if target not in self.names and len(self.names) < _NAMES:
            self.names[target] = url
        targets, offsets, lengths = self._pending
        targets.append(target)
        offsets.append(offset)
        lengths.append(length)
        self._keys.append(key)
        if len(targets) >= _BATCH:
            self.flush()

    def whole(self, url: str) -> None:
        """Add a reference to a whole target."""
        target = hash(url)
        if len(self.names) < _NAMES:
            self.names.setdefault(target, url)
        self._whole.append(target)
        if len(self._whole) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Convert pending references to arrays."""
        if self._whole:
            self.wholes += len(self._whole)
            self._wholes.append(np.array(self._whole, np.int64))
            self._whole = []
        keys, self._keys = self._keys, []
        if not keys:
            return
        self.ranges += len(keys)
        arrays = [np.array(column, np.int64) for column in self._pending]
        for done, array in zip(self._done, arrays, strict=True):
            done.append(array)
        self._pending = ([], [], [])
        high, low = int(arrays[2].argmax()), int(arrays[2].argmin())
        if self.largest is None or arrays[2][high] > self.largest.length:
            self.largest = Sized(keys[high], int(arrays[2][high]))
        if self.smallest is None or arrays[2][low] < self.smallest.length:
            self.smallest = Sized(keys[low], int(arrays[2][low]))

    def taken(self) -> list[Numbers]:
        """Return [targets, offsets, lengths, targets of whole references], and drop them to free the memory."""
        found = []
        for parts in (*self._done, self._wholes):
            found.append(np.concatenate(parts) if parts else np.empty(0, np.int64))
            parts.clear()
        return found


def _count_targets(
    stats: Stats, columns: _Columns, top: int
) -> tuple[int, list[_Counted], list[_Counted]]:
    """Return (number of targets, the top ones by bytes, the top ones by references); set bytes, holes and overlaps."""
    targets, offsets, lengths, wholes = columns.taken()
    stats.range_bytes = _total(lengths)
    order = np.lexsort((offsets, targets))
    targets, offsets = targets[order], offsets[order]
    lengths = lengths[order]
    del order
    bounds = np.flatnonzero(targets[1:] != targets[:-1]) + 1
    known = np.unique(np.concatenate((targets[:1], targets[bounds], wholes)))
    del bounds
    first, after = np.searchsorted(targets, known), np.searchsorted(targets, known, "right")
    wholes.sort()
    counts = after - first + np.searchsorted(wholes, known, "right") - np.searchsorted(wholes, known)

    def counted(ranks: Numbers) -> list[_Counted]:
        return [_Counted(int(known[at]), int(counts[at]), _total(lengths[first[at] : after[at]])) for at in ranks]

    sizes, ranged = np.zeros(len(known)), after > first
    if len(lengths):
        sizes[ranged] = np.add.reduceat(lengths.astype(np.float64), first[ranged])  # for ranking: no overflow
    by_bytes = [one for one in counted(_highest(sizes, top)) if one.bytes]
    by_references = counted(_highest(counts, top))
    stats.holes, stats.overlaps = gaps_and_overlaps(targets, offsets, lengths)
    return len(known), by_bytes, by_references


def gaps_and_overlaps(targets: Numbers, starts: Numbers, lengths: Numbers) -> tuple[int, int]:
    """Return (bytes between the first and last range of a target that no range covers, bytes that several cover).

    The ranges must be sorted by target, then start. Once the ends are sorted as well, the ith start and the ith end of
    a target delimit ranges that cover every byte as often as the given ones do, and of which none contains another.
    """
    if not lengths.all():
        some = lengths > 0
        targets, starts, lengths = targets[some], starts[some], lengths[some]
    ends = starts + lengths
    ends = ends[np.lexsort((ends, targets))]
    same = targets[1:] == targets[:-1]
    gaps = starts[1:] - ends[:-1]
    holes = _total(gaps[same & (gaps > 0)])
    del gaps
    # `low` is the start of the overlap of the ith range with the next one, without the bytes that the range before the
    # ith covers, too: these have been counted already.
    low = starts[1:].copy()
    np.maximum(low[1:], ends[:-2], out=low[1:], where=same[:-1])
    common = ends[:-1] - low
    return holes, _total(common[same & (common > 0)])


async def _names(store: Store, known: dict[int, str], wanted: set[int]) -> dict[int, str]:
    """Return {hash: URL} of the `wanted` hashes."""
    names = {target: known[target] for target in wanted if target in known}
    if len(names) < len(wanted):
        async for reference in store.references():
            if reference.data is None and hash(reference.url) in wanted:
                names[hash(reference.url)] = reference.url
                if len(names) == len(wanted):
                    break
    return names


def _highest(weights: npt.NDArray[Any], top: int) -> Numbers:
    """Return the indices of the `top` largest weights, largest first."""
    return np.argsort(-weights, kind="stable")[:top]


def _total(numbers: Numbers) -> int:
    """Return the sum of non-negative numbers, which may exceed 64 bits."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())
