"""Zarr v3: parse `zarr.json`, and write nodes of any generation as such documents.

Source: Zarr v3 core specification; zarr-extensions (chunk key encodings prefix and suffix); zarr-python 3.1 as a
reader and as a writer; xarray's conventions for v2 and v3 (dimension names, _FillValue).
"""

from __future__ import annotations

import base64
import functools
import math
import struct
from collections.abc import Collection
from typing import Any

from zarrfs.zarr import dtypes, fillvalues, v2
from zarrfs.zarr.common import check_format, node_attributes, regular_grid, required
from zarrfs.zarr.dtypes import Endian
from zarrfs.zarr.errors import CodecError, MetadataError, Unsupported
from zarrfs.zarr.jsontext import JSON, named
from zarrfs.zarr.keys import KeyTemplate
from zarrfs.zarr.model import SHARDING, ArrayMetadata, CodecSpec, GroupMetadata
from zarrfs.zarr.pipelines import PREFIX, check_v3_order
from zarrfs.zarr.sharding import parse_codecs, parse_shards

_GROUP_MEMBERS = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}
_ARRAY_MEMBERS = {
    "zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value",
    "codecs", "storage_transformers", "dimension_names",
}  # fmt: skip
_NAMES_ALONE = ("bytes", "crc32c", "vlen-utf8", "vlen-bytes")  # zarr-python requires a configuration of other codecs
_NESTED_MAX = 8  # shards within shards, and key encodings within key encodings
_WITH_FILL_ATTRIBUTE = "biufcT"  # kinds of data types; with others, xarray cannot open a data set that has one


class Experimental(Unsupported):
    """A `zarr.json` that is the entry point of the experimental v3; draft.entry_point() parses it."""


# -- reading


def parse_node(document: dict[str, JSON]) -> ArrayMetadata | GroupMetadata:
    """Parse the members of a `zarr.json`.

    Raise MetadataError if the document is invalid or has unknown extensions that must be understood, and Experimental
    if it is the entry point of the experimental v3.
    """
    if isinstance(document.get("zarr_format"), str):
        raise Experimental("zarr_format: an entry point of the experimental v3 of zarr-python 2, and no node")
    check_format(document, 3)
    kind = required(document, "node_type")
    if kind not in ("array", "group"):
        raise MetadataError("node_type: neither array nor group")
    attributes = node_attributes(document)
    _check_members(document, _ARRAY_MEMBERS if kind == "array" else _GROUP_MEMBERS)
    return GroupMetadata("v3", attributes) if kind == "group" else _parse_array(document, attributes)


def _check_members(document: dict[str, JSON], known: Collection[str]) -> None:
    """Raise MetadataError for members that are not known and have to be understood."""
    for name, value in document.items():
        ignored = isinstance(value, dict) and value.get("must_understand") is False
        # early releases of zarr-python 3 wrote these two members with empty values
        empty = not value and name in ("extensions", "consolidated_metadata")
        if name not in known and not ignored and not empty:
            raise Unsupported(f"{name[:60]!r} must be understood, and is not known")


