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

ITEM_MAX = 16 << 20  # bytes; bounds the memory of fill values, which are stored as one item
_NESTED_MAX = 32  # fields within fields
_TYPESTR = re.compile(  # numpy would also accept several types, shapes and names of C types
    r"[<>|=]?(O[0-9]?|[biufcSUV][0-9]{1,9}|[mM]8(\[([1-9][0-9]{0,8})?[A-Za-zμ]{1,7}\])?)"
)
_SMALL = {  # bytes of an item of the number types of zarr-extensions that numpy lacks
    "bfloat16": 2, **dict.fromkeys((
        "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "int2", "int4",
    ), 1),
}  # fmt: skip
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
    name: str = ""  # set for number types that numpy lacks (_SMALL): `numpy` is that of raw bytes

    @property
    def itemsize(self) -> int:
        """The bytes of an item; 0 if items have no fixed size."""
        return 0 if self.numpy.hasobject else self.numpy.itemsize

    @property
    def text(self) -> JSON:
        """The dtype in Zarr v2 in canonical form: a typestr, or lists of fields."""
        return _described(self.numpy)

    @functools.cached_property
    def endian(self) -> Endian | None:
        """The byte order; None for single bytes, items of no fixed size, and fields of several byte orders."""
        if self.name:
            return "little" if self.itemsize > 1 else None
        little, big = self.numpy == self.numpy.newbyteorder("<"), self.numpy == self.numpy.newbyteorder(">")
        return None if little == big else "little" if little else "big"


def fields_of(dtype: Dtype) -> list[tuple[str, Dtype]]:
    """Return (name, dtype) of each field; an empty list for a type without fields."""
    return [] if dtype.fields is None else [(name, dtype.fields[name][0]) for name in dtype.names or ()]


TEXT = DataType(np.dtype(object), "T")
BYTES = DataType(np.dtype(object), "B")


def _checked(spec: Any) -> Dtype:
    """Make a dtype. Raise MetadataError."""
    try:
        found: Dtype = np.dtype(spec)
    except (TypeError, ValueError) as error:
        raise MetadataError(f"dtype: {error}") from None
    if not 0 < found.itemsize <= ITEM_MAX:
        raise Unsupported(f"dtype: items of no bytes, or over {ITEM_MAX} bytes")
    if found.hasobject and found.names is not None:
        raise Unsupported("dtype: a field of objects")
    return found


# -- Zarr v2


def parse_v2(value: JSON) -> DataType:
    """Parse the dtype of a document of v2, v1 or v0. Raise MetadataError."""
    if isinstance(value, str):
        return _of_typestr(value)
    found = _parsed(value, 0)
    return DataType(found, found.kind)


@functools.lru_cache(1024)
def _of_typestr(text: str) -> DataType:
    if text in _SMALL:
        return _small(text)
    found = _parsed(text, 0)
    return DataType(found, found.kind)


def _parsed(value: JSON, depth: int) -> Dtype:
    if isinstance(value, str):
        if value not in _NAMES and not _TYPESTR.fullmatch(value):
            raise Unsupported(f"dtype: {value[:60]!r} is not known")
        return _checked(value)
    if not isinstance(value, list | tuple) or not value:
        raise MetadataError("dtype: expected a string, or a list of fields that is not empty")
    if depth == _NESTED_MAX:
        raise MetadataError(f"dtype: more than {_NESTED_MAX} fields within fields")
    found = []
    for field in value:
        if not isinstance(field, list | tuple) or len(field) not in (2, 3) or not isinstance(field[0], str):
            raise MetadataError("dtype: expected fields of a name, a dtype and perhaps a shape")
        found.append((field[0], _parsed(field[1], depth + 1), *map(_shape, field[2:])))
    return _checked(found)


