"""Layout of arrays: chunk grid and chunk keys, parsed from a metadata document without data type and codecs.

Lookups on servers need no more, so this module does not import numpy. Source: Zarr v2 specification; Zarr v3 core;
zarr-extensions (chunk key encodings prefix and suffix); the Zarr v3 core protocol draft (prefix and suffix of keys).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from zarrfs.system.buffers import Buffer
from zarrfs.zarr.errors import MetadataError, Unsupported
from zarrfs.zarr.grid import Grid, one_for_empty
from zarrfs.zarr.jsontext import JSON, load_json, named
from zarrfs.zarr.keys import FLAT, NESTED, V0, KeyTemplate

DIMENSIONS_MAX = 64  # numpy's limit
_EXTENT_MAX = (1 << 63) - 1  # items of a dimension, and bytes of a chunk: the address space of a process
_META_MAX = 1 << 20  # bytes; documents of Zarr v1 are far shorter
_NESTED_MAX = 8  # key encodings within key encodings
_FORMATS = {"meta": 1, ".zarray": 2, ".zgroup": 2, "zarr.json": 3}
_GROUP_MEMBERS = {"zarr_format", "node_type", "attributes", "consolidated_metadata"}
_ARRAY_MEMBERS = {
    "zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value",
    "codecs", "storage_transformers", "dimension_names",
}  # fmt: skip


class OtherFile(MetadataError):
    """The error for a file of another program that has the name of a document: the file is ignored, not reported."""


class Experimental(Unsupported):
    """A `zarr.json` that is the entry point of the experimental v3; draft.entry_point() parses it."""


class Layout(NamedTuple):
    """The chunk grid of an array and the form of its chunk keys."""

    grid: Grid
    keys: KeyTemplate
    nested: KeyTemplate | None = None  # keys ("0/0") that old stores without dimension_separator may have in place


def load_document(name: str, data: Buffer) -> dict[str, JSON]:
    """Parse the JSON, or the pickle of zarr 0.3, of the document called `name`.

    Raise MetadataError, and OtherFile for a `meta` that has no zarr_format or more than 1 MiB, because other programs
    use the name, too.
    """
    if name == "__zmeta__" and bytes(data[:1]) != b"{":
        from zarrfs.zarr import pickles

        return pickles.load(bytes(data))
    if name == "meta" and (len(data) > _META_MAX or b'"zarr_format"' not in bytes(data)):
        raise OtherFile("not a document of Zarr v1")
    document = load_json(data)
    if name == "meta" and (not isinstance(document, dict) or "zarr_format" not in document):
        raise OtherFile("not a document of Zarr v1")
    if not isinstance(document, dict):
        raise MetadataError("not a JSON object")
    return document


def layout_of(name: str, document: Mapping[str, JSON]) -> Layout | None:
    """Return the layout of the array that the document called `name` describes; None if that is a group.

    Raise MetadataError if a member is invalid, or an extension that is not known must be understood.
    """
    if name == "zarr.json" and isinstance(document.get("zarr_format"), str):
        raise Experimental("zarr_format: an entry point of the experimental v3 of zarr-python 2, and no node")
    if name != "__zmeta__" and _zarr_format(document) != _FORMATS[name]:
        raise MetadataError(f"zarr_format is not {_FORMATS[name]}")
    if name == ".zgroup":
        return None
    if name == "zarr.json":
        return _layout_v3(document)
    grid = regular_grid(required(document, "shape"), required(document, "chunks"))
    if name != ".zarray":
        if not grid.shape:
            raise MetadataError("shape: no dimensions, which Zarr before v2 did not have")
        return Layout(grid, V0 if name == "__zmeta__" else FLAT)
    separator = document.get("dimension_separator")
    if separator not in (None, ".", "/"):
        raise MetadataError("dimension_separator: neither . nor /")
    nested = NESTED if separator is None and len(grid.shape) > 1 else None
    return Layout(grid, KeyTemplate.joined(separator=separator or "."), nested)


def _zarr_format(document: Mapping[str, JSON]) -> int:
    found = required(document, "zarr_format")
    return found if type(found) is int else 0


def _layout_v3(document: Mapping[str, JSON]) -> Layout | None:
    kind = required(document, "node_type")
    if kind not in ("array", "group"):
        raise MetadataError("node_type: neither array nor group")
    _check_members(document, _ARRAY_MEMBERS if kind == "array" else _GROUP_MEMBERS)
    if kind == "group":
        return None
    name, configuration = named(required(document, "chunk_grid"), "chunk_grid")
    if name != "regular":
        raise Unsupported(f"chunk_grid {name[:60]!r} is not known")
    _check_transformers(document.get("storage_transformers") or [])
    grid = regular_grid(required(document, "shape"), required(configuration, "chunk_shape"))
    return Layout(grid, _parse_encoding(required(document, "chunk_key_encoding")))


def required(document: Mapping[str, JSON], name: str) -> JSON:
    """Return a member of a document. Raise MetadataError if it is missing."""
    try:
        return document[name]
    except KeyError:
        raise MetadataError(f"{name} is missing") from None


def node_attributes(document: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the attributes of a node; null means none, as in zarr-python. Raise MetadataError."""
    found = document.get("attributes")
    if not isinstance(found, dict | None):
        raise MetadataError("attributes: not a JSON object")
    return found or {}


