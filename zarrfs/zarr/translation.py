"""Translation of arrays of any generation to Zarr v2 or v3.

Chunks keep their stored bytes. In v2, which has no shards, the inner chunks of shards become chunks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from zarrfs.zarr import dtypes, v2, v3
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import ArrayMetadata
from zarrfs.zarr.pipelines import CONVERTING, PREFIX, filtered

Version = Literal[2, 3]


class Translation(NamedTuple):
    """An array as it appears in Zarr v2 or v3."""

    document: dict[str, JSON]  # the members of its document that differ from those of the source, or all of them
    keys: KeyTemplate  # of its chunks
    inner: Grid | None = None  # of its chunks, if these are the inner chunks of shards


def translate(array: ArrayMetadata, version: Version) -> Translation:
    """Translate an array. Raise MetadataError with the reason if readers of the version would misread its chunks."""
    if version == 2:
        inner = _inner(array)
        shown = inner or array
        if array.generation == "v3":
            _check_filters(shown, version)
        return Translation(v2.array_json(shown), v2.chunk_keys(shown), inner.grid if inner else None)
    keys = v3.chunk_keys(array)
    if array.generation == "v3":
        return Translation({} if keys == array.keys else {"chunk_key_encoding": v3.encoding(keys)}, keys)
    _check_filters(array, version)
    return Translation(v3.array_json(array), keys)


def _inner(array: ArrayMetadata) -> ArrayMetadata | None:
    """Return the array of inner chunks; None if chunks are not shards, or can only be decoded whole."""
    if not any(spec.shards for spec in array.codecs):
        return None
    from zarrfs.zarr.codecs import inner_array

    return inner_array(array)


def _check_filters(array: ArrayMetadata, version: Version) -> None:
    """Raise MetadataError for a filter that readers of `version` would apply to other items than those of its source.

    In v2, a filter reinterprets bytes as its own items, and the next codec gets them in its byte order; in v3, it gets
    the numbers of the array. zarr-python 3.1 also takes the encoded items for those of the array if quantize changes
    their size, or if the array has single bytes.
    """
    current = array.dtype
    for name, configuration, _shards in array.codecs:
        short = name.removeprefix(PREFIX)
        if name == "bytes" and current.endian not in (None, configuration.get("endian", current.endian)):
            raise MetadataError("filters followed by a change of byte order, which Zarr v2 does not have")
        if short not in CONVERTING:
            continue
        text = configuration.get("decode_dtype", configuration.get("dtype"))
        if text is not None and dtypes.parse_v2(text) != current:
            raise MetadataError(f"codec {short} for items of {text}, which the array does not have")
        coded, size = filtered(short, configuration, current), current.itemsize
        misread = coded.itemsize > array.dtype.itemsize == 1 or (short == "quantize" and coded.itemsize != size)
        if version == 3 and misread:
            raise MetadataError(f"codec {short} changes the size of items, which readers of Zarr v3 do not expect")
        current = coded
