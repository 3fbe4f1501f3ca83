"""The form of the items of a Zarr data type in a NetCDF-4 variable: unchanged, or converted.

Sources: NetCDF user guide, "External data types"; CF conventions 1.11, 4.4 (time coordinate); files that xarray wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from zarrfs.errors import ReadError
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError

Array = np.ndarray[Any, Any]
Convert = Callable[[Array], Array]

NOT_A_TIME = -(1 << 63)
_UNITS = {  # numpy's unit: unit of CF
    "D": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds", "us": "microseconds",
    "ns": "nanoseconds",
}  # fmt: skip
_SMALL = {"s", "ms", "us", "ns"}  # the units that xarray uses in memory


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
    kind, text = dtype.kind, str(dtype.text)
    unit, count = np.datetime_data(dtype.numpy)
    shown = "D" if unit == "W" or (kind == "M" and unit in ("Y", "M")) else unit
    if shown not in _UNITS:
        raise MetadataError(f"dtype {text}: CF has no such unit of time")
    same = (unit, count) == (shown, 1)
    attributes = ("units", f"{_UNITS[shown]} since 1970-01-01"), ("calendar", "proleptic_gregorian")
    if kind == "m":
        attributes = ("units", _UNITS[shown]), ("dtype", f"timedelta64[{unit if unit in _SMALL else 's'}]")
    convert = None if same else _times(f"{kind}8[{shown}]")
    return VariableForm(f"{text[0]}i8" if same else "<i8", convert=convert, attributes=attributes)


def _times(into: str) -> Convert:
    """Return a function that converts times to the unit of the dtype `into`."""

    def convert(items: Array) -> Array:
        shown = items.astype(into)
        if ((shown.astype(items.dtype) != items) & ~np.isnat(items)).any():
            raise ReadError("", "a time that is out of the range of NetCDF's int64")
        return shown.view("<i8")

    return convert


def _utf8(into: str) -> Convert:
    """Return a function that encodes text as UTF-8, in items of the dtype `into`."""

    def convert(items: Array) -> Array:
        try:
            return np.char.encode(items, "utf-8").astype(into)
        except UnicodeError:
            raise ReadError("", "text with a character that UTF-8 does not have") from None

    return convert
