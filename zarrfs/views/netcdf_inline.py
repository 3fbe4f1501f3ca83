"""Arrays of view=netcdf that are read when their file is described, and kept with its header.

These are arrays of text or bytes of any length, shown as characters along an additional dimension for the longest
item, on which the addresses of other variables depend; and arrays without dimensions, which HDF5 cannot chunk.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import trio

from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import ReadError
from zarrfs.store.api import Store
from zarrfs.views.boxes import Box, pieces
from zarrfs.views.chunks import Array, Chunks, part_of
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Node
from zarrfs.views.netcdf_items import VariableForm, forms_of
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
        return not array.ndim
    return array.dtype.kind in "TB" or any(codec.name.rpartition(".")[2] in _JSON for codec in array.codecs)


async def read_inlined(store: Store, node: Node, cache: DecodedCache) -> tuple[VariableForm, ...] | str:
    """Return the forms of an array with its items, or why it is left out: it is too large, or NetCDF lacks its type.

    `cache` bounds how many chunks are decoded at once. Raise ReadError if a chunk cannot be read or decoded.
    """
    assert isinstance(node.metadata, ArrayMetadata)
    array = node.metadata
    try:
        for reason in await trio.to_thread.run_sync(check_codecs, array):
            return reason
        chunks = Chunks(store, node, cache, c_order=True)
        if math.prod(chunks.shape) > _ITEMS_MAX or chunks.number > _CHUNKS_MAX:
            return f"text of any length in more than {_ITEMS_MAX:,} items or {_CHUNKS_MAX:,} chunks"
        forms = forms_of(array.dtype) if array.dtype.itemsize else ()
        items = await _items(store, chunks, cache)
        if not forms:
            return (_texts(items, array.dtype.kind == "B"),)
        number = items.reshape(1).view(array.dtype.numpy)
        return tuple(dataclasses.replace(form, data=_converted(number, form)) for form in forms)
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
            part_of(out, where)[...] = chunks.filled(()) if chunk is None else part_of(chunk, inside)

    await for_each(work, range(_REQUESTS if store.remote else cache.threads))
    return out


def _converted(items: Array, form: VariableForm) -> bytes:
    try:
        return (items if form.convert is None else form.convert(items)).tobytes()
    except ReadError as exc:
        raise MetadataError(exc.reason) from None


def _texts(items: Array, raw: bool) -> VariableForm:
    """Convert items, which are objects, to characters; `raw`: they are bytes, not text.

    Raise MetadataError for items that NetCDF cannot represent, or that are too large.
    """
    found = []
    for item in items.flat:
        if raw and isinstance(item, bytes | bytearray):
            found.append(bytes(item))
        elif not raw and (item is None or isinstance(item, str)):
            try:
                found.append((item or "").encode())
            except UnicodeEncodeError:
                raise MetadataError("text with a character that UTF-8 does not have") from None
        else:
            raise MetadataError(f"objects of the type {type(item).__name__}: NetCDF-4 has no such type")
        if found[-1].endswith(b"\0"):
            raise MetadataError("an item that ends with NUL, which NetCDF would drop")
    width = max(map(len, found), default=0) or 1
    if width * len(found) > _BYTES_MAX:
        raise MetadataError(f"{len(found):,} items as long as the longest, {width:,} bytes: more than 32 MiB")
    encoding = () if raw else (("_Encoding", "utf-8"),)
    data = np.array(found, f"S{width}").tobytes()
    return VariableForm("|S1", width, attributes=encoding, has_fill_value=False, data=data)
