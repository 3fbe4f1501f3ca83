"""read_array(): an array of any Zarr generation as a numpy array in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from zarrfs.concurrency.tasks import at_once
from zarrfs.errors import NotFound, ReadError
from zarrfs.store.api import Store
from zarrfs.views.chunks import Chunks, part_of
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Hierarchy
from zarrfs.zarr.model import ArrayMetadata

_INDEXES = 64 << 20  # bytes of shard indexes to cache meanwhile
_REQUESTS = 32  # chunks of a remote store to fetch at once


async def read_array(store: Store, path: str = "") -> np.ndarray[Any, Any]:
    """Read the array at `path` in the hierarchy of `store`, in its own dtype, byte order and memory order.

    A missing chunk reads as the fill value, or zeros where that is null. Raises NotFound if there is no array,
    ReadError if its metadata is invalid, or a chunk cannot be read or decoded.
    """
    node = await Hierarchy(store).node(path)
    if node is not None and node.problem is not None:
        raise ReadError(path or "/", node.problem)
    if node is None or not isinstance(node.metadata, ArrayMetadata):
        raise NotFound(path, "no array" if node is None else "a group, not an array")
    cache = DecodedCache(_INDEXES)
    chunks = Chunks(store, node, cache)
    out = np.empty(chunks.shape, chunks.item)
    numbers = iter(range(chunks.number))

    async def work(_number: int) -> None:
        for number in numbers:
            chunk = (await chunks.load(number)).value
            place = chunks.place(number)
            inside = tuple(slice(0, part.stop - part.start) for part in place)
            part_of(out, place)[...] = chunks.filled(()) if chunk is None else part_of(chunk, inside)

    await at_once(work, range(_REQUESTS if store.remote else cache.threads))
    found = out.view(chunks.array.dtype.numpy()) if chunks.itemsize else out
    return found.T if chunks.fortran else found
