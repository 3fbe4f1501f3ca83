"""The form of the items of a Zarr data type in a NetCDF-4 variable: unchanged, or converted.

Sources: NetCDF user guide, "External data types"; CF conventions 1.11, 4.4 (time coordinate); files that xarray wrote.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from zarrfs.errors import ReadError
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError

Array = np.ndarray[Any, Any]
Convert = Callable[[Array], Array]

NOT_A_TIME = -(1 << 63)
_UNITS = {  # numpy's unit: unit of CF, how many of them
    "W": ("days", 7), "D": ("days", 1), "h": ("hours", 1), "m": ("minutes", 1), "s": ("seconds", 1),
    "ms": ("milliseconds", 1), "us": ("microseconds", 1), "ns": ("nanoseconds", 1),
}  # fmt: skip
_SMALL = {"s", "ms", "us", "ns"}  # the units that xarray uses in memory
_TIME = re.compile(r"[<>][mM]8(?:\[([0-9]*)([A-Za-z]+)\])?")


@dataclasses.dataclass(frozen=True)
class VariableForm:
    """The form of the items in one variable. An array of complex numbers has two variables."""

    dtype: str  # numpy's typestr of an element, S1 for NC_CHAR
    width: int = 0  # elements of an item along a further dimension; 0: an item is one element
    suffix: str = ""  # of the variable's name
    convert: Convert | None = None  # from items in the array's data type; None: the bytes are the same
    attributes: tuple[tuple[str, str], ...] = ()  # those that a reader needs to interpret the items
    has_fill_value: bool = True  # a _FillValue has the same meaning as in the array
    data: bytes | None = None  # the items, if they are kept with the header

    @property
    def itemsize(self) -> int:
        """The bytes of an item."""
        return np.dtype(self.dtype).itemsize * (self.width or 1)


def forms_of(dtype: DataType) -> tuple[VariableForm, ...]:
    """Return the form of each variable that shows an array of `dtype`. Raise MetadataError if NetCDF has none."""
    kind, size, text = dtype.kind, dtype.itemsize, dtype.text
    if dtype.name:
        raise MetadataError(f"dtype {dtype.name}: NetCDF-4 has no such type")
    if kind in "iu" or (kind == "f" and size in (4, 8)):
        assert isinstance(text, str)
        return (VariableForm(text),)
    if kind == "b":
        return (VariableForm("|i1", attributes=(("dtype", "bool"),), has_fill_value=False),)
    if kind == "f" and size == 2:
        return (VariableForm("<f4", convert=lambda items: items.astype("<f4")),)
    if kind == "c" and size in (8, 16):
        real = f"{'>' if dtype.endian == 'big' else '<'}f{size // 2}"
        return (
            VariableForm(real, 0, "_real", lambda items: np.ascontiguousarray(items.real), has_fill_value=False),
            VariableForm(real, 0, "_imag", lambda items: np.ascontiguousarray(items.imag), has_fill_value=False),
        )
    if kind in "mM":
        return (_time(dtype),)
    if kind == "S":
        return (VariableForm("|S1", size if size > 1 else 0, has_fill_value=False),)  # one byte is an NC_CHAR already
    if kind == "U":
        convert = _utf8(f"S{size}")  # an item of UTF-32 has room for its UTF-8
        encoding = ("_Encoding", "utf-8")
        return (VariableForm("|S1", size, convert=convert, attributes=(encoding,), has_fill_value=False),)
    raise MetadataError(f"dtype {_short(text)}: NetCDF-4 has no such type")


def _short(text: Any) -> str:
    return text if isinstance(text, str) else "with fields"


def _time(dtype: DataType) -> VariableForm:
    """Return the form of datetime64 or timedelta64: int64 with units of the CF conventions."""
    text = str(dtype.text)
    match = _TIME.fullmatch(text)
    factor, unit = (int(match[1] or 1), match[2]) if match and match[2] else (1, "")
    calendar = dtype.kind == "M" and unit in ("Y", "M")
    if not calendar and unit not in _UNITS:
        raise MetadataError(f"dtype {text}: CF has no such unit of time")
    convert: Convert | None
    if calendar:
        name, convert, element = "days", _dates(366 if unit == "Y" else 31, factor), "<i8"
    else:
        name, more = _UNITS[unit]
        factor *= more
        element = f"{text[0]}i8"
        convert = None if factor == 1 else _times(element, factor)
    attributes = ("units", f"{name} since 1970-01-01"), ("calendar", "proleptic_gregorian")
    if dtype.kind == "m":
        attributes = ("units", name), ("dtype", f"timedelta64[{unit if unit in _SMALL else 's'}]")
    return VariableForm(element, convert=convert, attributes=attributes)


def _missing(numbers: Array, most: int) -> Array:
    """Return a mask of the times that are NaT. Raise ReadError if another one, times `most`, exceeds int64."""
    none: Array = numbers == NOT_A_TIME
    limit = (2**63 - 1) // most
    if (~none & ((numbers > limit) | (numbers < -limit))).any():
        raise ReadError("", "a time that is out of the range of NetCDF's int64")
    return none


def _dates(days: int, factor: int) -> Convert:
    """Return a function that converts dates in years or months, which have at most `days` days, to days."""

    def convert(items: Array) -> Array:
        _missing(items.view(f"{items.dtype.str[0]}i8"), days * factor)
        return items.astype("M8[D]").view("<i8")

    return convert


def _times(element: str, factor: int) -> Convert:
    """Return a function that multiplies times by `factor`, except NaT."""

    def convert(items: Array) -> Array:
        numbers = items.view(element)
        none = _missing(numbers, factor)
        return np.where(none, NOT_A_TIME, np.where(none, 0, numbers) * factor).astype(element)

    return convert


def _utf8(into: str) -> Convert:
    """Return a function that encodes text as UTF-8, in items of the dtype `into`."""

    def convert(items: Array) -> Array:
        try:
            return np.char.encode(items, "utf-8").astype(into)
        except UnicodeError:
            raise ReadError("", "text with a character that UTF-8 does not have") from None

    return convert