def _shape(value: JSON) -> tuple[int, ...]:
    found = (value,) if type(value) is int else value
    if not isinstance(found, list | tuple) or len(found) > _NESTED_MAX:
        raise MetadataError("dtype: expected the shape of a field to be whole numbers")
    if any(type(item) is not int or item < 1 for item in found):
        raise MetadataError("dtype: expected the shape of a field to be whole numbers, 1 or more")
    return tuple(found)


def _small(name: str) -> DataType:
    """Return a number type that numpy lacks. Views pass on its items, and do not decode them."""
    return DataType(np.dtype(f"V{_SMALL[name]}"), "V", name)


def as_v2(dtype: DataType) -> JSON:
    """Return the dtype for a v2 document: a typestr or lists of fields. For objects, a filter states their kind."""
    return dtype.name or dtype.text


def _described(dtype: Dtype) -> JSON:
    if dtype.names is None:
        return dtype.str
    return [
        [name, _described(inner.base), *([list(inner.shape)] if inner.shape else [])]
        for name, inner in fields_of(dtype)
    ]


# -- Zarr v3


def parse_v3(value: JSON, endian: Endian = "little") -> DataType:
    """Parse the data_type of a v3 document; `endian` is the byte order of its codec "bytes". Raise MetadataError."""
    name, _configuration = named(value, "data_type")
    if name in _SMALL:
        return _small(name)
    if name in ("string", "bytes", "variable_length_bytes"):
        return TEXT if name == "string" else BYTES
    sign = ">" if endian == "big" else "<"
    if name in _TYPESTRS:
        return _of_typestr(sign + _TYPESTRS[name])
    found = _parsed_v3(value, sign, 0)
    return DataType(found, found.kind)


def _parsed_v3(value: JSON, sign: str, depth: int) -> Dtype:
    name, configuration = named(value, "data_type")
    if name in _TYPESTRS:
        return np.dtype(sign + _TYPESTRS[name])
    if match := _RAW.fullmatch(name):
        if int(match[1]) % 8:
            raise MetadataError(f"data_type: {name!r}: expected a multiple of 8 bits")
        return _checked(f"V{int(match[1]) // 8}")
    if name in _TIMES:
        unit, factor = configuration.get("unit"), configuration.get("scale_factor", 1)
        if not isinstance(unit, str) or type(factor) is not int or factor < 1:
            raise MetadataError(f"data_type: {name}: unit and scale_factor")
        return _parsed(f"{sign}{_TIMES[name]}8[{factor}{unit}]", 0)
    if name in _LENGTHS:
        kind, width = _LENGTHS[name]
        length = configuration.get("length_bytes")
        if type(length) is not int or length < 1 or length > ITEM_MAX or length % width:
            raise MetadataError(f"data_type: {name}: length_bytes")
        return _checked(f"{sign}{kind}{length // width}")
    fields = configuration.get("fields")
    if name not in ("struct", "structured") or depth == _NESTED_MAX:
        raise Unsupported(f"data_type: {name[:60]!r} is not known, or not as the type of a field")
    if not isinstance(fields, list | tuple) or not fields:
        raise MetadataError(f"data_type: {name}: expected a list of fields that is not empty")
    return _checked([_field_v3(field, sign, depth + 1) for field in fields])


def _field_v3(field: JSON, sign: str, depth: int) -> tuple[str, Dtype]:
    name, inner = None, None
    if isinstance(field, dict):  # struct
        name, inner = field.get("name"), field.get("data_type")
    elif isinstance(field, list | tuple) and len(field) == 2:  # structured, as zarr-python 3.1 writes it
        name, inner = field
    if not isinstance(name, str) or not name:
        raise MetadataError("data_type: expected fields of a name and a data type")
    return name, _parsed_v3(inner, sign, depth)


def as_v3(dtype: DataType) -> JSON:
    """Return the data_type for a v3 document, as zarr-python 3.1 writes it; a codec states the byte order.

    Raise MetadataError with the reason if v3 has no such type.
    """
    if dtype.kind in "TB":
        return "string" if dtype.kind == "T" else "variable_length_bytes"
    return dtype.name or _as_v3(dtype.numpy)


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
