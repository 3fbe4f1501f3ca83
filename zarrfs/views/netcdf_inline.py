"""Arrays of view=netcdf that are read when their file is described, and kept with its header.

These are arrays of text, and of bytes of any length, shown as characters along an additional dimension for the longest
item, on which the addresses of other variables depend; and arrays without dimensions, which HDF5 cannot chunk.
"""

from __future__ import annotations

import math

import numpy as np
import trio

from zarrfs.concurrency.tasks import for_each
from zarrfs.store.api import Store
from zarrfs.views.boxes import Box, pieces
from zarrfs.views.chunks import Array, Chunks
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Node
from zarrfs.views.netcdf_model import Form, form_of
from zarrfs.zarr.codecs import check_codecs
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.model import ArrayMetadata

_REQUESTS = 32  # chunks of a remote store to fetch at once
_ITEMS_MAX = 1 << 20
_CHUNKS_MAX = 1 << 14
_BYTES_MAX = 32 << 20  # of an array, with all items as wide as the longest
_JSON = {"json", "json2"}  # codecs of arrays of objects, which may all be text, as kerchunk writes it


def is_inlined(node: Node) -> bool:
    """Return whether the items of an array are kept with the header."""
    array = node.metadata
    if not isinstance(array, ArrayMetadata):
        return False
    if array.dtype.itemsize:
        return array.dtype.kind == "U" or not array.ndim
    return array.dtype.kind in "TB" or any(codec.name.rpartition(".")[2] in _JSON for codec in array.codecs)


async def read_inlined(store: Store, node: Node, cache: DecodedCache) -> Form | str:
    """Return the form of an array with its items, or why it is left out: it is too large, or NetCDF lacks its type.

    `cache` bounds how many chunks are decoded at once. Raise ReadError if a chunk cannot be read or decoded.
    """
    assert isinstance(node.metadata, ArrayMetadata)
    dtype = node.metadata.dtype
    try:
        for reason in await trio.to_thread.run_sync(check_codecs, node.metadata):
            return reason
        chunks = Chunks(store, node, cache, c_order=True)
        if math.prod(chunks.shape) > _ITEMS_MAX or chunks.number > _CHUNKS_MAX:
            return f"text in more than {_ITEMS_MAX:,} items or {_CHUNKS_MAX:,} chunks"
        form = form_of(dtype) if dtype.itemsize and dtype.kind != "U" else None
        items = await _items(store, chunks, cache)
        if form is None:
            return _text(items.view(dtype.numpy) if dtype.itemsize else items, dtype.kind == "B")
        number = items.reshape(1).view(dtype.numpy)
        return form._replace(data=(number.astype(form.dtype) if dtype.kind == "f" else number).tobytes())
    except MetadataError as exc:
        return str(exc)


async def _items(store: Store, chunks: Chunks, cache: DecodedCache) -> Array:
    """Read a whole array. Raise ReadError."""
    whole = Box((0,) * len(chunks.shape), chunks.shape)
    out = np.empty(chunks.shape, chunks.item)
    wanted = pieces(whole, chunks.shape_of_chunk, chunks.counts) if all(chunks.shape) else iter(())

    async def work(_number: int) -> None:
        for number, inside, where in wanted:
            chunk = (await chunks.load(number)).value
            out[where] = chunks.filled(()) if chunk is None else chunk[inside]

    await for_each(work, range(_REQUESTS if store.remote else cache.threads))
    return out


def _text(items: Array, raw: bool) -> Form:
    """Convert items, which are text or objects, to characters; `raw`: they are bytes, not text.

    Raise MetadataError for items that NetCDF cannot represent, or that are too large.
    """
    found = []
    try:
        for item in items.flat:
            if raw and isinstance(item, bytes | bytearray):
                found.append(bytes(item))
            elif not raw and (item is None or isinstance(item, str)):
                found.append((item or "").encode())
            else:
                raise MetadataError(f"objects of the type {type(item).__name__}: NetCDF-4 has no such type")
            if found[-1].endswith(b"\0"):
                raise MetadataError("an item that ends with NUL, which NetCDF would drop")
    except ValueError:  # of encode(), or of numpy, which finds no character
        raise MetadataError("text with a character that UTF-8 does not have") from None
    width = max(map(len, found), default=0) or 1
    if width * len(found) > _BYTES_MAX:
        raise MetadataError(f"{len(found):,} items as long as the longest, {width:,} bytes: more than 32 MiB")
    data = np.array(found, f"S{width}").tobytes()
    return Form("|S1", width, {} if raw else {"_Encoding": "utf-8"}, data)
