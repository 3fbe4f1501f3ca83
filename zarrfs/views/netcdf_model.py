"""The description of a NetCDF-4 file that shows Zarr groups: its dimensions, variables and attributes.

Sources: NetCDF-4 file format specification (names, dimensions, coordinates); xarray's encoding of Zarr
(`_ARRAY_DIMENSIONS`, `_FillValue`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zarrfs.errors import ReadError
from zarrfs.store.api import split_key
from zarrfs.views.flat import flat_size
from zarrfs.views.hierarchy import Node
from zarrfs.views.netcdf_items import NOT_A_TIME, VariableForm, forms_of
from zarrfs.zarr import fillvalues
from zarrfs.zarr.codecs import check_codecs, inner_array
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import ArrayMetadata
from zarrfs.zarr.v2 import DIMENSIONS

ROOT = "array"  # the name of an array that is the whole store
_NAME_MAX = 240  # bytes; NetCDF has 256 (NC_MAX_NAME), a Zarr name 255; the rest is for suffixes
_RANK_MAX = 32  # H5S_MAX_RANK
_SIZE_MAX = 1 << 62  # bytes of all variables of a file
_CHUNK_MAX = (4 << 30) - 1  # bytes of a chunk of HDF5
_RESERVED = {  # attributes that the NetCDF library reserves
    "CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "DIMENSION_LABELS", "_Netcdf4Dimid", "_Netcdf4Coordinates",
    "_nc3_strict", "_NCProperties", "_FillValue", "_NCCOPY", "_IsNetcdf4", "_SuperblockVersion", "_Format",
}  # fmt: skip
_OF_THE_TYPE = {  # attributes that, by CF, have the type of their variable
    "missing_value", "valid_min", "valid_max", "valid_range", "actual_range", "flag_values", "flag_masks",
}  # fmt: skip
_FORBIDDEN = re.compile(r"[\x00-\x1f/\x7f]")
_OLD_NAME, _OLD_ATTRIBUTES, _OLD_DIMENSIONS = "zarr_name", "zarr_attribute_names", "zarr_dimension_names"

Attribute = tuple[str, str, JSON]  # name; "text" or the dtype of numbers; the value


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of the file, and the array whose items it shows."""

    node: Node
    form: VariableForm
    nbytes: int  # of its chunks


@dataclasses.dataclass(frozen=True)
class Description:
    """A NetCDF-4 file: `text` describes it in JSON for netcdf_header.write(), with the variables in this order."""

    text: bytes
    variables: tuple[Variable, ...]
    left_out: dict[str, str]  # why nodes are not in the file, by path


def describe(nodes: Iterable[Node], inlined: Mapping[str, tuple[VariableForm, ...] | str]) -> Description:
    """Describe the file that shows `nodes`: the root and all nodes below it, in any order.

    `inlined`: arrays whose items are kept with the header, by path, or the reason why they are left out. Raise
    MetadataError if the variables are larger than any file.
    """
    groups: dict[str, _Group] = {}
    arrays: dict[str, list[_Array]] = {}  # by group
    left_out: dict[str, str] = {}
    for node in sorted(nodes, key=lambda node: node.path.split("/")):
        above, name = split_key(node.path)
        if node.problem is not None:
            left_out[node.path] = node.problem
        if isinstance(node.metadata, ArrayMetadata):
            if above not in groups:  # the root is an array
                groups[above] = _Group([], {})
            try:
                arrays.setdefault(above, []).append(_array(node, node.metadata, inlined.get(node.path)))
            except MetadataError as exc:
                left_out[node.path] = str(exc)
        elif not node.childless:
            attributes = {} if node.metadata is None else node.metadata.attributes
            if not node.path:
                groups[""] = _Group([], attributes)
            elif above in groups:
                groups[node.path] = groups[above].child(name, attributes)
    counter = itertools.count()  # for phony dimensions: their numbers are unique in a file, as in the NetCDF library
    variables = [one for path, group in groups.items() for one in group.fill(arrays.get(path, []), counter)]
    total = sum(variable.nbytes for variable in variables)
    if total > _SIZE_MAX:
        raise MetadataError(f"its variables are larger than any file ({total} bytes)")
    document = {"groups": [group.as_json() for group in groups.values()]}
    return Description(json.dumps(document, separators=(",", ":")).encode(), tuple(variables), left_out)


class _Array(NamedTuple):
    """An array that the file can show."""

    name: str  # in its group
    node: Node
    metadata: ArrayMetadata
    forms: tuple[VariableForm, ...]
    chunks: tuple[int, ...] | None  # of HDF5; None if it is kept with the header


