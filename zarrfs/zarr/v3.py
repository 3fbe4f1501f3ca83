"""Zarr v3: `zarr.json`.

Source: Zarr v3 core specification; zarr-extensions (chunk key encodings prefix and suffix); zarr-python 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

from zarrfs.zarr import dtypes, fillvalues, members
from zarrfs.zarr.dtypes import Endian
from zarrfs.zarr.errors import JSON, MetadataError
from zarrfs.zarr.keys import DEFAULT, FLAT, KeyTemplate
from zarrfs.zarr.members import required
from zarrfs.zarr.model import ArrayMetadata, CodecSpec, GroupMetadata
from zarrfs.zarr.v2 import check_format

_GROUP = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}
_ARRAY = {
    "zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value",
    "codecs", "storage_transformers", "dimension_names",
}  # fmt: skip
_NESTED_MAX = 8  # sharding within sharding, encodings within encodings


class Experimental(MetadataError):
    """A `zarr.json` that is the entry point of another version: draft.entry_point() says which."""


def node(document: dict[str, JSON]) -> ArrayMetadata | GroupMetadata:
    """The node of a `zarr.json`. MetadataError names also extensions that must be understood and are not."""
    if isinstance(document.get("zarr_format"), str):
        raise Experimental("zarr_format: an entry point of the experimental v3 of zarr-python 2, and no node")
    check_format(document, 3)
    kind = required(document, "node_type")
    if kind not in ("array", "group"):
        raise MetadataError("node_type: neither array nor group")
    attributes = document.get("attributes", {})
    if not isinstance(attributes, dict):
        raise MetadataError("attributes: not a JSON object")
    _check_extensions(document, _ARRAY if kind == "array" else _GROUP)
    return _array(document, attributes) if kind == "array" else GroupMetadata("v3", attributes)


def _check_extensions(document: dict[str, JSON], known: Collection[str]) -> None:
    for name in document.keys() - known:
        value = document[name]
        optional = isinstance(value, dict) and value.get("must_understand") is False
        # early releases of zarr-python 3 wrote these without content
        if not optional and not (name in ("extensions", "consolidated_metadata") and not value):
            raise MetadataError(f"{name[:60]!r} must be understood, and is not known")


def _array(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    codecs = _codecs(required(document, "codecs"), 0)
    endian = _endian(codecs, 0)
    dtype = dtypes.parse_v3(required(document, "data_type"), endian or "little")
    if endian is None and dtype.endian and _takes_items(codecs):
        raise MetadataError("codecs: bytes without endian, for items of several bytes")
    name, grid_configuration = _named(required(document, "chunk_grid"), "chunk_grid")
    if name != "regular":
        raise MetadataError(f"chunk_grid {name[:60]!r} is not known")
    chunks = required(grid_configuration, "chunk_shape")
    grid = members.regular_grid(required(document, "shape"), chunks, dtype)
    fill, fill_object = fillvalues.from_v3(required(document, "fill_value"), dtype)
    return ArrayMetadata(
        "v3", grid.shape, grid, dtype, fill, codecs, _encoding(required(document, "chunk_key_encoding")), attributes,
        _dimension_names(document.get("dimension_names"), len(grid.shape)),
        _storage_transformers(document.get("storage_transformers") or []), fill_object,
    )  # fmt: skip


def _named(value: JSON, where: str) -> tuple[str, dict[str, JSON]]:
    """Name and configuration of an extension point, which may be only a name."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict):
        name, configuration = value.get("name"), value.get("configuration", {})
        if isinstance(name, str) and isinstance(configuration, dict):
            return name, configuration
    raise MetadataError(f"{where}: expected a name, or an object with name and configuration")


def _codecs(value: JSON, depth: int) -> tuple[CodecSpec, ...]:
    if not isinstance(value, list) or not value:
        raise MetadataError("codecs: not a list, or empty")
    if depth == _NESTED_MAX:
        raise MetadataError(f"codecs: more than {_NESTED_MAX} shards within shards")
    found = []
    for item in value:
        name, configuration = _named(item, "codecs")
        if name == "endian":  # what the codec "bytes" was called before the specification was accepted
            name = "bytes"
        found.append(CodecSpec(name, configuration))
    return tuple(found)


def _endian(codecs: tuple[CodecSpec, ...], depth: int) -> Endian | None:
    """The byte order of items in chunks; None where no codec says it."""
    for codec in codecs:
        if codec.name == "bytes":
            endian = codec.configuration.get("endian")
            if endian not in (None, "little", "big"):
                raise MetadataError("codecs: bytes with an endian that is neither little nor big")
            return endian
        if codec.name == "sharding_indexed":
            return _endian(_codecs(codec.configuration.get("codecs"), depth + 1), depth + 1)
    return None


def _takes_items(codecs: tuple[CodecSpec, ...]) -> bool:
    """Whether the codec "bytes" gets items of the data type, and not what a filter made of them."""
    names = [codec.name for codec in codecs]
    return "bytes" in names and all(name == "transpose" for name in names[: names.index("bytes")])


def _encoding(value: JSON, depth: int = 0) -> KeyTemplate:
    """The chunk keys that an encoding makes."""
    name, configuration = _named(value, "chunk_key_encoding")
    if name in ("prefix", "suffix"):
        base = configuration.get("base_encoding", configuration.get("base-encoding", "default"))
        if depth == _NESTED_MAX:
            raise MetadataError(f"chunk_key_encoding: more than {_NESTED_MAX} within each other")
        return _extended(name, _text(configuration, name), _encoding(base, depth + 1))
    parts = (_text(configuration, part) for part in ("separator", "prefix", "suffix"))
    return _template(name, *parts)


def _extended(name: str, text: str | None, base: KeyTemplate) -> KeyTemplate:
    """A template with text before or behind all keys."""
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
    """The encodings of the specification; prefix and suffix as its first draft let them be configured."""
    if name not in ("default", "v2"):
        raise MetadataError(f"chunk_key_encoding {name[:60]!r} is not known")
    if prefix is None and suffix is None:
        if separator not in (None, ".", "/"):
            raise MetadataError("chunk_key_encoding: the separator is neither . nor /")
        usual = DEFAULT if name == "default" else FLAT
        return usual if separator in (None, usual.separator) else _joined(name, separator, None, None)
    return _joined(name, separator, prefix, suffix)


def _joined(name: str, separator: str | None, prefix: str | None, suffix: str | None) -> KeyTemplate:
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


def _storage_transformers(value: JSON) -> tuple[JSON, ...]:
    if not isinstance(value, list):
        raise MetadataError("storage_transformers: not a list")
    for item in value:
        name, _configuration = _named(item, "storage_transformers")
        if not isinstance(item, dict) or item.get("must_understand") is not False:
            raise MetadataError(f"storage transformer {name[:60]!r} must be understood, and is not known")
    return tuple(value)
