"""Arrays and groups of any generation as documents of Zarr v2.

Source: Zarr v2 specification; what zarr-python 2.18 and 3.1 read; xarray's conventions for v2 (dimension names).
"""

from __future__ import annotations

from zarrfs.zarr import dtypes, fillvalues
from zarrfs.zarr.asv3 import DIMENSIONS, plain_keys
from zarrfs.zarr.codecorder import PREFIX
from zarrfs.zarr.errors import JSON, MetadataError
from zarrfs.zarr.model import ArrayMetadata, CodecSpec, GroupMetadata
from zarrfs.zarr.strictjson import strict_json

_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")  # in the order of blosc's numbers
_OBJECTS = ("vlen-utf8", "vlen-bytes")  # serializers of v3 that are filters of v2
GROUP: dict[str, JSON] = {"zarr_format": 2}


def array_document(array: ArrayMetadata) -> bytes:
    """The .zarray of an array. MetadataError says why v2 cannot have it."""
    return strict_json(array_json(array))


def array_json(array: ArrayMetadata) -> dict[str, JSON]:
    """As array_document(), not yet text."""
    if array.storage_transformers:
        raise MetadataError("storage transformers, which Zarr v2 does not have")
    order, filters, compressor = _codecs(array)
    found: dict[str, JSON] = {
        "zarr_format": 2,
        "shape": list(array.shape),
        "chunks": list(array.grid.chunks),
        "dtype": dtypes.as_v2(array.dtype),
        "compressor": compressor,
        "fill_value": _fill_value(array),
        "order": order,
        "filters": filters or None,
    }
    if plain_keys(array).separator != ".":
        found["dimension_separator"] = plain_keys(array).separator
    return found


def _fill_value(array: ArrayMetadata) -> JSON:
    """The fill value of v2. MetadataError where that would be read as another one."""
    value, dtype = fillvalues.as_v2(array), array.dtype
    if array.generation != "v3" or array.fill is None:
        return value
    if dtype.kind == "M" and "[" not in dtype.text:  # numpy makes no date without a unit of a number
        if fillvalues.from_v2("NaT", dtype)[0] != array.fill:
            raise MetadataError(f"fill_value: {value}, a date without a unit, which no reader of Zarr v2 takes")
        return "NaT"
    if fillvalues.from_v2(value, dtype)[0] != array.fill:
        shown = fillvalues.as_v3(array)
        raise MetadataError(f"fill_value: {shown}, a NaN with a sign or bits of its own, which Zarr v2 does not have")
    return value


def attributes_json(node: ArrayMetadata | GroupMetadata) -> dict[str, JSON]:
    """The .zattrs of a node, not yet text; it may be empty."""
    found = dict(node.attributes)
    names = node.dimension_names if isinstance(node, ArrayMetadata) else None
    if names is not None and DIMENSIONS not in found and all(name is not None for name in names):
        found[DIMENSIONS] = list(names)
    return found


def _codecs(array: ArrayMetadata) -> tuple[str, list[JSON], JSON]:
    """(order, filters, compressor)."""
    order, filters, rest = "C", list[JSON](), list(array.codecs)
    if rest and rest[0].name == "transpose":
        axes = rest.pop(0).configuration.get("order")
        if axes in ("F", [*range(array.ndim)][::-1]):
            order = "F"
        elif axes not in ("C", [*range(array.ndim)]):
            raise MetadataError(f"codec transpose of {axes}, where Zarr v2 has the orders C and F")
    after = False  # the serializer
    for spec in rest:
        if spec.name == "bytes":
            after = True
            continue
        if spec.name in _OBJECTS:
            after = True
        told = _codec(spec, array)
        if told["id"] == "crc32c" and spec.name == "crc32c":
            told["location"] = "end"
        filters.append(told)
    if not after:
        raise MetadataError("no codec that makes bytes of the array")
    if array.generation == "v3" and array.dtype.endian == "big" and rest[0].name.startswith(PREFIX):
        raise MetadataError("filters, and bytes that are turned around behind them, which Zarr v2 does not do")
    last = rest[-1].name
    compressor = None if last == "bytes" or last in _OBJECTS else filters.pop()
    return order, filters, compressor


def _codec(spec: CodecSpec, array: ArrayMetadata) -> dict[str, JSON]:
    """A filter or compressor of v2."""
    told = dict(spec.configuration)
    if spec.name.startswith(PREFIX):
        return {"id": spec.name.removeprefix(PREFIX), **told}
    if spec.name == "blosc":
        shuffle = told.get("shuffle", 1)
        number = _SHUFFLES.index(shuffle) if shuffle in _SHUFFLES else shuffle
        told.pop("typesize", None)
        return {"id": "blosc", **told, "shuffle": number}
    if spec.name == "zstd" and told.get("checksum") is False:  # the default, which old readers do not know
        del told["checksum"]
    if spec.name in ("gzip", "zstd", "crc32c", *_OBJECTS):
        return {"id": spec.name, **told}
    if spec.name == "sharding_indexed":
        raise MetadataError("chunks in shards, which Zarr v2 does not have")
    raise MetadataError(f"codec {spec.name}, which Zarr v2 does not have")