def _array(node: Node, array: ArrayMetadata, inlined: tuple[VariableForm, ...] | str | None) -> _Array:
    """Return an array as the file shows it. Raise MetadataError if it cannot."""
    if isinstance(inlined, str):
        raise MetadataError(inlined)
    if inlined is None:
        flat_size(array)
    forms = inlined or forms_of(array.dtype)
    if array.ndim + (forms[0].width > 0) > _RANK_MAX:
        raise MetadataError(f"shape: HDF5 has no arrays of {array.ndim} dimensions")
    for form in forms:
        fill_of(array, form)
    for reason in check_codecs(array):  # its chunks could not be read, nor a small file be opened
        raise MetadataError(reason)
    chunks = _chunks_of(array, forms) if inlined is None and all(array.shape) else None
    return _Array(split_key(node.path)[1] if node.path else ROOT, node, array, forms, chunks)


def _unique(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return `name`, with a number if it is taken."""
    found, number = name, 2
    while is_taken(found):
        found, number = f"{name}_{number}", number + 1
    return found


def valid_name(name: str) -> str:
    """Return `name`, or a similar name that NetCDF allows.

    Allowed are names in Unicode's form NFC without control characters, that begin with a letter, a digit or "_", and
    do not end in a space. Source: NetCDF user guide, "Permitted characters in netCDF names".
    """
    name = name.encode("utf-8", "replace").decode()
    name = _FORBIDDEN.sub("_", unicodedata.normalize("NFC", name)).replace("_nc4_non_coord_", "nc4_non_coord_")
    if name.endswith(" "):
        name = name.rstrip(" ") + "_"
    if not name or (name[0] < "\x80" and not (name[0].isalnum() or name[0] == "_")):
        name = f"_{name}"
    return name.encode()[:_NAME_MAX].decode(errors="ignore")


class _Group:
    """A group of the file, to which its variables are added."""

    def __init__(self, path: list[str], attributes: Mapping[str, JSON], old: str | None = None) -> None:
        self.path = path  # names in the file
        self._names: set[str] = set()  # of variables and groups
        self._below: set[str] = set()  # names of groups in it
        self._dimensions: dict[str, int] = {}
        self._named: dict[tuple[str, int], str] = {}  # dimensions by their name in the source, and their extent
        self._phonies: dict[str, int] = {}  # those of `_dimensions` that have no name in the source
        self._variables: list[dict[str, JSON]] = []
        hidden = {name: value for name, value in attributes.items() if not name.lower().startswith("_nc")}
        self._attributes = attributes_of(hidden, None, (() if old is None else ((_OLD_NAME, *_text(old)),)))

    def child(self, name: str, attributes: Mapping[str, JSON]) -> _Group:
        """Return a new group in this one."""
        shown = self._free(name)
        self._below.add(shown)
        return _Group([*self.path, shown], attributes, name if shown != name else None)

    def fill(self, arrays: list[_Array], counter: Iterator[int]) -> Iterator[Variable]:
        """Add the variables of `arrays` and yield them. `counter`: of phony dimensions."""
        called = {array.name: self._free(array.name) for array in arrays if not array.forms[0].suffix}
        # coordinates first: if arrays give one dimension name several extents, that of the coordinate keeps the name
        arrays.sort(key=lambda array: dimension_names(array.metadata)[:1] != (array.name,))
        for name, node, array, forms, chunks in arrays:
            dims: list[str] = []
            for given, extent in zip(dimension_names(array), array.shape, strict=True):
                if given is None:
                    dims.append(self._phony(extent, dims, counter))
                else:
                    dims.append(self._dimension(given, extent, called.get(given)))
            for form in forms:
                shown = self._free(name + form.suffix) if form.suffix else called[name]
                own = [*dims, self._dimension(f"string{form.width}", form.width, None)] if form.width else dims
                wide = (*chunks, form.width) if chunks is not None and form.width else chunks
                data = None if form.data is None else form.data.hex()
                self._variables.append(_variable(array, form, name, shown, own) | {"chunks": wide, "data": data})
                yield Variable(node, form, form.itemsize * items_of(array))

    def _free(self, name: str) -> str:
        """Return a name that NetCDF allows, like `name`, and that nothing else in the group has."""
        shown = _unique(valid_name(name), self._names.__contains__)
        self._names.add(shown)
        return shown

    def _dimension(self, name: str, extent: int, coordinate: str | None) -> str:
        """Return the dimension for a name and an extent; one name with two extents gets two dimensions.

        `coordinate`: the variable of the array with that name, if there is one.
        """
        if (name, extent) not in self._named:

            def is_taken(one: str) -> bool:
                by_other = one in self._names and coordinate is None
                return one in self._dimensions or one in self._below or by_other

            found = self._named[name, extent] = _unique(coordinate or valid_name(name), is_taken)
            self._dimensions[found] = extent
        return self._named[name, extent]

    def _phony(self, extent: int, taken: Sequence[str], counter: Iterator[int]) -> str:
        """Return a phony dimension of `extent` that is not in `taken`, the dimensions of the array so far."""
        for name, known in self._phonies.items():
            if known == extent and name not in taken:
                return name
        while True:
            name = f"phony_dim_{next(counter)}"
            if name not in self._dimensions and name not in self._names:
                self._dimensions[name] = self._phonies[name] = extent
                return name

    def as_json(self) -> JSON:
        """Return the group for netcdf_header.write()."""
        return {
            "path": self.path, "dimensions": self._dimensions, "attributes": self._attributes,
            "variables": self._variables,
        }  # fmt: skip


def _variable(array: ArrayMetadata, form: VariableForm, name: str, shown: str, dims: Sequence[str]) -> dict[str, JSON]:
    """Return a variable for netcdf_header.write(): the array `name` under the name `shown`."""
    old = dimension_names(array)
    fixed: list[Attribute] = [(key, "text", value) for key, value in form.attributes]
    if shown != name:
        fixed.append((_OLD_NAME, *_text(name)))
    if any(given is not None and given != dim for given, dim in zip(old, dims, strict=False)):
        fixed.append((_OLD_DIMENSIONS, "text", json.dumps(old)))
    fill = fill_of(array, form)
    if array.dtype.kind in "mM" and fill != _none(form):
        fixed.append(("missing_value", form.dtype, NOT_A_TIME))
    attributes = {
        key: value for key, value in array.attributes.items()
        if key != DIMENSIONS and not key.lower().startswith("_nc") and not (key == "_FillValue" and fill is not None)
    }  # fmt: skip
    return {
        "name": shown, "dims": dims, "dtype": form.dtype, "fill": None if fill is None else fill.hex(),
        "attributes": attributes_of(attributes, form.dtype, fixed),
    }  # fmt: skip


def items_of(array: ArrayMetadata) -> int:
    """Return the number of items in all chunks, with those beyond the edges, but no chunk longer than the array."""
    grid = (inner_array(array) or array).grid
    return grid.size * math.prod(map(min, grid.chunks, grid.shape))


def _chunks_of(array: ArrayMetadata, forms: Sequence[VariableForm]) -> tuple[int, ...]:
    """Return the shape of HDF5 chunks: that of Zarr, cut to the shape of the array.

    A single chunk that is too large for HDF5 is divided along its first dimensions, which does not change the order of
    items. Raise MetadataError for larger chunks.
    """
    grid = (inner_array(array) or array).grid
    chunks = [*map(min, grid.chunks, grid.shape)]
    most = _CHUNK_MAX // max(form.itemsize for form in forms)  # items
    for at in range(len(chunks)):
        size = math.prod(chunks)
        if size <= most:
            break
        if grid.size > 1:
            raise MetadataError(f"chunks of {size * forms[0].itemsize:,} bytes: HDF5 has none of 4 GiB or more")
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


def fill_of(array: ArrayMetadata, form: VariableForm) -> bytes | None:
    """Return `_FillValue` by xarray's rules, as one element; None if the variable has none.

    For arrays of v2, of earlier generations and of the draft of v3, this is `fill_value`, or else the attribute; for
    v3, only the attribute; for times without either, NaT. Raise MetadataError for a date that is out of range.
    """
    if not form.has_fill_value:
        return None
    dtype = array.dtype
    if array.fill is not None and array.generation != "v3":
        item = np.frombuffer(array.fill, dtype.numpy)
        try:
            return (item if form.convert is None else form.convert(item)).tobytes()
        except ReadError as exc:
            raise MetadataError(f"fill_value: {exc.reason}") from None
    value = array.attributes.get("_FillValue")
    if value is not None:
        if dtype.kind == "f" and isinstance(value, str):
            value = fillvalues.float_of(value)
        cast = _cast(value, form.dtype)
        if cast is not None and cast.ndim == 0:
            return cast.tobytes()
    return _none(form) if dtype.kind in "mM" else None


def _none(form: VariableForm) -> bytes:
    """Return the bytes of NaT as an int64."""
    return NOT_A_TIME.to_bytes(8, "big" if form.dtype[0] == ">" else "little", signed=True)


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


def attributes_of(
    given: Mapping[str, JSON], dtype: str | None, fixed: Iterable[Attribute] = ()
) -> list[Attribute]:
    """Return attributes in the forms of NetCDF: text, or numbers of one type. Other values become JSON text.

    `dtype`: the element type of the variable. `fixed`: attributes that keep their names; given ones of the same name
    are renamed.
    """
    found: list[Attribute] = [*fixed]
    taken = {name for name, _, _ in found}
    renamed = {}
    for name, value in given.items():
        shown = valid_name(name)
        if name in _RESERVED or shown in taken:
            shown = "zarr_" + shown.lstrip("_")
        if shown != name:
            shown = _unique(shown, lambda one: one in taken or one in given)
        taken.add(shown)
        if shown != name:
            renamed[shown] = name
        found.append((shown, *_value(name, value, dtype)))
    if renamed:
        found.append((_OLD_ATTRIBUTES, "text", json.dumps(renamed)))
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
