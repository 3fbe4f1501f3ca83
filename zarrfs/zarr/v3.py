"""Zarr v3: parse `zarr.json`, and write nodes of any generation as such documents.

Source: Zarr v3 core specification; zarr-extensions (chunk key encodings prefix and suffix); zarr-python 3.1 as a
reader and as a writer; xarray's conventions for v2 and v3 (dimension names, _FillValue).
"""

from __future__ import annotations

import base64
import math
import struct

from zarrfs.zarr import dtypes, fillvalues, v2
from zarrfs.zarr.dtypes import Endian
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.keys import DEFAULT, KeyTemplate
from zarrfs.zarr.layout import check_chunk, layout_of, node_attributes, required
from zarrfs.zarr.model import ArrayMetadata, CodecSpec, GroupMetadata
from zarrfs.zarr.pipelines import PREFIX, check_v3_order
from zarrfs.zarr.sharding import parse_codecs

_NAMES_ALONE = ("bytes", "crc32c", "vlen-utf8", "vlen-bytes")  # zarr-python requires a configuration of other codecs
_WITH_FILL_ATTRIBUTE = "biufcT"  # kinds of data types; with others, xarray cannot open a data set that has one


# -- reading


def parse_node(document: dict[str, JSON]) -> ArrayMetadata | GroupMetadata:
    """Parse the members of a `zarr.json`.

    Raise MetadataError if the document is invalid or has unknown extensions that must be understood, and Experimental
    if it is the entry point of the experimental v3.
    """
    layout = layout_of("zarr.json", document)
    attributes = node_attributes(document)
    if layout is None:
        return GroupMetadata("v3", attributes)
    grid = layout.grid
    codecs = parse_codecs(required(document, "codecs"), grid.chunks)
    endian = _endian(codecs)
    dtype = dtypes.parse_v3(required(document, "data_type"), endian or "little")
    # zarr-python omits endian for fields, which are little-endian
    if endian is None and dtype.endian and not dtype.numpy.names and _takes_items(codecs):
        raise MetadataError("codecs: bytes without endian, for items of several bytes")
    check_chunk(grid, dtype.itemsize)
    fill, fill_object = fillvalues.from_v3(required(document, "fill_value"), dtype)
    return ArrayMetadata(
        "v3", grid.shape, grid, dtype, fill, codecs, layout.keys, attributes,
        _dimension_names(document.get("dimension_names"), len(grid.shape)), fill_object,
    )  # fmt: skip


def _endian(codecs: tuple[CodecSpec, ...]) -> Endian | None:
    """Return the byte order of items in chunks; None if no codec states it."""
    for codec in codecs:
        if codec.name == "bytes":
            endian = codec.configuration.get("endian")
            if endian not in (None, "little", "big"):
                raise MetadataError("codecs: bytes with an endian that is neither little nor big")
            return endian
        if codec.shards:
            return _endian(codec.shards.codecs)
    return None


def _takes_items(codecs: tuple[CodecSpec, ...]) -> bool:
    """Return True if the codec "bytes" takes items of the data type, not the output of a filter."""
    names = [codec.name for codec in codecs]
    return "bytes" in names and all(name == "transpose" for name in names[: names.index("bytes")])


def _dimension_names(value: JSON, ndim: int) -> tuple[str | None, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != ndim:
        raise MetadataError("dimension_names: not one for each dimension")
    if not all(item is None or isinstance(item, str) for item in value):
        raise MetadataError("dimension_names: neither text nor null")
    return tuple(value)


# -- writing


def array_json(array: ArrayMetadata) -> dict[str, JSON]:
    """Return the members of a `zarr.json` for an array of another generation.

    Raise MetadataError if v3 cannot express it.
    """
    names, attributes = _dimensions(array)
    document: dict[str, JSON] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": _data_type(array),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.grid.chunks)}},
        "chunk_key_encoding": encoding(chunk_keys(array)),
        "fill_value": fillvalues.as_v3(array),
        "codecs": [_codec(spec) for spec in array.codecs],
        "attributes": attributes,
    }
    check_v3_order(array)
    if names is not None:
        document["dimension_names"] = list(names)
    return document


def group_json(group: GroupMetadata) -> dict[str, JSON]:
    """Return the members of a `zarr.json` for a group of another generation."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(group.attributes)}


def chunk_keys(array: ArrayMetadata) -> KeyTemplate:
    """Return the template of v3 chunk keys for an array of any generation: nested if its own keys are.

    Raise MetadataError as v2.chunk_keys() does.
    """
    keys = array.keys
    return keys if keys in (DEFAULT, KeyTemplate.joined("c")) else v2.chunk_keys(array)


def encoding(keys: KeyTemplate) -> JSON:
    """Return the chunk_key_encoding for the result of chunk_keys()."""
    return {"name": "default" if keys.prefix else "v2", "configuration": {"separator": keys.separator}}


def _data_type(array: ArrayMetadata) -> JSON:
    dtype = array.dtype
    if dtype.numpy.names and dtype.numpy != dtype.numpy.newbyteorder("<"):
        raise MetadataError("fields of a structured data type are little-endian in Zarr v3")
    return dtypes.as_v3(dtype)


def _codec(spec: CodecSpec) -> JSON:
    if not spec.configuration and spec.name in _NAMES_ALONE:
        return {"name": spec.name}
    if spec.name == "gzip" and spec.configuration.get("level", 0) not in range(10):  # v3's gzip has no other levels
        return {"name": PREFIX + spec.name, "configuration": dict(spec.configuration)}
    return {"name": spec.name, "configuration": dict(spec.configuration)}


def _dimensions(array: ArrayMetadata) -> tuple[tuple[str | None, ...] | None, dict[str, JSON]]:
    """Return (dimension names, attributes) for v3. In v2, xarray stores the names in an attribute."""
    attributes = dict(array.attributes)
    names = attributes.get(v2.DIMENSIONS)
    if not isinstance(names, list) or len(names) != array.ndim or not all(isinstance(name, str) for name in names):
        return None, attributes
    del attributes[v2.DIMENSIONS]
    fill = attributes.pop(v2.FILL_ATTRIBUTE, None)  # xarray stores it as fill_value in v2
    if array.fill is not None:
        fill = fillvalues.as_v2(array)
    if fill is not None and array.dtype.kind in _WITH_FILL_ATTRIBUTE:
        attributes[v2.FILL_ATTRIBUTE] = _fill_attribute(fill, array.dtype.kind)
    return tuple(names), attributes


def _fill_attribute(value: JSON, kind: str) -> JSON:
    """Encode a _FillValue as xarray does in attributes of v3: floats as base64 of a little-endian double."""
    if kind == "c" and isinstance(value, list):
        return [_fill_attribute(part, "f") for part in value]
    if kind != "f" or isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return base64.b64encode(struct.pack("<d", math.nan if math.isnan(number) else number)).decode()