def _parse_array(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    codecs = parse_codecs(required(document, "codecs"))
    endian = _endian(codecs, 0)
    dtype = dtypes.parse_v3(required(document, "data_type"), endian or "little")
    # zarr-python omits endian for fields, which are little-endian
    if endian is None and dtype.endian and not dtype.fields and _takes_items(codecs):
        raise MetadataError("codecs: bytes without endian, for items of several bytes")
    name, grid_configuration = named(required(document, "chunk_grid"), "chunk_grid")
    if name != "regular":
        raise Unsupported(f"chunk_grid {name[:60]!r} is not known")
    chunks = required(grid_configuration, "chunk_shape")
    grid = regular_grid(required(document, "shape"), chunks, dtype)
    _check_shards(codecs, grid.chunks, 0)
    fill, fill_object = fillvalues.from_v3(required(document, "fill_value"), dtype)
    keys = _parse_encoding(required(document, "chunk_key_encoding"))
    _check_transformers(document.get("storage_transformers") or [])
    return ArrayMetadata(
        "v3", grid.shape, grid, dtype, fill, codecs, keys, attributes,
        _dimension_names(document.get("dimension_names"), len(grid.shape)), fill_object,
    )  # fmt: skip


def _check_shards(codecs: tuple[CodecSpec, ...], shape: tuple[int, ...], depth: int) -> None:
    """Raise CodecError or MetadataError if the configuration of a codec for shards of `shape` is invalid."""
    for name, configuration in codecs:
        if name == "transpose":
            order: Any = configuration.get("order")
            valid = isinstance(order, list) and all(type(at) is int for at in order)
            if not valid or sorted(order) != [*range(len(shape))]:
                raise CodecError(name, f"order {order} is not one of {len(shape)} axes")
            shape = tuple(shape[at] for at in order)
        elif name == SHARDING:
            _check_depth(depth)
            shards = parse_shards(configuration, shape)
            _check_shards(shards.codecs, shards.inner_shape, depth + 1)


def _check_depth(depth: int) -> None:
    if depth == _NESTED_MAX:
        raise MetadataError(f"codecs: more than {_NESTED_MAX} shards within shards")


def _endian(codecs: tuple[CodecSpec, ...], depth: int) -> Endian | None:
    """Return the byte order of items in chunks; None if no codec states it."""
    for codec in codecs:
        if codec.name == "bytes":
            endian = codec.configuration.get("endian")
            if endian not in (None, "little", "big"):
                raise MetadataError("codecs: bytes with an endian that is neither little nor big")
            return endian
        if codec.name == SHARDING:
            _check_depth(depth)
            return _endian(parse_codecs(codec.configuration.get("codecs")), depth + 1)
    return None


def _takes_items(codecs: tuple[CodecSpec, ...]) -> bool:
    """Return True if the codec "bytes" takes items of the data type, not the output of a filter."""
    names = [codec.name for codec in codecs]
    return "bytes" in names and all(name == "transpose" for name in names[: names.index("bytes")])


def _parse_encoding(value: JSON, depth: int = 0) -> KeyTemplate:
    name, configuration = named(value, "chunk_key_encoding")
    if name in ("prefix", "suffix"):
        base = configuration.get("base_encoding", configuration.get("base-encoding", "default"))
        if depth == _NESTED_MAX:
            raise MetadataError(f"chunk_key_encoding: more than {_NESTED_MAX} within each other")
        return _extended(name, _text(configuration, name), _parse_encoding(base, depth + 1))
    parts = (_text(configuration, part) for part in ("separator", "prefix", "suffix"))
    return _template(name, *parts)


def _extended(name: str, text: str | None, base: KeyTemplate) -> KeyTemplate:
    """Return the template with `text` before ("prefix") or after ("suffix") every key of `base`."""
    if name == "prefix":
        return KeyTemplate("", (text or "") + base.prefix, base.separator, base.suffix, (text or "") + base.scalar)
    return KeyTemplate("", base.prefix, base.separator, base.suffix + (text or ""), base.scalar + (text or ""))


def _text(configuration: dict[str, Any], name: str) -> str | None:
    value = configuration.get(name)
    if value is not None and not isinstance(value, str):
        raise MetadataError(f"chunk_key_encoding: {name} is no text")
    return value


@functools.lru_cache(256)
def _template(name: str, separator: str | None, prefix: str | None, suffix: str | None) -> KeyTemplate:
    """Return the template of an encoding. It may have a prefix and a suffix, as in the first draft of Zarr v3."""
    if name not in ("default", "v2"):
        raise Unsupported(f"chunk_key_encoding {name[:60]!r} is not known")
    if prefix is None and suffix is None and separator not in (None, ".", "/"):
        raise MetadataError("chunk_key_encoding: the separator is neither . nor /")
    lead, usual = ("c", "/") if name == "default" else ("", ".")
    return KeyTemplate.joined(
        lead if prefix is None else prefix, usual if separator is None else separator, suffix or ""
    )


def _dimension_names(value: JSON, ndim: int) -> tuple[str | None, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != ndim:
        raise MetadataError("dimension_names: not one for each dimension")
    if not all(item is None or isinstance(item, str) for item in value):
        raise MetadataError("dimension_names: neither text nor null")
    return tuple(value)


def _check_transformers(value: JSON) -> None:
    if not isinstance(value, list):
        raise MetadataError("storage_transformers: not a list")
    for item in value:
        name, _configuration = named(item, "storage_transformers")
        if not isinstance(item, dict) or item.get("must_understand") is not False:
            raise Unsupported(f"storage transformer {name[:60]!r} must be understood, and is not known")


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
    return keys if keys == _default_keys(keys.separator) else v2.chunk_keys(array)


@functools.lru_cache(16)
def _default_keys(separator: str) -> KeyTemplate:
    return KeyTemplate("", "c" + separator, separator, "", "c")


def encoding(keys: KeyTemplate) -> JSON:
    """Return the chunk_key_encoding for the result of chunk_keys()."""
    return {"name": "default" if keys.prefix else "v2", "configuration": {"separator": keys.separator}}


def _data_type(array: ArrayMetadata) -> JSON:
    dtype = array.dtype
    if dtype.fields and (dtype.mixed or dtype.endian == "big"):
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
