"""The description of a NetCDF-4 file that shows Zarr groups: its dimensions, variables and attributes.

Sources: NetCDF-4 file format specification (names, dimensions, coordinates); NetCDF user guide, "Permitted characters
in netCDF names" and "External data types"; CF conventions 1.11, 4.4 (time coordinate); xarray's encoding of Zarr
(`_ARRAY_DIMENSIONS`, `_FillValue`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from zarrfs.errors import ReadError
from zarrfs.store.api import split_key
from zarrfs.views.flat import flat_size
from zarrfs.views.hierarchy import Node
from zarrfs.zarr import fillvalues
from zarrfs.zarr.codecs import check_codecs, inner_array
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import ArrayMetadata
from zarrfs.zarr.v2 import DIMENSIONS

ROOT = "array"  # the name of an array that is the whole store
_NAME_MAX = 240  # bytes; NetCDF has 256 (NC_MAX_NAME); the rest is for _nc4_non_coord_
_NAME = re.compile(r"(?!_nc4_non_coord_)[0-9A-Za-z_\x80-\ud7ff\ue000-\U0010ffff][^\x00-\x1f/\x7f\ud800-\udfff]*(?<! )")
_RANK_MAX = 32  # H5S_MAX_RANK
_SIZE_MAX = 1 << 62  # bytes of all variables of a file
_CHUNK_MAX = (4 << 30) - 1  # bytes of a chunk of HDF5
_NOT_A_TIME = -(1 << 63)
_UNITS = {  # numpy's unit: unit of CF
    "D": "days", "h": "hours", "m": "minutes", "s": "seconds", "ms": "milliseconds", "us": "microseconds",
    "ns": "nanoseconds",
}  # fmt: skip
_SMALL = {"s", "ms", "us", "ns"}  # the units that xarray uses in memory
_RESERVED = {  # attributes that the NetCDF library reserves
    "CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "DIMENSION_LABELS", "_Netcdf4Dimid", "_Netcdf4Coordinates",
    "_nc3_strict", "_NCProperties", "_FillValue", "_NCCOPY", "_IsNetcdf4", "_SuperblockVersion", "_Format",
}  # fmt: skip
_OF_THE_TYPE = {  # attributes that, by CF, have the type of their variable
    "missing_value", "valid_min", "valid_max", "valid_range", "actual_range", "flag_values", "flag_masks",
}  # fmt: skip

Attribute = tuple[str, str, JSON]  # name; "text" or the dtype of numbers; the value


class Form(NamedTuple):
    """The form of the items of an array in a variable."""

    dtype: str  # numpy's typestr of an element, S1 for NC_CHAR
    width: int = 0  # elements of an item along a further dimension; 0: an item is one element
    attributes: Mapping[str, str] = {}  # those that a reader needs to interpret the items
    data: bytes | None = None  # the items, if they are kept with the header

    @property
    def itemsize(self) -> int:
        """The bytes of an item."""
        return np.dtype(self.dtype).itemsize * (self.width or 1)


class Variable(NamedTuple):
    """A variable of the file, and the array whose items it shows."""

    node: Node
    dtype: str | None  # of an item, if it is converted
    nbytes: int  # of its chunks


class Description(NamedTuple):
    """A NetCDF-4 file: `text` describes it in JSON for netcdf_header.write(), with the variables in this order."""

    text: bytes
    variables: list[Variable]
    left_out: dict[str, str]  # why nodes, or some of their attributes, are not in the file, by path


def describe(nodes: Iterable[Node], inlined: Mapping[str, Form | str]) -> Description:
    """Describe the file that shows `nodes`: the root and all nodes below it, in any order.

    `inlined`: arrays whose items are kept with the header, by path, or the reason why they are left out. Raise
    ReadError if the variables are larger than any file.
    """
    groups = {"": _Group("", {})}
    left_out: dict[str, str] = {}
    for node in sorted(nodes, key=lambda node: node.path.split("/")):
        above, name = split_key(node.path)
        if node.problem is not None:
            left_out[node.path] = node.problem
        try:
            if node.path and not is_valid_name(name):
                raise MetadataError("NetCDF does not allow this name")  # noqa: TRY301
            if above not in groups:
                raise MetadataError("its group is left out")  # noqa: TRY301
            if isinstance(node.metadata, ArrayMetadata):
                groups[above].arrays.append(_array(name or ROOT, node, node.metadata, inlined.get(node.path)))
            elif not node.childless:
                groups[node.path] = _Group(node.path, node.metadata.attributes if node.metadata else {})
                groups[above].below.add(name)
        except MetadataError as exc:
            left_out[node.path] = str(exc)
    variables: list[Variable] = []
    made = [group.described(variables, left_out) for group in groups.values()]
    total = sum(variable.nbytes for variable in variables)
    if total > _SIZE_MAX:
        raise ReadError("/", f"view=netcdf: its variables are larger than any file ({total} bytes)")
    return Description(json.dumps({"groups": made}, separators=(",", ":")).encode(), variables, left_out)


def is_valid_name(name: str) -> bool:
    """Return whether NetCDF allows a name of a group, a variable, a dimension or an attribute."""
    return (
        _NAME.fullmatch(name) is not None and unicodedata.is_normalized("NFC", name)
        and len(name.encode()) <= _NAME_MAX
    )  # fmt: skip


class _Array(NamedTuple):
    """An array that the file can show."""

    name: str  # in its group
    node: Node
    metadata: ArrayMetadata
    form: Form
    fill: bytes | None
    chunks: tuple[int, ...] | None  # of HDF5; None if it is kept with the header


def _array(name: str, node: Node, array: ArrayMetadata, inlined: Form | str | None) -> _Array:
    """Return an array as the file shows it. Raise MetadataError if it cannot."""
    if isinstance(inlined, str):
        raise MetadataError(inlined)
    if inlined is None:
        flat_size(array)
    form = inlined or form_of(array.dtype)
    if array.ndim + (form.width > 0) > _RANK_MAX:
        raise MetadataError(f"shape: HDF5 has no arrays of {array.ndim} dimensions")
    for reason in check_codecs(array):  # its chunks could not be read, nor a small file be opened
        raise MetadataError(reason)
    chunks = _chunks_of(array, form) if inlined is None and all(array.shape) else None
    return _Array(name, node, array, form, fill_of(array, form), chunks)


class _Group:
    """A group of the file, with its arrays and the names of the groups in it."""

    def __init__(self, path: str, attributes: Mapping[str, JSON]) -> None:
        self._path, self._attributes = path, attributes
        self.arrays: list[_Array] = []
        self.below: set[str] = set()
        self._dimensions: dict[str, int] = {}

    def described(self, variables: list[Variable], left_out: dict[str, str]) -> JSON:
        """Return the group for netcdf_header.write(); add its variables, and reasons for attributes left out."""
        made = []
        # coordinates first: if arrays give one dimension name several extents, that of the coordinate keeps the name
        self.arrays.sort(key=lambda array: dimension_names(array.metadata)[:1] != (array.name,))
        for name, node, array, form, fill, chunks in self.arrays:
            dims: list[str] = []
            for given, extent in zip(dimension_names(array), array.shape, strict=True):
                dims.append(self._dimension(given, extent, dims))
            if form.width:
                dims.append(self._dimension(f"string{form.width}", form.width, dims))
                chunks = None if chunks is None else (*chunks, form.width)
            fixed: list[Attribute] = [(key, "text", value) for key, value in form.attributes.items()]
            if array.dtype.kind in "mM" and fill != _none(form):
                fixed.append(("missing_value", form.dtype, _NOT_A_TIME))
            own = {key: value for key, value in array.attributes.items() if key != "_FillValue" or fill is None}
            made.append({
                "name": name, "dims": dims, "dtype": form.dtype, "chunks": chunks,
                "fill": None if fill is None else fill.hex(), "data": None if form.data is None else form.data.hex(),
                "attributes": fixed + _attributes(node.path, own, left_out, {one[0] for one in fixed}, form.dtype),
            })  # fmt: skip
            converted = form.dtype if array.dtype.kind == "f" and form.itemsize != array.dtype.itemsize else None
            variables.append(Variable(node, converted, form.itemsize * items_of(array)))
        return {
            "path": self._path.split("/") if self._path else [], "dimensions": self._dimensions, "variables": made,
            "attributes": _attributes(self._path, self._attributes, left_out),
        }  # fmt: skip

    def _dimension(self, name: str | None, extent: int, taken: list[str]) -> str:
        """Return the dimension for a name and an extent.

        Without a name, with one that NetCDF does not allow, or if the name has another extent or is that of a group,
        it is a phony dimension that is not in `taken`, the dimensions of the array so far.
        """
        for number in itertools.count():
            found = f"phony_dim_{extent}_{number}" if number > 1 else f"phony_dim_{extent}" if number else name or ""
            if (number and found in taken) or found in self.below or not is_valid_name(found):
                continue
            if self._dimensions.setdefault(found, extent) == extent:
                return found
        raise AssertionError("not reached")


def form_of(dtype: DataType) -> Form:
    """Return the form in which a variable shows items of `dtype`. Raise MetadataError if NetCDF has none."""
    kind, size, text = dtype.kind, dtype.itemsize, dtype.text if isinstance(dtype.text, str) else "with fields"
    if kind in "iu" or (kind == "f" and size in (4, 8)):
        return Form(text)
    if kind == "f" and size == 2:
        return Form("<f4")
    if kind == "b":
        return Form("|i1", attributes={"dtype": "bool"})
    if kind == "S":
        return Form("|S1", size if size > 1 else 0)  # one byte is an NC_CHAR already
    if kind in "mM":
        unit, count = np.datetime_data(dtype.numpy)
        if unit not in _UNITS or count != 1:
            raise MetadataError(f"dtype {text}: CF has no such unit of time")
        attributes = {"units": f"{_UNITS[unit]} since 1970-01-01", "calendar": "proleptic_gregorian"}
        if kind == "m":
            attributes = {"units": _UNITS[unit], "dtype": f"timedelta64[{unit if unit in _SMALL else 's'}]"}
        return Form(f"{text[0]}i8", attributes=attributes)
    raise MetadataError(f"dtype {text}: NetCDF-4 has no such type")


def items_of(array: ArrayMetadata) -> int:
    """Return the number of items in all chunks, with those beyond the edges, but no chunk longer than the array."""
    grid = (inner_array(array) or array).grid
    return grid.size * math.prod(map(min, grid.chunks, grid.shape))


def _chunks_of(array: ArrayMetadata, form: Form) -> tuple[int, ...]:
    """Return the shape of HDF5 chunks: that of Zarr, cut to the shape of the array.

    A single chunk that is too large for HDF5 is divided along its first dimensions, which does not change the order of
    items. Raise MetadataError for larger chunks.
    """
    grid = (inner_array(array) or array).grid
    chunks = [*map(min, grid.chunks, grid.shape)]
    most = _CHUNK_MAX // form.itemsize  # items
    for at in range(len(chunks)):
        size = math.prod(chunks)
        if size <= most:
            break
        if grid.size > 1:
            raise MetadataError(f"chunks of {size * form.itemsize:,} bytes: HDF5 has none of 4 GiB or more")
        chunks[at] = max(most // math.prod(chunks[at + 1 :]), 1) if not at else 1
    return tuple(chunks)


def dimension_names(array: ArrayMetadata) -> tuple[str | None, ...]:
    """Return the names of an array's dimensions; None for a dimension without a name."""
    given: Any = array.dimension_names
    if given is None:
        given = array.attributes.get(DIMENSIONS)
    if isinstance(given, list | tuple) and len(given) == array.ndim:
        return tuple(name if isinstance(name, str) and name else None for name in given)
    return (None,) * array.ndim