def regular_grid(shape: JSON, chunks: JSON) -> Grid:
    """Make the chunk grid of an array from its members shape and chunks, both in items.

    A chunk extent of 0 is accepted where the shape is 0 as well, and read as 1. Raise MetadataError.
    """
    try:
        grid = Grid(shape, one_for_empty(shape, chunks))
    except ValueError as error:
        raise MetadataError(str(error)) from None
    if len(grid.shape) > DIMENSIONS_MAX:
        raise Unsupported(f"shape: more than {DIMENSIONS_MAX} dimensions")
    if max(grid.shape, default=0) > _EXTENT_MAX:
        raise MetadataError("shape: over 2^63 - 1 items")
    check_chunk(grid, 1)
    return grid


def check_chunk(grid: Grid, itemsize: int) -> None:
    """Raise MetadataError for chunks that no process can address; decoding has a smaller bound."""
    size = itemsize
    for step in grid.chunks:
        size *= step
        if size > _EXTENT_MAX:
            raise MetadataError("chunks: over 2^63 - 1 bytes")


def _check_members(document: Mapping[str, JSON], known: Collection[str]) -> None:
    """Raise MetadataError for members that are not known and have to be understood."""
    for name, value in document.items():
        ignored = isinstance(value, dict) and value.get("must_understand") is False
        # early releases of zarr-python 3 wrote these two members with empty values
        empty = not value and name in ("extensions", "consolidated_metadata")
        if name not in known and not ignored and not empty:
            raise Unsupported(f"{name[:60]!r} must be understood, and is not known")


def _check_transformers(value: JSON) -> None:
    if not isinstance(value, list):
        raise MetadataError("storage_transformers: not a list")
    for item in value:
        name, _configuration = named(item, "storage_transformers")
        if not isinstance(item, dict) or item.get("must_understand") is not False:
            raise Unsupported(f"storage transformer {name[:60]!r} must be understood, and is not known")


def _parse_encoding(value: JSON, depth: int = 0) -> KeyTemplate:
    name, configuration = named(value, "chunk_key_encoding")
    separator, prefix, suffix = (_text(configuration, part) for part in ("separator", "prefix", "suffix"))
    if name in ("prefix", "suffix"):
        base = configuration.get("base_encoding", configuration.get("base-encoding", "default"))
        if depth == _NESTED_MAX:
            raise MetadataError(f"chunk_key_encoding: more than {_NESTED_MAX} within each other")
        inner = _parse_encoding(base, depth + 1)
        lead, tail = (prefix or "", "") if name == "prefix" else ("", suffix or "")
        return KeyTemplate(lead + inner.prefix, inner.separator, inner.suffix + tail, lead + inner.scalar + tail)
    if name not in ("default", "v2"):
        raise Unsupported(f"chunk_key_encoding {name[:60]!r} is not known")
    if prefix is None and suffix is None and separator not in (None, ".", "/"):
        raise MetadataError("chunk_key_encoding: the separator is neither . nor /")
    lead, usual = ("c", "/") if name == "default" else ("", ".")
    lead, usual = lead if prefix is None else prefix, usual if separator is None else separator
    return KeyTemplate.joined(lead, usual, suffix or "")


def _text(configuration: dict[str, Any], name: str) -> str | None:
    value = configuration.get(name)
    if value is not None and not isinstance(value, str):
        raise MetadataError(f"chunk_key_encoding: {name} is not text")
    return value
