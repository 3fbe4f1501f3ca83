"""Data types of arrays: numpy's, in the notation of Zarr v2 (typestrs, lists of fields) and of Zarr v3 (names).

Source: Zarr v2 specification, "Data type encoding"; Zarr v3 core, "Data types"; zarr-extensions (struct, string,
bytes); documents that zarr-python 2.18 and 3.1 wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, Literal

import numpy as np

from zarrfs.zarr.errors import MetadataError, Unsupported
from zarrfs.zarr.jsontext import JSON, named

Endian = Literal["little", "big"]
Dtype = np.dtype[Any]

_ITEM_MAX = 16 << 20  # bytes; bounds the memory of fill values, which are stored as one item
_NESTED_MAX = 32  # fields within fields, and dimensions of a field
_TYPESTR = re.compile(  # numpy would also accept several types, shapes and names of C types
    r"[<>|=]?(O[0-9]?|[biufcSUV][0-9]{1,9}|[mM]8(\[([1-9][0-9]{0,8})?[A-Za-zμ]{1,7}\])?)"
)
_V3 = {  # by numpy's typestr without the byte order; numpy has the same names
    np.dtype(name).str[1:]: name for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128",
    )
}  # fmt: skip
_TYPESTRS = {name: text for text, name in _V3.items()}
_NAMES = (*_TYPESTRS, "float128", "complex256")  # in v2, written by old releases
_TIMES = {"numpy.datetime64": "M", "numpy.timedelta64": "m"}
_LENGTHS = {"fixed_length_utf32": ("U", 4), "null_terminated_bytes": ("S", 1), "raw_bytes": ("V", 1)}
_RAW = re.compile(r"r([1-9][0-9]{0,8})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class DataType:
    """The type of an item."""

    numpy: Dtype  # object if items have no fixed size; padding is a field, so that no byte is lost
    kind: str  # numpy's: b i u f c m M S U V; also T (text of any length), B (bytes of any length), O (other objects)

    @property
    def itemsize(self) -> int:
        """The bytes of an item; 0 if items have no fixed size."""
        return 0 if self.numpy.hasobject else self.numpy.itemsize

    @property
    def text(self) -> JSON:
        """The dtype in Zarr v2 in canonical form: a typestr, or lists of fields. For objects, a filter states more."""
        return _described(self.numpy)

    @functools.cached_property
    def endian(self) -> Endian | None:
        """The byte order; None for single bytes, items of no fixed size, and fields of several byte orders."""
        little, big = self.numpy == self.numpy.newbyteorder("<"), self.numpy == self.numpy.newbyteorder(">")
        return None if little == big else "little" if little else "big"


TEXT = DataType(np.dtype(object), "T")
BYTES = DataType(np.dtype(object), "B")


def fields_of(dtype: Dtype) -> list[tuple[str, Dtype]]:
    """Return (name, dtype) of each field; an empty list for a type without fields."""
    return [] if dtype.fields is None else [(name, dtype.fields[name][0]) for name in dtype.names or ()]


def parse_v2(value: JSON) -> DataType:
    """Parse the dtype of a document of v2, v1 or v0. Raise MetadataError."""
    found = _parsed(value, 0)
    return DataType(found, found.kind)


def _parsed(value: JSON, depth: int) -> Dtype:
    spec = value
    if isinstance(value, str):
        if value not in _NAMES and not _TYPESTR.fullmatch(value):
            raise Unsupported(f"dtype: {value[:60]!r} is not known")
    elif not isinstance(value, list | tuple) or not value:
        raise MetadataError("dtype: expected a string, or a list of fields that is not empty")
    elif depth == _NESTED_MAX:
        raise Unsupported(f"dtype: more than {_NESTED_MAX} fields within fields")
    else:
        spec = [_field(field, depth + 1) for field in value]
    try:
        found: Dtype = np.dtype(spec)
    except (TypeError, ValueError) as error:  # a size or a unit that numpy lacks, or fields of the same name
        raise (Unsupported if isinstance(value, str) else MetadataError)(f"dtype: {error}") from None
    if not 0 < found.itemsize <= _ITEM_MAX:
        raise Unsupported(f"dtype: items of no bytes, or over {_ITEM_MAX} bytes")
    if found.hasobject and found.names is not None:
        raise Unsupported("dtype: a field of objects")
    return found


def _field(value: JSON, depth: int) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) not in (2, 3) or not isinstance(value[0], str):
        raise MetadataError("dtype: expected fields of a name, a dtype and perhaps a shape")
    name, inner, *shapes = value
    shape = shapes[0] if shapes and isinstance(shapes[0], list | tuple) else shapes
    if len(shape) > _NESTED_MAX or any(type(extent) is not int or extent < 1 for extent in shape):
        raise MetadataError("dtype: expected the shape of a field to be whole numbers, 1 or more")
    return name, _parsed(inner, depth), tuple(shape)


def _described(dtype: Dtype) -> JSON:
    if dtype.names is None:
        return dtype.str
    return [
        [name, _described(inner.base), *([list(inner.shape)] if inner.shape else [])]
        for name, inner in fields_of(dtype)
    ]


def parse_v3(value: JSON, endian: Endian = "little") -> DataType:
    """Parse the data_type of a v3 document; `endian` is the byte order of its codec "bytes". Raise MetadataError."""
    name, _configuration = named(value, "data_type")
    if name in ("string", "bytes", "variable_length_bytes"):
        return TEXT if name == "string" else BYTES
    return parse_v2(_as_v2(value, ">" if endian == "big" else "<"))


def _as_v2(value: JSON, sign: str) -> JSON:
    """Convert a data_type of v3 to a dtype of v2 with the byte order `sign`."""
    name, configuration = named(value, "data_type")
    if name in _TYPESTRS:
        return sign + _TYPESTRS[name]
    if match := _RAW.fullmatch(name):
        if int(match[1]) % 8:
            raise MetadataError(f"data_type: {name!r}: expected a multiple of 8 bits")
        return f"V{int(match[1]) // 8}"
    if name in _TIMES:
        unit, factor = configuration.get("unit"), configuration.get("scale_factor", 1)
        if not isinstance(unit, str) or not unit.isalpha() or type(factor) is not int or factor < 1:
            raise MetadataError(f"data_type: {name}: unit and scale_factor")
        return f"{sign}{_TIMES[name]}8[{factor}{unit}]"
    if name in _LENGTHS:
        kind, width = _LENGTHS[name]
        length = configuration.get("length_bytes")
        if type(length) is not int or length < 1 or length % width:
            raise MetadataError(f"data_type: {name}: length_bytes")
        return f"{sign}{kind}{length // width}"
    fields = configuration.get("fields")
    if name not in ("struct", "structured"):
        raise Unsupported(f"data_type: {name[:60]!r} is not known, or not as the type of a field")
    if not isinstance(fields, list):
        raise MetadataError(f"data_type: {name}: expected a list of fields")
    # zarr-python 3.1 writes a field as a pair
    pairs = [(item.get("name"), item.get("data_type")) if isinstance(item, dict) else item for item in fields]
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 or not pair[0] for pair in pairs):
        raise MetadataError("data_type: expected fields of a name and a data type")
    return [(name, _as_v2(inner, sign)) for name, inner in pairs]


def as_v3(dtype: DataType) -> JSON:
    """Return the data_type for a v3 document, as zarr-python 3.1 writes it; a codec states the byte order.

    Raise MetadataError with the reason if v3 has no such type.
    """
    if dtype.kind in "TB":
        return "string" if dtype.kind == "T" else "variable_length_bytes"
    return _as_v3(dtype.numpy)


def _as_v3(dtype: Dtype) -> JSON:
    if dtype.names is not None:
        for name, inner in fields_of(dtype):
            if inner.shape:
                raise MetadataError(f"dtype: v3 has no fields that are arrays ({name})")
        fields = [[name, _as_v3(inner)] for name, inner in fields_of(dtype)]
        return {"name": "structured", "configuration": {"fields": fields}}
    if dtype.str[1:] in _V3:
        return _V3[dtype.str[1:]]
    for name, kind in _TIMES.items():
        if dtype.kind == kind:
            unit, factor = np.datetime_data(dtype)
            return {"name": name, "configuration": {"unit": unit, "scale_factor": factor}}
    for name, (kind, _width) in _LENGTHS.items():
        if dtype.kind == kind:
            return {"name": name, "configuration": {"length_bytes": dtype.itemsize}}
    raise MetadataError(f"dtype: v3 has no {'objects' if dtype.hasobject else dtype.str}")
