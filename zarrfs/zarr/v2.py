"""Zarr v2: parse `.zarray` and `.zgroup`, and write nodes of any generation as such documents.

Source: Zarr v2 specification; zarr-python 2.18 and 3.1, which ignore unknown members, as this module does; xarray's
convention for dimension names.
"""

from __future__ import annotations

from collections.abc import Mapping

from zarrfs.zarr import dtypes, fillvalues
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.keys import FLAT, NESTED, KeyTemplate
from zarrfs.zarr.layout import Layout, check_chunk, required
from zarrfs.zarr.model import SHARDING, ArrayMetadata, CodecSpec, Generation, GroupMetadata
from zarrfs.zarr.pipelines import ARRAY_TO_BYTES, BLOSC_SHUFFLES, OBJECT_CODECS, PREFIX, pipeline_from_v2

DIMENSIONS = "_ARRAY_DIMENSIONS"  # xarray's attribute for what v3 calls dimension_names
FILL_ATTRIBUTE = "_FillValue"  # of the CF conventions
GROUP_DOCUMENT: dict[str, JSON] = {"zarr_format": 2}


# -- reading


def parse_array(
    document: Mapping[str, JSON], attributes: Mapping[str, JSON], layout: Layout, generation: Generation = "v2"
) -> ArrayMetadata:
    """Parse the members of a `.zarray`, or of a document of an older generation in this form. Raise MetadataError."""
    filters = document.get("filters") or []
    if not isinstance(filters, list):
        raise MetadataError("filters: neither null nor a list")
    compressor, grid = document.get("compressor"), layout.grid
    dtype = dtypes.parse_v2(required(document, "dtype"))
    if dtype.kind == "O":
        names = [codec.get("id") for codec in (*filters, compressor) if isinstance(codec, dict)]
        dtype = dtypes.TEXT if "vlen-utf8" in names else dtypes.BYTES if "vlen-bytes" in names else dtype
    check_chunk(grid, dtype.itemsize)
    fill, fill_object = fillvalues.from_v2(document.get("fill_value"), dtype)
    order = document.get("order", "C")
    if order not in ("C", "F"):
        raise MetadataError("order: neither C nor F")
    codecs = pipeline_from_v2(dtype, len(grid.shape) if order == "F" else 0, filters, compressor)
    return ArrayMetadata(
        generation, grid.shape, grid, dtype, fill, codecs, layout.keys, attributes,
        fill_object=fill_object, nested=layout.nested,
    )  # fmt: skip


# -- writing


def array_json(array: ArrayMetadata) -> dict[str, JSON]:
    """Return the members of the `.zarray` of an array. Raise MetadataError if v2 cannot express it."""
    order, filters, compressor = _codecs(array)
    document: dict[str, JSON] = {
        "zarr_format": 2,
        "shape": list(array.shape),
        "chunks": list(array.grid.chunks),
        "dtype": array.dtype.text,
        "compressor": compressor,
        "fill_value": _fill_value(array),
        "order": order,
        "filters": filters or None,
    }
    if chunk_keys(array).separator != ".":
        document["dimension_separator"] = chunk_keys(array).separator
    return document


def attributes_json(node: ArrayMetadata | GroupMetadata) -> dict[str, JSON]:
    """Return the members of the `.zattrs` of a node; empty if it needs no such document.

    xarray's conventions for v3 become those for v2: dimension names are an attribute, and a _FillValue is a number.
    """
    attributes = dict(node.attributes)
    if not isinstance(node, ArrayMetadata):
        return attributes
    names = node.dimension_names
    if names is None and node.generation == "v3" and not node.ndim:  # zarr-python writes no names for a scalar
        names = ()
    if names is None:
        return attributes
    if DIMENSIONS not in attributes and all(name is not None for name in names):
        attributes[DIMENSIONS] = list(names)
    value = attributes.get(FILL_ATTRIBUTE)
    if node.dtype.kind == "f" and isinstance(value, str):
        attributes[FILL_ATTRIBUTE] = fillvalues.float_of(value)
    elif node.dtype.kind == "c" and isinstance(value, list):
        attributes[FILL_ATTRIBUTE] = [fillvalues.float_of(part) if isinstance(part, str) else part for part in value]
    return attributes


