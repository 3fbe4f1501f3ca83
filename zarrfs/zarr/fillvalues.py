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

# (the bytes of an item, if items have a fixed size; the value, if they have none or numpy lacks their type)
Fill = tuple[bytes | None, JSON]

_DIGITS = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_BITS = re.compile(r"0x[0-9a-fA-F]*", re.ASCII)
_TOKENS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NOT_A_TIME = -(1 << 63)


def from_v2(value: JSON, dtype: DataType) -> Fill:
    """Parse a fill value of v2; null means undefined. Raise MetadataError."""
    kind, number = dtype.kind, type(value) in (int, float)
    if value is None or dtype.name or kind == "O":
        return None, value
    if kind == "B" and number:  # zarr-python 2 wrote 0 for all kinds of objects
        return None, b""
    if kind == "b" and number and value in (0, 1):
        value = bool(value)
    elif kind == "c" and not isinstance(value, list):
        value = [value, 0]
    elif kind == "V" and value == 0:
        return bytes(dtype.itemsize), None
    elif kind == "U" and isinstance(value, str | int | float):
        value = str(value)[: dtype.itemsize // 4]
    elif kind == "S" and isinstance(value, str | int | float):
        return _bytes_v2(value, dtype.numpy), None
    elif kind in "SV" and not isinstance(value, str):
        raise _wrong(value, dtype.numpy)
    elif kind in "mM" and isinstance(value, str):  # zarr-python 3.0 and releases before 2.2 wrote dates as text
        return _made(value, dtype.numpy), None
    return from_v3(value, dtype)


def from_v3(value: JSON, dtype: DataType) -> Fill:
    """Parse a fill value of v3, in every form that the specification allows. Raise MetadataError."""
    if dtype.name:
        return None, value
    if dtype.itemsize:
        return _item(value, dtype.numpy), None
    if dtype.kind == "T" and isinstance(value, str | int | float):  # zarr-python converts numbers to text
        return None, str(value)
    if dtype.kind == "B" and isinstance(value, str | list):
        return None, _bytes(value, dtype.numpy)
    raise _wrong(value, dtype.numpy)


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
    if array.dtype.name:
        return array.fill_object
    if array.dtype.kind == "S" and array.fill is not None:  # tensorstore demands the bytes of a whole item
        return _base64(array.fill)
    return None if array.fill is None else _as_json(array.fill, array.dtype.numpy)


def as_v3(array: ArrayMetadata) -> JSON:
    """Return the fill_value for a v3 document as strict JSON; the zero of the data type if it is undefined."""
    dtype = array.dtype
    if not dtype.itemsize:
        value = array.fill_object
        return (value or "") if dtype.kind == "T" else _base64(value or b"")
    if dtype.name:
        return 0 if array.fill_object is None else array.fill_object
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


# -- conversion to bytes


def _wrong(value: JSON, dtype: Dtype) -> MetadataError:
    try:
        quoted = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or with too many digits
        quoted = f"an object of type {type(value).__name__}"
    return MetadataError(f"fill_value: {quoted[:60]} is not a value of dtype {'fields' if dtype.names else dtype.str}")


def _made(value: Any, dtype: Dtype) -> bytes:
    """Return the bytes of an item that numpy makes of `value`; floats that are too large become infinite."""
    try:
        with np.errstate(all="ignore"):
            return np.array(value, dtype).tobytes()
    except (ValueError, TypeError, OverflowError):
        raise _wrong(value, dtype) from None


def _item(value: JSON, dtype: Dtype) -> bytes:
    """Return the bytes of an item. Raise MetadataError."""
    kind = dtype.kind
    if kind == "f":
        return _float(value, dtype)
    if kind in "iumM":
        return _integral(_NOT_A_TIME if value == "NaT" and kind in "mM" else value, dtype)
    if kind == "b" and type(value) is bool:
        return b"\1" if value else b"\0"
    if kind == "c" and isinstance(value, list) and len(value) == 2:
        return _float(value[0], _part(dtype)) + _float(value[1], _part(dtype))
    if kind == "U" and isinstance(value, str):
        return _padded(value.encode(f"utf-32-{_order(dtype)[0]}e", "surrogatepass"), value, dtype)
    if isinstance(value, dict) and dtype.names:
        if value.keys() != set(dtype.names):
            raise MetadataError("fill_value: not the fields of the data type")
        return b"".join(_item(value[name], inner) for name, inner in fields_of(dtype))
    if kind in "SV" and isinstance(value, str | list):
        return _padded(_bytes(value, dtype), value, dtype)
    raise _wrong(value, dtype)


def _integral(value: JSON, dtype: Dtype) -> bytes:
    text = isinstance(value, str) and dtype.kind in "iu" and _DIGITS.fullmatch(value)
    if text or (type(value) is float and value.is_integer()):
        value = int(value)  # zarr-python 2 and 3 accept these, too
    if type(value) is not int:
        raise _wrong(value, dtype)
    try:  # numpy 1 drops the bits that are too many
        return value.to_bytes(dtype.itemsize, _order(dtype), signed=dtype.kind != "u")
    except OverflowError:
        raise _wrong(value, dtype) from None


def _order(dtype: Dtype) -> Endian:
    return "big" if dtype.str[0] == ">" else "little"


def _part(dtype: Dtype) -> Dtype:
    """Return the dtype of the real and of the imaginary part of a complex one."""
    return np.dtype(f"{dtype.str[0]}f{dtype.itemsize // 2}")


def _float(value: JSON, dtype: Dtype) -> bytes:
    if type(value) not in (int, float, str):
        raise _wrong(value, dtype)
    if isinstance(value, str) and _BITS.fullmatch(value) and len(value) == 2 + 2 * dtype.itemsize:
        return int(value, 16).to_bytes(dtype.itemsize, _order(dtype))
    try:
        number = float(value)  # text, such as "NaN", is converted as well, because zarr-python accepts it
    except (ValueError, OverflowError):
        raise _wrong(value, dtype) from None
    try:
        return struct.pack(dtype.str[0] + dtype.char, number)
    except (struct.error, OverflowError):  # a size that struct lacks, and a number that becomes infinite
        return _made(number, dtype)


def _padded(data: bytes, value: JSON, dtype: Dtype) -> bytes:
    """Pad `data` with zeros to the size of an item. Raise MetadataError if it is longer."""
    if len(data) > dtype.itemsize:
        raise _wrong(value, dtype)
    return data.ljust(dtype.itemsize, b"\0")


def _bytes(value: str | list[JSON], dtype: Dtype) -> bytes:
    """Decode base64, or a list of numbers."""
    try:
        if isinstance(value, str):
            return binascii.a2b_base64(value)
        if all(type(item) is int for item in value):
            return bytes(value)
    except ValueError:
        pass
    raise _wrong(value, dtype)


def _bytes_v2(value: str | float, dtype: Dtype) -> bytes:
    """Decode base64, or the plain text or number that zarr-python wrote before 2.2."""
    try:
        data = binascii.a2b_base64(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        try:
            data = str(value).encode("ascii")
        except ValueError:
            raise _wrong(value, dtype) from None
    return data[: dtype.itemsize].ljust(dtype.itemsize, b"\0")


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
