"""Arrays and groups of any generation as documents of Zarr v3.

Source: Zarr v3 core; what zarr-python 3.1 reads; xarray's conventions for v2 and v3 (dimension names, _FillValue).
"""

from __future__ import annotations

import base64
import functools
import math
import struct

from zarrfs.zarr import dtypes, fillvalues
from zarrfs.zarr.codecorder import PREFIX, check_order
from zarrfs.zarr.errors import JSON, MetadataError
from zarrfs.zarr.keys import FLAT, NESTED, KeyTemplate
from zarrfs.zarr.model import ArrayMetadata, CodecSpec, GroupMetadata
from zarrfs.zarr.strictjson import strict_json

DIMENSIONS = "_ARRAY_DIMENSIONS"  # xarray's attribute for what v3 calls dimension_names
FILL = "_FillValue"  # the attribute of the CF conventions; of v2 arrays xarray takes the fill_value for it


def array_document(array: ArrayMetadata) -> bytes:
    """The zarr.json of an array. MetadataError says why v3 cannot have it."""
    return strict_json(array_json(array))


def array_json(array: ArrayMetadata) -> dict[str, JSON]:
    """As array_document(), not yet text."""
    names, attributes = _dimensions(array)
    found: dict[str, JSON] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": _data_type(array),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.grid.chunks)}},
        "chunk_key_encoding": _encoding(keys_of(array)),
        "fill_value": fillvalues.as_v3(array),
        "codecs": _codecs(array),
        "attributes": attributes,
        "storage_transformers": list(array.storage_transformers),
    }
    if names is not None:
        found["dimension_names"] = list(names)
    return found


def group_json(group: GroupMetadata) -> dict[str, JSON]:
    """The zarr.json of a group, not yet text."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(group.attributes)}


def keys_of(array: ArrayMetadata) -> KeyTemplate:
    """How the chunks of `array` are called as those of a v3 array, in as many directories as they are in."""
    keys = array.keys
    return keys if keys == _default(keys.separator) else plain_keys(array)


def plain_keys(array: ArrayMetadata) -> KeyTemplate:
    """Keys without prefix and suffix, in as many directories as the chunks are in. MetadataError where none are so."""
    keys = array.keys
    if "/" in keys.suffix or ("/" in keys.separator and keys.separator != "/"):
        raise MetadataError("chunk keys with directories that are not of a dimension")
    return NESTED if keys.separator == "/" else FLAT


@functools.lru_cache(16)
def _default(separator: str) -> KeyTemplate:
    """The encoding that v3 calls "default"."""
    return KeyTemplate("", "c" + separator, separator, "", "c")


def _encoding(keys: KeyTemplate) -> JSON:
    return {"name": "default" if keys.prefix else "v2", "configuration": {"separator": keys.separator}}


def _data_type(array: ArrayMetadata) -> JSON:
    dtype = array.dtype
    if not isinstance(dtype.text, str) and (dtype.mixed or dtype.endian == "big") and array.generation != "v3":
        raise MetadataError("fields of a structured data type are little-endian in Zarr v3")
    return dtypes.as_v3(dtype)


# -- codecs


def _codecs(array: ArrayMetadata) -> list[JSON]:
    if array.generation != "v3":
        check_order(array)
    return [_told(spec) for spec in array.codecs]


def _told(spec: CodecSpec) -> JSON:
    if not (spec.configuration or spec.name.startswith(PREFIX)):  # zarr-python wants those to have one
        return {"name": spec.name}
    if spec.name == "gzip" and spec.configuration.get("level") not in range(10):  # as v3 has it
        return {"name": PREFIX + spec.name, "configuration": dict(spec.configuration)}
    return {"name": spec.name, "configuration": dict(spec.configuration)}


# -- the conventions of xarray


def _dimensions(array: ArrayMetadata) -> tuple[tuple[str | None, ...] | None, dict[str, JSON]]:
    """(dimension names, attributes): what v2 tells of dimensions in an attribute, v3 tells beside it."""
    attributes = dict(array.attributes)
    names = attributes.get(DIMENSIONS)
    if array.generation == "v3" or array.dimension_names is not None:
        return array.dimension_names, attributes
    if not isinstance(names, list) or len(names) != array.ndim or not all(isinstance(name, str) for name in names):
        return None, attributes
    del attributes[DIMENSIONS]
    fill = attributes.pop(FILL, None) if array.fill is None else fillvalues.as_v2(array)
    if fill is not None:
        attributes[FILL] = _coded(fill, array.dtype.kind)
    return tuple(names), attributes


def _coded(value: JSON, kind: str) -> JSON:
    """A _FillValue as xarray writes it into attributes of v3: floats as base64 of a little-endian double."""
    if kind == "c" and isinstance(value, list):
        return [_coded(part, "f") for part in value]
    if kind != "f" or isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return base64.b64encode(struct.pack("<d", math.nan if math.isnan(number) else number)).decode()