def chunk_keys(array: ArrayMetadata) -> KeyTemplate:
    """Return the template of v2 chunk keys for an array of any generation: nested if its own keys are.

    Raise MetadataError if its keys have directories that do not correspond to a dimension.
    """
    keys = array.keys
    if "/" in keys.suffix or ("/" in keys.separator and keys.separator != "/"):
        raise MetadataError("chunk keys with directories that are not of a dimension")
    return NESTED if keys.separator == "/" else FLAT


def _fill_value(array: ArrayMetadata) -> JSON:
    """Return the fill value for v2. Raise MetadataError if readers of v2 would read another value."""
    value, dtype = fillvalues.as_v2(array), array.dtype
    if array.generation != "v3" or array.fill is None:
        return value
    if dtype.kind == "M" and "[" not in dtype.numpy.str:  # numpy cannot convert a number to a date without a unit
        if fillvalues.from_v2("NaT", dtype)[0] != array.fill:
            raise MetadataError(f"fill_value: {value}, a date without a unit, which no reader of Zarr v2 takes")
        return "NaT"
    if fillvalues.from_v2(value, dtype)[0] != array.fill:
        text = fillvalues.as_v3(array)
        raise MetadataError(f"fill_value: {text}, a NaN with a sign or bits of its own, which Zarr v2 does not have")
    return value


def _codecs(array: ArrayMetadata) -> tuple[str, list[JSON], JSON]:
    """Return (order, filters, compressor). Raise MetadataError if v2 does not have them."""
    order, filters, rest = "C", list[JSON](), list(array.codecs)
    if rest and rest[0].name == "transpose":
        axes = rest.pop(0).configuration["order"]
        if axes == [*range(array.ndim)][::-1]:
            order = "F"
        elif axes != [*range(array.ndim)]:
            raise MetadataError(f"codec transpose of {axes}, where Zarr v2 has the orders C and F")
    for spec in rest:
        if spec.name == "bytes":
            continue
        codec = _numcodec(spec)
        if codec["id"] == "crc32c" and spec.name == "crc32c":
            codec["location"] = "end"
        if codec["id"] == "shuffle" and codec.get("elementsize") is None:  # from Zarr v3: v2 has another default
            codec["elementsize"] = array.dtype.itemsize or 4
        filters.append(codec)
    if not any(spec.name == "bytes" or spec.name.removeprefix(PREFIX) in ARRAY_TO_BYTES for spec in rest):
        raise MetadataError("no codec that makes bytes of the array")
    last = rest[-1].name.removeprefix(PREFIX)
    compressor = None if last == "bytes" or last in OBJECT_CODECS else filters.pop()
    return order, filters, compressor


def _numcodec(spec: CodecSpec) -> dict[str, JSON]:
    """Return a codec as a filter or compressor of v2. Raise MetadataError if v2 does not have it."""
    configuration = dict(spec.configuration)
    if spec.name.startswith(PREFIX):
        return {"id": spec.name.removeprefix(PREFIX), **configuration}
    if spec.name == "blosc":
        shuffle = configuration.get("shuffle", 1)
        number = BLOSC_SHUFFLES.index(shuffle) if shuffle in BLOSC_SHUFFLES else shuffle
        configuration.pop("typesize", None)
        return {"id": "blosc", **configuration, "shuffle": number}
    if spec.name == "zstd":  # frames say whether they have a checksum; old readers and tensorstore reject the member
        configuration.pop("checksum", None)
    if spec.name in ("gzip", "zstd", "crc32c", "vlen-utf8", "vlen-bytes"):
        return {"id": spec.name, **configuration}
    if spec.name == SHARDING:
        raise MetadataError("chunks in shards, which Zarr v2 does not have")
    raise MetadataError(f"codec {spec.name}, which Zarr v2 does not have")