# -- fill values


def fill_of(array: ArrayMetadata, form: Form) -> bytes | None:
    """Return `_FillValue` by xarray's rules, as one element; None if the variable has none.

    For arrays of v2, of earlier generations and of the draft of v3, this is `fill_value`, or else the attribute; for
    v3, only the attribute; for times without either, NaT.
    """
    dtype = array.dtype
    if dtype.kind not in "iufmM":
        return None
    if array.fill is not None and array.generation != "v3":
        item = np.frombuffer(array.fill, dtype.numpy)
        return (item.astype(form.dtype) if dtype.kind == "f" else item).tobytes()
    value = array.attributes.get("_FillValue")
    if value is not None:
        if dtype.kind == "f" and isinstance(value, str):
            value = fillvalues.float_of(value)
        cast = _cast(value, form.dtype)
        if cast is not None and cast.ndim == 0:
            return cast.tobytes()
    return _none(form) if dtype.kind in "mM" else None


def _none(form: Form) -> bytes:
    """Return the bytes of NaT as an int64."""
    return _NOT_A_TIME.to_bytes(8, "big" if form.dtype[0] == ">" else "little", signed=True)


def _cast(value: JSON, dtype: str) -> np.ndarray[Any, Any] | None:
    """Convert numbers to `dtype`; return None if they would change by more than rounding, or are not numbers."""
    if np.dtype(dtype).kind not in "iuf" or not _are_numbers(value):
        return None
    with np.errstate(all="ignore"):
        try:
            given = np.array(value)
            cast = given.astype(dtype)
        except (ValueError, OverflowError, TypeError):
            return None
        if given.dtype.kind not in "iuf":
            return None
        if np.dtype(dtype).kind == "f":  # floats may be rounded
            return cast if np.array_equal(np.isfinite(cast), np.isfinite(given.astype("f8"))) else None
        same = all(int(a) == b for a, b in zip(cast.reshape(-1), given.reshape(-1).tolist(), strict=True))
        return cast if same else None


