"""Translation of arrays of any generation to Zarr v2 or v3.

Chunks keep their stored bytes. In v2, which has no shards, the inner chunks of shards become chunks.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from zarrfs.zarr import dtypes, v2, v3
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata
from zarrfs.zarr.pipelines import bytes_codec
from zarrfs.zarr.readers import misread_codec

Version = Literal[2, 3]

LAYOUT = "zarrfs.dtype"  # the attribute with the dtype, in the notation of v2, of items that are shown as raw bytes


class Translation(NamedTuple):
    """An array as it appears in Zarr v2 or v3."""

    document: dict[str, JSON]  # the members of its document that differ from those of the source, or all of them
    keys: KeyTemplate  # of its chunks
    inner: Grid | None = None  # of its chunks, if these are the inner chunks of shards


def translate(array: ArrayMetadata, version: Version) -> Translation:
    """Translate an array. Raise MetadataError with the reason if readers of the version cannot decode its chunks."""
    problem = misread_codec(array, version)
    if problem is None:
        try:
            return _translation(_opaque(array) if version == 3 else array, version)
        except MetadataError as exc:
            problem = str(exc)
    inner = _inner(array) if version == 2 else None
    if inner is not None and not misread_codec(inner, version):
        return _translation(inner, version)._replace(inner=inner.grid)
    raise MetadataError(problem)


# -- helpers


def _translation(array: ArrayMetadata, version: Version) -> Translation:
    if version == 2:
        return Translation(v2.array_json(array), v2.chunk_keys(array))
    keys = v3.chunk_keys(array)
    if array.generation != "v3":
        return Translation(v3.array_json(array), keys)
    return Translation({} if keys == array.keys else {"chunk_key_encoding": v3.encoding(keys)}, keys)


def _opaque(array: ArrayMetadata) -> ArrayMetadata:
    """Return `array` with raw bytes as its data type, and its dtype as an attribute, if v3 has no data type for it.

    An array with filters of items is returned unchanged.
    """
    dtype, names = array.dtype, [spec.name for spec in array.codecs]
    if dtype.kind not in "fcV" or "bytes" not in names or {*names[: names.index("bytes")]} - {"transpose"}:
        return array
    if _in_v3(dtype):
        return array
    raw = dtypes.raw(dtype.itemsize)
    codecs = tuple(bytes_codec(raw) if spec.name == "bytes" else spec for spec in array.codecs)
    attributes = {**array.attributes, LAYOUT: dtypes.as_v2(dtype)}
    return dataclasses.replace(array, dtype=raw, codecs=codecs, attributes=attributes)


def _in_v3(dtype: DataType) -> bool:
    """Return whether v3 has a data type for such items."""
    try:
        dtypes.as_v3(dtype)
    except MetadataError:
        return False
    return True


def _inner(array: ArrayMetadata) -> ArrayMetadata | None:
    """Return the array of inner chunks; None if chunks are not shards, or can only be decoded whole."""
    if not any(spec.shards for spec in array.codecs):
        return None
    from zarrfs.zarr.codecs import inner_array

    return inner_array(array)
