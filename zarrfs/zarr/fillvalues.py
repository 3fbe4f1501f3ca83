"""Fill values: conversion between the JSON of each generation and the bytes of one item.

Source: Zarr v2 specification, "Fill value encoding"; Zarr v3 core, "Fill value"; zarr-extensions (struct, string,
bytes); documents that zarr-python 2.18 and 3.1 wrote.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from typing import Any

import numpy as np

from zarrfs.zarr.dtypes import DataType, Dtype, Endian, fields_of
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import ArrayMetadata

Fill = tuple[bytes | None, JSON]  # (the bytes of an item, if items have a fixed size; else the value)

_DIGITS = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_BITS = re.compile(r"0x[0-9a-fA-F]*", re.ASCII)
_TOKENS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NOT_A_TIME = -(1 << 63)
_INVALID = (ValueError, TypeError, OverflowError)  # raised by conversions to bytes


def from_v2(value: JSON, dtype: DataType) -> Fill:
    """Parse a fill value of v2; null means undefined. Raise MetadataError."""
    kind, number = dtype.kind, type(value) in (int, float)
    if value is None or kind == "O":
        return None, value
    if kind == "B" and number:  # zarr-python 2 wrote 0 for all kinds of objects
        return None, b""
    if kind == "b" and number and value in (0, 1):
        value = bool(value)
    elif kind == "c" and not isinstance(value, list):
        value = [value, 0]
    elif kind == "V" and value == 0:
        value = ""
    elif kind == "U" and isinstance(value, str | int | float):
        value = str(value)[: dtype.itemsize // 4]
    try:
        if kind == "S" and isinstance(value, str | int | float):
            return _text_v2(value)[: dtype.itemsize].ljust(dtype.itemsize, b"\0"), None
        if kind in "mM" and isinstance(value, str):  # zarr-python 3.0 and releases before 2.2 wrote dates as text
            return np.array(value, dtype.numpy).tobytes(), None
        if kind in "SV" and not isinstance(value, str):
            raise TypeError
    except _INVALID:
        raise _wrong(value, dtype) from None
    return from_v3(value, dtype)


def from_v3(value: JSON, dtype: DataType) -> Fill:
    """Parse a fill value of v3, in every form that the specification allows. Raise MetadataError."""
    try:
        if dtype.itemsize:
            return _item(value, dtype.numpy), None
        if dtype.kind == "B":
            return None, _bytes(value)
        if isinstance(value, str | int | float):  # zarr-python converts numbers to text
            return None, str(value)
        raise TypeError
    except _INVALID:
        raise _wrong(value, dtype) from None


def value_of(data: bytes, dtype: Dtype) -> Any:
    """Convert an item of fixed size from bytes to Python: complex numbers to pairs, times to whole numbers."""
    item = np.frombuffer(data, dtype)[0]
    if dtype.kind == "V":
        return data
    if dtype.kind == "c":
        return [float(item.real), float(item.imag)]
    return float(item) if dtype.kind == "f" else item.astype("i8").item() if dtype.kind in "mM" else item.item()


def as_v2(array: ArrayMetadata) -> JSON:
    """Return the fill_value for a v2 document as strict JSON; None if it is undefined."""
    if not array.dtype.itemsize:
        value = array.fill_object
        return _base64(value) if isinstance(value, bytes) else value
    if array.dtype.kind == "S" and array.fill is not None:  # tensorstore demands the bytes of a whole item
        return _base64(array.fill)
    return None if array.fill is None else _as_json(array.fill, array.dtype.numpy)


def as_v3(array: ArrayMetadata) -> JSON:
    """Return the fill_value for a v3 document as strict JSON; the zero of the data type if it is undefined."""
    dtype = array.dtype
    if not dtype.itemsize:
        value = array.fill_object
        return (value or "") if dtype.kind == "T" else _base64(value or b"")
    data = bytes(dtype.itemsize) if array.fill is None else array.fill
    if dtype.kind in "mM" and value_of(data, dtype.numpy) == _NOT_A_TIME:
        return "NaT"
    return _as_json(data, dtype.numpy, bits=True)


def float_of(text: str) -> float | str:
    """Decode a float from an attribute of v3, where xarray writes it as base64 of a little-endian double.

    Also decodes "NaN", "Infinity" and "-Infinity". Return any other text unchanged.
    """
    if text in _TOKENS:
        return _TOKENS[text]
    try:
        found: float = struct.unpack("<d", base64.b64decode(text, validate=True))[0]
    except (ValueError, struct.error):
        return text
    return found


# -- conversion to bytes; these functions raise one of _INVALID


def _wrong(value: JSON, dtype: DataType) -> MetadataError:
    try:
        quoted = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or with too many digits
        quoted = f"an object of type {type(value).__name__}"
    shown = "fields" if dtype.numpy.names else dtype.text
    return MetadataError(f"fill_value: {quoted[:60]} is not a value of dtype {shown}")


def _item(value: JSON, dtype: Dtype) -> bytes:
    """Return the bytes of an item, padded with zeros."""
    kind, size = dtype.kind, dtype.itemsize
    if kind in "iumM":
        data = _whole(value, kind).to_bytes(size, _order(dtype), signed=kind != "u")
    elif kind == "f":
        data = _float(value, dtype)
    elif kind == "c" and isinstance(value, list) and len(value) == 2:
        data = _float(value[0], _part(dtype)) + _float(value[1], _part(dtype))
    elif kind == "b" and type(value) is bool:
        data = bytes([value])
    elif kind == "U" and isinstance(value, str):
        data = value.encode(f"utf-32-{_order(dtype)[0]}e", "surrogatepass")
    elif dtype.names and isinstance(value, dict) and value.keys() == set(dtype.names):
        data = b"".join(_item(value[name], inner) for name, inner in fields_of(dtype))
    elif kind in "SV":
        data = _bytes(value)
    else:
        raise TypeError
    if len(data) > size:
        raise ValueError
    return data.ljust(size, b"\0")


def _whole(value: JSON, kind: str) -> int:
    if value == "NaT" and kind in "mM":
        return _NOT_A_TIME
    text = isinstance(value, str) and kind in "iu" and _DIGITS.fullmatch(value)
    if text or (type(value) is float and value.is_integer()):
        return int(value)  # zarr-python 2 and 3 accept these, too
    if type(value) is not int:
        raise TypeError
    return value


def _float(value: JSON, dtype: Dtype) -> bytes:
    if isinstance(value, str) and _BITS.fullmatch(value) and len(value) == 2 + 2 * dtype.itemsize:
        return int(value, 16).to_bytes(dtype.itemsize, _order(dtype))
    if type(value) not in (int, float, str):  # text, such as "NaN", is converted because zarr-python accepts it
        raise TypeError
    with np.errstate(all="ignore"):  # floats that are too large become infinite
        data = np.array(float(value), dtype).tobytes()
    if dtype.itemsize == 16 and np.finfo(dtype).nmant == 63:  # ten bytes, and padding that numpy does not initialise
        data = data[:10] + bytes(6) if _order(dtype) == "little" else bytes(6) + data[6:]
    return data


def _bytes(value: JSON) -> bytes:
    """Decode base64, or a list of numbers."""
    if isinstance(value, str):
        return binascii.a2b_base64(value)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise TypeError
    return bytes(value)


def _text_v2(value: str | float) -> bytes:
    """Decode base64, or the plain text or number that zarr-python wrote before 2.2."""
    try:
        return binascii.a2b_base64(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return str(value).encode("ascii")


def _order(dtype: Dtype) -> Endian:
    return "big" if dtype.str[0] == ">" else "little"


def _part(dtype: Dtype) -> Dtype:
    """Return the dtype of the real and of the imaginary part of a complex one."""
    return np.dtype(f"{dtype.str[0]}f{dtype.itemsize // 2}")


# -- conversion to JSON


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _as_json(data: bytes, dtype: Dtype, bits: bool = False) -> JSON:
    """Return an item as JSON, with infinities and NaN as text; `bits`: a NaN with sign or payload in hexadecimal."""
    if dtype.kind == "c":
        half, part = dtype.itemsize // 2, _part(dtype)
        return [_as_json(data[:half], part, bits), _as_json(data[half:], part, bits)]
    value = value_of(data, dtype)
    if dtype.kind != "f":
        return _base64(value) if isinstance(value, bytes) else value
    if bits and math.isnan(value) and dtype.itemsize <= 8 and data != _float(math.nan, dtype):
        return "0x" + (data if _order(dtype) == "big" else data[::-1]).hex()
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
