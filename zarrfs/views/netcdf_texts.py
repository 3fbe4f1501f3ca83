"""Text and bytes of any length in -o view=netcdf: characters along an additional dimension, for the longest item.

The addresses of variables have to be known before they are read, and depend on the length of the longest item.
Therefore such arrays are read whole when their file is described, up to a limit, and kept in memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from zarrfs.errors import ReadError
from zarrfs.store.api import Store
from zarrfs.views.boxes import Box
from zarrfs.views.chunks import Array, Chunks
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Node
from zarrfs.views.netcdf_items import VariableForm
from zarrfs.views.reading import read_box
from zarrfs.zarr.errors import MetadataError

_ITEMS_MAX = 1 << 20
_CHUNKS_MAX = 1 << 14
_BYTES_MAX = 32 << 20  # of an array, with all items as wide as the longest


class Texts(NamedTuple):
    """The items of an array of text."""

    form: VariableForm
    data: bytes = b""  # each item padded with NUL to the width of the form
    damage: ReadError | None = None  # the error of a chunk, in place of the items, whose width is then unknown


class TextArray:
    """One array of text of any length: its items, and whether they have changed."""

    def __init__(self, store: Store, node: Node, cache: DecodedCache) -> None:
        """`cache` bounds how many chunks are decoded at once."""
        self._chunks = Chunks(store, node, cache, c_order=True)
        self._cache, self._store = cache, store

    async def read(self) -> Texts:
        """Read all items. Raise MetadataError for an array that is too large or has items of other types.

        Raise ReadError for a chunk that cannot be read, because a later attempt may succeed. The error of a chunk
        that cannot be decoded is returned as Texts.damage.
        """
        chunks = self._chunks
        if math.prod(chunks.shape) > _ITEMS_MAX or chunks.number > _CHUNKS_MAX:
            raise MetadataError(f"text of any length in more than {_ITEMS_MAX:,} items or {_CHUNKS_MAX:,} chunks")
        raw = chunks.array.dtype.kind == "B"
        try:
            items = await read_box(self._store, chunks, self._cache, Box((0,) * len(chunks.shape), chunks.shape))
        except ReadError as exc:
            if not isinstance(exc.__cause__, MetadataError):
                raise
            return Texts(_form(1, raw), damage=exc)
        return _texts(items, raw)

    async def unchanged(self) -> bool:
        """Return whether the chunks still have the versions that were read."""
        return await self._chunks.unchanged()


def _texts(items: Array, raw: bool) -> Texts:
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
    return Texts(_form(width, raw), np.array(found, f"S{width}").tobytes())


def _form(width: int, raw: bool) -> VariableForm:
    return VariableForm("|S1", width, attributes=() if raw else (("_Encoding", "utf-8"),), has_fill_value=False)
