"""Data types of arrays, in the notation of Zarr v2 (numpy's typestrs, lists of fields) and of Zarr v3 (names).

Source: Zarr v2 specification, "Data type encoding"; Zarr v3 core, "Data types"; zarr-extensions (struct, string,
bytes); documents that zarr-python 2.18 and 3.1 wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import TYPE_CHECKING, Any, Literal

from zarrfs.zarr.errors import MetadataError, Unsupported
from zarrfs.zarr.jsontext import JSON, named

if TYPE_CHECKING:
    import numpy as np

Endian = Literal["little", "big"]
Text = str | tuple[Any, ...]

ITEM_MAX = 16 << 20  # bytes; bounds the memory of fill values, which are stored as one item
_NESTED_MAX = 32  # fields within fields
_TYPESTR = re.compile(r"([<>|=]?)([biufcmMSUVO])([0-9]{0,10})(?:\[([0-9]{0,10})([A-Za-zμ]{1,7})\])?")
_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 16), "c": (8, 16, 32), "m": (8,), "M": (8,)}
_UNITS = {"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"}
_ORDERS: dict[str, Endian] = {"<": "little", ">": "big", "": "little", "=": "little", "|": "little"}
_SIGNS = {"little": "<", "big": ">", None: "|"}
_SMALL = {  # bytes of an item of the number types of zarr-extensions that numpy lacks
    "bfloat16": 2, **dict.fromkeys((
        "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "int2", "int4",
    ), 1),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataType:
    """The type of an item. `text` is its dtype in Zarr v2 in canonical form: equal types have equal texts."""

    text: Text  # numpy's typestr, or a tuple of fields: (name, text) or (name, text, shape)
    itemsize: int  # bytes; 0 if items have no fixed size (kinds O, T, B)
    kind: str  # numpy's: b i u f c m M S U V; also T (text of any length), B (bytes of any length), O (other objects)
    endian: Endian | None  # None: single bytes, no fixed size, or mixed
    mixed: bool = False  # fields have different byte orders
    name: str = ""  # set for number types that numpy lacks (_SMALL): `text` is that of raw bytes

    @property
    def fields(self) -> tuple[tuple[str, DataType, tuple[int, ...]], ...] | None:
        """(name, type of an item, shape) of each field, with numpy's names; None for a type without fields."""
        if isinstance(self.text, str):
            return None
        return tuple(
            (name, _of_text(field[1]), field[2] if len(field) > 2 else ())
            for name, field in zip(_names(self.text), self.text, strict=True)
        )

    def numpy(self) -> np.dtype[Any]:
        """Return the numpy dtype; object if items have no fixed size.

        Padding becomes a field, so that no byte is lost. Raise MetadataError if numpy has no such type.
        """
        return _numpy(self.text)


TEXT = DataType("|O", 0, "T", None)
BYTES = DataType("|O", 0, "B", None)


@functools.lru_cache(1024)
def _numpy(text: Text) -> np.dtype[Any]:
    import numpy as np

    try:
        if isinstance(text, str):
            return np.dtype(text)
        fields = zip(_names(text), text, strict=True)
        return np.dtype([(name, _numpy(field[1]), *field[2:]) for name, field in fields])
    except (TypeError, ValueError) as error:
        raise MetadataError(f"dtype: {error}") from None


# -- Zarr v2


def parse_v2(value: JSON) -> DataType:
    """Parse the dtype of a document of v2, v1 or v0. Raise MetadataError."""
    if isinstance(value, str):
        return _small(value) if value in _SMALL else _typestr(value)
    if not isinstance(value, list | tuple):
        raise MetadataError("dtype: neither a string nor a list of fields")
    return _struct(_text(value, 0))


def _text(value: JSON, depth: int) -> Text:
    """Return the canonical text of a type or of fields. Raise MetadataError."""
    if isinstance(value, str):
        return _typestr(value).text
    if not isinstance(value, list | tuple) or not value:
        raise MetadataError("dtype: expected a string, or a list of fields that is not empty")
    if depth == _NESTED_MAX:
        raise MetadataError(f"dtype: more than {_NESTED_MAX} fields within fields")
    found = []
    for field in value:
        if not isinstance(field, list | tuple) or len(field) not in (2, 3) or not isinstance(field[0], str):
            raise MetadataError("dtype: expected fields of a name, a dtype and perhaps a shape")
        shape = (_shape(field[2]),) if len(field) == 3 else ()
        found.append((field[0], _text(field[1], depth + 1), *shape))
    return tuple(found)


