"""Helpers that assemble arrays from stored chunks with zarrfs.zarr alone, and arrays of given codecs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zarrfs.zarr import NODE_DOCUMENTS, dtypes
from zarrfs.zarr.codecs import decode_chunk
from zarrfs.zarr.documents import parse_node
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata, Generation
from zarrfs.zarr.sharding import parse_codecs

Get = Callable[[str], bytes | None]  # key relative to the array -> stored value


def parsed(get: Get) -> ArrayMetadata:
    """Parse the metadata document of an array."""
    for name in NODE_DOCUMENTS:
        data = get(name)
        if data is not None:
            array = parse_node(name, data)
            assert isinstance(array, ArrayMetadata)
            return array
    raise AssertionError("no document")


def assembled(array: ArrayMetadata, get: Get) -> np.ndarray[Any, Any]:
    """Return the whole array in C order; missing chunks have the fill value."""
    out = np.empty(array.shape, array.dtype.numpy)
    out[...] = _fill(array)
    for number in range(array.grid.size):
        index = array.grid.index(number)
        data = get(array.keys.key(index))
        if data is None:
            continue
        chunk = decode_chunk(array, data)
        assert chunk.shape == array.grid.chunks
        assert chunk.dtype == out.dtype
        starts = [at * step for at, step in zip(index, array.grid.chunks, strict=True)]
        region = tuple(slice(at, at + step) for at, step in zip(starts, array.grid.chunks, strict=True))
        inside = out[region].shape
        out[region] = chunk[tuple(slice(0, extent) for extent in inside)]
    return out


def _fill(array: ArrayMetadata) -> Any:
    if not array.dtype.itemsize:
        return array.fill_object
    return np.frombuffer(array.fill, array.dtype.numpy)[0] if array.fill else np.zeros((), array.dtype.numpy)


def array_of(
    dtype: str, shape: tuple[int, ...], *codecs: tuple[str, Mapping[str, Any]], generation: Generation = "v3"
) -> ArrayMetadata:
    """Return the metadata of an array of one chunk; `dtype` is one of v2."""
    parsed_dtype = dtypes.parse_v2(dtype)
    fill = bytes(parsed_dtype.itemsize) if parsed_dtype.itemsize else None
    named = [{"name": name, "configuration": dict(configuration)} for name, configuration in codecs]
    specs = parse_codecs(named, shape) if named else ()
    return ArrayMetadata(generation, shape, Grid(shape, shape), parsed_dtype, fill, specs, KeyTemplate(), {})


def bytes_of(size: int, *codecs: tuple[str, Mapping[str, Any]]) -> ArrayMetadata:
    """Return the metadata of an array of `size` bytes in one chunk."""
    return array_of("|u1", (size,), ("bytes", {}), *codecs)


def decoded(size: int, data: bytes, *codecs: tuple[str, Mapping[str, Any]]) -> bytes:
    """Decode `data` as a chunk of `size` bytes."""
    chunk = decode_chunk(bytes_of(size, *codecs), data)
    assert math.prod(chunk.shape) == size
    return chunk.tobytes()
