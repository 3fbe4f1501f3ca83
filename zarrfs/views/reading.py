"""Reading of an array of any Zarr generation, or of a part of it, into a numpy array: read_array()."""

from __future__ import annotations

import contextlib
from types import EllipsisType
from typing import Any

import numpy as np

from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import NotFound, ReadError
from zarrfs.store.api import Store
from zarrfs.views.boxes import Box, pieces
from zarrfs.views.chunks import Chunks, part_of
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Hierarchy
from zarrfs.zarr.model import ArrayMetadata

Index = int | slice | EllipsisType
Selection = Index | tuple[Index, ...]

_INDEXES = 64 << 20  # bytes of shard indexes to cache during a read
_REQUESTS = 32  # chunks of a remote store to fetch at once


async def read_array(store: Store, path: str = "", selection: Selection = ()) -> np.ndarray[Any, Any]:
    """Read the array at `path` in the hierarchy of `store`, in its own dtype, byte order and memory order.

    `selection` is a basic index of numpy: whole numbers, which remove their dimension, slices and an ellipsis. Only
    the chunks that it touches are read. A missing chunk reads as the fill value, or as zeros if that is null. Raises
    NotFound if there is no array, ReadError if its metadata is invalid, or a chunk cannot be read or decoded, and
    IndexError for a selection outside the array.
    """
    node = await Hierarchy(store).node(path)
    if node is not None and node.problem is not None:
        raise ReadError(path or "/", node.problem)
    if node is None or not isinstance(node.metadata, ArrayMetadata):
        raise NotFound(path, "no array" if node is None else "a group, not an array")
    cache = DecodedCache(_INDEXES)
    chunks = Chunks(store, node, cache)
    turn = -1 if chunks.fortran else 1
    box, rest = _box(selection, chunks.shape[::turn])
    steps = tuple(abs(one.step) if isinstance(one, slice) else 1 for one in rest)
    out = await read_box(store, chunks, cache, Box(box.start[::turn], box.stop[::turn]), steps[::turn])
    found = out.view(chunks.array.dtype.numpy()) if chunks.itemsize else out
    found = found.T if chunks.fortran else found
    part: np.ndarray[Any, Any] = found[(*rest, ...)]
    return part


async def read_box(
    store: Store, chunks: Chunks, cache: DecodedCache, box: Box, steps: tuple[int, ...] = ()
) -> np.ndarray[Any, Any]:
    """Read a box of items, in the order of the flat file, without caching chunks. Raise ReadError.

    `steps`: for each dimension, a number n that limits the read to every n-th item, beginning with the first; other
    items are undefined.
    """
    out = np.empty(box.extents, chunks.item)
    wanted = (
        piece
        for piece in (pieces(box, chunks.shape_of_chunk, chunks.counts) if all(box.extents) else ())
        if all(-(-part.start // step) * step < part.stop for part, step in zip(piece.where, steps, strict=False))
    )

    async def work(_number: int) -> None:
        for number, inside, where in wanted:
            chunk = (await chunks.load(number)).value
            part_of(out, where)[...] = chunks.filled(()) if chunk is None else part_of(chunk, inside)

    await for_each(work, range(_REQUESTS if store.remote else cache.threads))
    return out


def _box(selection: Selection, shape: tuple[int, ...]) -> tuple[Box, tuple[int | slice, ...]]:
    """Return the smallest box that holds a selection, and the selection within that box."""
    given = selection if isinstance(selection, tuple) else (selection,)
    indexes = [index for index in given if index is not ...]
    if len(indexes) > len(shape) or len(given) - len(indexes) > 1:
        raise IndexError(f"selection {selection!r}: the array has {len(shape)} dimensions")
    at = next((at for at, index in enumerate(given) if index is ...), len(given))  # not ==: arrays compare by item
    indexes[at:at] = [slice(None)] * (len(shape) - len(indexes))
    start, stop, rest = [], [], list[int | slice]()
    for number, (index, extent) in enumerate(zip(indexes, shape, strict=True)):
        if isinstance(index, slice):
            taken = range(extent)[index]
            low, high = (min(taken[0], taken[-1]), max(taken[0], taken[-1]) + 1) if taken else (0, 0)
            rest.append(slice(None, None, taken.step))
        else:
            low = _position(index, extent, number)
            high = low + 1
            rest.append(0)
        start.append(low)
        stop.append(high)
    return Box(tuple(start), tuple(stop)), tuple(rest)


def _position(index: int, extent: int, dimension: int) -> int:
    """Return an index as counted from the beginning. Raise IndexError if it is invalid."""
    if not isinstance(index, bool):  # numpy takes a bool for a mask
        with contextlib.suppress(IndexError, TypeError):
            return range(extent)[index]
    rule = f"expected a whole number from {-extent} to {extent - 1}, or a slice"
    raise IndexError(f"selection {index!r} of dimension {dimension}: {rule}")