def _shape(value: JSON) -> tuple[int, ...]:
    found = (value,) if type(value) is int else value
    if not isinstance(found, list | tuple) or len(found) > _NESTED_MAX:
        raise MetadataError("dtype: expected the shape of a field to be whole numbers")
    if any(type(item) is not int or item < 1 for item in found):
        raise MetadataError("dtype: expected the shape of a field to be whole numbers, 1 or more")
    return tuple(found)


@functools.lru_cache(4096)
def _typestr(value: str) -> DataType:
    match = _TYPESTR.fullmatch(value)
    if match is None:
        if value in _NAMES:  # written by old releases, and accepted by numpy
            return _of_text(_NAMES[value])
        raise Unsupported(f"dtype: {value[:60]!r} is not known")
    order, kind, digits, factor, unit = match.groups()
    if kind == "O":
        return DataType("|O", 0, "O", None)
    number = int(digits) if digits else 0
    if number not in _SIZES.get(kind, (number,)) or number < 1 or (unit and kind not in "mM"):
        raise Unsupported(f"dtype: {value[:60]!r} is not known")
    size = 4 * number if kind == "U" else number
    if size > ITEM_MAX:
        raise Unsupported(f"dtype: items over {ITEM_MAX} bytes")
    endian = _ORDERS[order] if kind in "iufcmMU" and (number > 1 or kind == "U") else None
    text = f"{_SIGNS[endian]}{kind}{number}{_unit_text(unit, factor)}"
    return DataType(text, size, kind, endian)


def _names(text: tuple[Any, ...]) -> list[str]:
    """Return the names of fields. Padding gets the name that numpy gives it, such as f1, made unique."""
    taken = {field[0] for field in text}
    found = []
    for at, field in enumerate(text):
        name = field[0] or f"f{at}"
        while not field[0] and name in taken:
            name += "_"
        taken.add(name)
        found.append(name)
    return found


def _unit_text(unit: str | None, factor: str | None) -> str:
    unit = "us" if unit == "μs" else unit
    if unit is None:
        return ""
    number = int(factor) if factor else 1
    if unit not in _UNITS or not 0 < number <= ITEM_MAX or (unit == "generic" and number != 1):
        raise Unsupported("dtype: a unit of time that is not known")
    return "" if unit == "generic" else f"[{'' if number == 1 else number}{unit}]"


def _of_text(text: Text) -> DataType:
    """Return the type whose canonical text is `text`."""
    return _typestr(text) if isinstance(text, str) else _struct(text)


def _struct(text: Text) -> DataType:
    size, orders = 0, set()
    names = [field[0] for field in text if field[0]]
    if len(set(names)) < len(names):
        raise MetadataError("dtype: two fields with the same name")
    for field in text:
        inner = _of_text(field[1])
        if not inner.itemsize:
            raise Unsupported("dtype: a field of objects")
        size += inner.itemsize * (math.prod(field[2]) if len(field) > 2 else 1)
        if inner.mixed:
            orders |= {"little", "big"}
        elif inner.endian:
            orders.add(inner.endian)
    if size > ITEM_MAX:
        raise Unsupported(f"dtype: items over {ITEM_MAX} bytes")
    endian: Endian | None = None if len(orders) != 1 else "big" if "big" in orders else "little"
    return DataType(text, size, "V", endian, len(orders) == 2)


def _small(name: str, endian: Endian = "little") -> DataType:
    """Return a number type that numpy lacks. Views pass on its items, and do not decode them."""
    return dataclasses.replace(raw(_SMALL[name]), name=name, endian=None if _SMALL[name] == 1 else endian)


def as_v2(dtype: DataType) -> JSON:
    """Return the dtype for a v2 document: a typestr or lists of fields. For objects, a filter states their kind."""
    return dtype.name or _as_lists(dtype.text)


def _as_lists(text: Text) -> JSON:
    if isinstance(text, str):
        return text
    return [[field[0], _as_lists(field[1]), *(list(shape) for shape in field[2:])] for field in text]


# -- Zarr v3

_V3 = {
    "bool": "|b1", "int8": "|i1", "int16": "<i2", "int32": "<i4", "int64": "<i8", "uint8": "|u1", "uint16": "<u2",
    "uint32": "<u4", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16",
}  # fmt: skip
_NAMES = {**_V3, "float128": "<f16", "complex256": "<c32"}
_FROM_TEXT = {text[1:]: name for name, text in _V3.items()}
_ANY_LENGTH = {"string": TEXT, "bytes": BYTES, "variable_length_bytes": BYTES}
_RAW = re.compile(r"r([1-9][0-9]{0,11})", re.ASCII)
_TIMES = {"numpy.datetime64": "M8", "numpy.timedelta64": "m8"}
_LENGTHS = {"fixed_length_utf32": ("U", 4), "null_terminated_bytes": ("S", 1), "raw_bytes": ("V", 1)}