def _are_numbers(value: JSON) -> bool:
    """Return whether `value` is a number, or a list of numbers that is not empty."""
    if isinstance(value, list | tuple):
        return bool(value) and all(type(item) in (int, float) for item in value)
    return type(value) in (int, float)


# -- attributes


def _attributes(
    path: str, given: Mapping[str, JSON], left_out: dict[str, str], fixed: Iterable[str] = (), dtype: str | None = None
) -> list[Attribute]:
    """Return the attributes of a node in the forms of NetCDF: text, or numbers of one type; others become JSON text.

    Those that NetCDF cannot have are added to `left_out`. `fixed`: names that the view uses; `dtype`: the element type
    of the variable.
    """
    found: list[Attribute] = []
    dropped = []
    for name, value in given.items():
        if name == DIMENSIONS or name.lower().startswith("_nc"):
            continue
        if name in _RESERVED or name in fixed or not is_valid_name(name):
            dropped.append(name)
        else:
            found.append((name, *_value(name, value, dtype)))
    if dropped:
        names = json.dumps(dropped)
        left_out[path] = f"attributes {names[:200]}: names that NetCDF forbids or reserves, or that this view sets"
    return found


def _text(value: str) -> tuple[str, str]:
    """Return ("text", value): as JSON if UTF-8 cannot encode it, or it ends with NUL, which NetCDF would drop."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return "text", json.dumps(value)
    return "text", value if not value.endswith("\0") else json.dumps(value)


def _value(name: str, value: JSON, dtype: str | None) -> tuple[str, JSON]:
    if isinstance(value, str):
        return _text(value)
    if _are_numbers(value):
        if dtype is not None and name in _OF_THE_TYPE and (cast := _cast(value, dtype)) is not None:
            return dtype, cast.tolist()
        items = value if isinstance(value, list | tuple) else [value]
        if all(type(item) is int for item in items):
            low, high = min(items), max(items)
            for kind in ("<i4", "<i8", "<u8"):
                if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
                    return kind, value
        else:
            try:
                np.array(value, "f8")
            except OverflowError:
                return "text", json.dumps(value)
            return "<f8", value
    return "text", json.dumps(value)
