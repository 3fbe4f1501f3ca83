"""Arrays and groups of any generation as documents of Zarr v3.

Source: Zarr v3 core; what zarr-python 3.1 reads; xarray's conventions for v2 and v3 (dimension names, _FillValue).
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from typing import Any

from zarrfs.zarr import dtypes, fillvalues
from zarrfs.zarr.documents import dump_json
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import JSON, ArrayMetadata, CodecSpec, GroupMetadata, MetadataError
from zarrfs.zarr.pipelines import PREFIX, pipeline_of

DIMENSIONS = "_ARRAY_DIMENSIONS"  # xarray's attribute for what v3 calls dimension_names
FILL = "_FillValue"  # the attribute of the CF conventions; of v2 arrays xarray takes the fill_value for it
_TYPESIZE_MAX = 255  # bytes: blosc's own limit
_CNAMES = frozenset(("lz4", "lz4hc", "blosclz", "snappy", "zlib", "zstd"))


def array_document(array: ArrayMetadata) -> bytes:
    """The zarr.json of an array. MetadataError says why v3 cannot have it."""
    return dump_json(array_json(array))


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
    if keys == KeyTemplate("", "c" + keys.separator, keys.separator, "", "c"):
        return keys
    return KeyTemplate(separator=keys.separator)


def _encoding(keys: KeyTemplate) -> JSON:
    return {"name": "default" if keys.prefix else "v2", "configuration": {"separator": keys.separator}}


def _data_type(array: ArrayMetadata) -> JSON:
    dtype = array.dtype
    if not isinstance(dtype.text, str) and (dtype.mixed or dtype.endian == "big") and array.generation != "v3":
        raise MetadataError("fields of a structured data type are little-endian in Zarr v3")
    return dtypes.as_v3(dtype)


# -- codecs


def _codecs(array: ArrayMetadata) -> list[JSON]:
    if array.generation == "v3":
        return [_told(spec) for spec in array.codecs]
    filters, serializer, compressors = pipeline_of(array)
    if serializer.name == "bytes":
        serializer = CodecSpec("bytes", _endian(array, filters))
    size = array.dtype.itemsize
    return [_told(spec) for spec in (*filters, serializer, *(_compressor(spec, size) for spec in compressors))]


def _told(spec: CodecSpec) -> JSON:
    if not spec.configuration:
        return {"name": spec.name}
    return {"name": spec.name, "configuration": dict(spec.configuration)}


def _endian(array: ArrayMetadata, filters: tuple[CodecSpec, ...]) -> Mapping[str, JSON]:
    """The configuration of the bytes codec, for what the last filter gives."""
    found: DataType = array.dtype
    for spec in filters:
        name, told = spec.name.removeprefix(PREFIX), spec.configuration
        given = told.get("encode_dtype") if name == "astype" else told.get("astype") or told.get("dtype")
        if name == "packbits":
            return {}
        if name not in ("transpose", "bitround") and given is not None:
            found = dtypes.parse_v2(given)
    return {} if found.endian is None else {"endian": found.endian}


def _compressor(spec: CodecSpec, itemsize: int) -> CodecSpec:
    """With all that v3 wants to be said."""
    told = dict(spec.configuration)
    if spec.name == "zstd":
        return CodecSpec("zstd", {"level": told.get("level", 0), "checksum": bool(told.get("checksum", False))})
    if spec.name == "gzip":
        level = told.get("level", 1)
        return spec if level in range(10) else CodecSpec(PREFIX + "gzip", {"level": level})
    if spec.name != "blosc":
        return spec
    typesize = told.get("typesize") or min(itemsize, _TYPESIZE_MAX) or 1
    shuffle: Any = told.get("shuffle", 1)
    if shuffle == -1:  # numcodecs: by the size of an item
        shuffle = 2 if itemsize == 1 else 1
    shuffle = shuffle if isinstance(shuffle, str) else ("noshuffle", "shuffle", "bitshuffle")[shuffle]
    if told.get("cname") not in _CNAMES:
        raise MetadataError(f"blosc: no compressor is called {told.get('cname')!r}")
    return CodecSpec(
        "blosc",
        {
            "typesize": typesize, "cname": told["cname"], "clevel": told.get("clevel", 5), "shuffle": shuffle,
            "blocksize": told.get("blocksize", 0),
        },
    )  # fmt: skip


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