def parse_v3(value: JSON, endian: Endian = "little") -> DataType:
    """Parse the data_type of a v3 document; `endian` is the byte order of its codec "bytes". Raise MetadataError."""
    name, _configuration = named(value, "data_type")
    if name in _SMALL:
        return _small(name, endian)
    return _ANY_LENGTH.get(name) or _of_text(_v3_text(value, _SIGNS[endian], 0))


def _v3_text(value: JSON, sign: str, depth: int) -> Text:
    name, configuration = named(value, "data_type")
    if name in _V3:
        return _V3[name].replace("<", sign)
    if match := _RAW.fullmatch(name):
        if int(match[1]) % 8:
            raise MetadataError(f"data_type: {name!r}: expected a multiple of 8 bits")
        return _typestr(f"|V{int(match[1]) // 8}").text
    if name in _TIMES:
        unit, factor = configuration.get("unit"), configuration.get("scale_factor", 1)
        if not isinstance(unit, str) or type(factor) is not int or not 0 < factor <= ITEM_MAX:
            raise MetadataError(f"data_type: {name}: unit and scale_factor")
        return _typestr(f"{sign}{_TIMES[name]}[{factor}{unit}]").text
    if name in _LENGTHS:
        kind, width = _LENGTHS[name]
        length = configuration.get("length_bytes")
        if type(length) is not int or length < 1 or length > ITEM_MAX or length % width:
            raise MetadataError(f"data_type: {name}: length_bytes")
        return _typestr(f"{sign}{kind}{length // width}").text
    fields = configuration.get("fields")
    if name not in ("struct", "structured") or depth == _NESTED_MAX:
        raise Unsupported(f"data_type: {name[:60]!r} is not known, or not as the type of a field")
    if not isinstance(fields, list | tuple) or not fields:
        raise MetadataError(f"data_type: {name}: expected a list of fields that is not empty")
    return tuple(_v3_field(field, sign, depth + 1) for field in fields)


def _v3_field(field: JSON, sign: str, depth: int) -> tuple[str, Text]:
    name, inner = None, None
    if isinstance(field, dict):  # struct
        name, inner = field.get("name"), field.get("data_type")
    elif isinstance(field, list | tuple) and len(field) == 2:  # structured, as zarr-python 3.1 writes it
        name, inner = field
    if not isinstance(name, str) or not name:
        raise MetadataError("data_type: expected fields of a name and a data type")
    return name, _v3_text(inner, sign, depth)


def as_v3(dtype: DataType) -> JSON:
    """Return the data_type for a v3 document, as zarr-python 3.1 writes it.

    Raise MetadataError with the reason if v3 has no such type.
    """
    if dtype.kind in "TB":
        return "string" if dtype.kind == "T" else "variable_length_bytes"
    if dtype.name:
        return dtype.name
    if dtype.mixed:
        raise MetadataError("dtype: v3 has no fields of different byte order")
    return _as_v3(dtype.text)


def _as_v3(text: Text) -> JSON:
    if not isinstance(text, str):
        for field in text:
            if len(field) > 2 and field[2]:
                raise MetadataError(f"dtype: v3 has no fields that are arrays ({field[0]})")
        # padding is a field of raw bytes, with the name that numpy gives it
        fields = [[name, _as_v3(field[1])] for name, field in zip(_names(text), text, strict=True)]
        return {"name": "structured", "configuration": {"fields": fields}}
    kind, itemsize = text[1], _typestr(text).itemsize
    if text[1:] in _FROM_TEXT:
        return _FROM_TEXT[text[1:]]
    if kind in "mM":
        match = _TYPESTR.fullmatch(text)
        factor, unit = (match[4], match[5]) if match else (None, None)
        times = {"unit": unit or "generic", "scale_factor": int(factor or 1)}
        return {"name": "numpy.datetime64" if kind == "M" else "numpy.timedelta64", "configuration": times}
    for name, (other, _width) in _LENGTHS.items():
        if kind == other:
            return {"name": name, "configuration": {"length_bytes": itemsize}}
    raise MetadataError(f"dtype: v3 has no {'objects' if kind == 'O' else text}")


def little_endian(dtype: DataType) -> DataType:
    """Return the type with all items, and all fields of items, in little-endian order."""
    if dtype.endian is None and not dtype.mixed:
        return dtype
    return dataclasses.replace(_of_text(_little_endian(dtype.text)), name=dtype.name)


def _little_endian(text: Text) -> Text:
    if isinstance(text, str):
        return text.replace(">", "<")
    return tuple((field[0], _little_endian(field[1]), *field[2:]) for field in text)


def raw(size: int) -> DataType:
    """Return the type of uninterpreted items of `size` bytes."""
    return _typestr(f"|V{size}")
