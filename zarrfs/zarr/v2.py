"""Zarr v2: `.zarray` and `.zgroup`.

Source: Zarr v2 specification; what zarr-python 2.18 and 3.1 read. Members that are not known are ignored, as there.
"""

from __future__ import annotations

from zarrfs.zarr import dtypes, fillvalues, members
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import JSON, MetadataError
from zarrfs.zarr.keys import FLAT, NESTED
from zarrfs.zarr.members import required
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

_SEPARATORS = {None: FLAT, ".": FLAT, "/": NESTED}


def check_format(document: dict[str, JSON], number: int) -> None:
    """MetadataError where `zarr_format` is not `number`."""
    found = required(document, "zarr_format")
    if type(found) is not int or found != number:
        raise MetadataError(f"zarr_format is not {number}")


def group(document: dict[str, JSON], attributes: dict[str, JSON]) -> GroupMetadata:
    """The group of a `.zgroup`. MetadataError."""
    check_format(document, 2)
    return GroupMetadata("v2", attributes)


def array(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    """The array of a `.zarray`. MetadataError."""
    check_format(document, 2)
    filters = document.get("filters") or []
    if not isinstance(filters, list):
        raise MetadataError("filters: neither null nor a list")
    compressor = document.get("compressor")
    dtype = data_type(required(document, "dtype"), [*filters, compressor])
    separator = document.get("dimension_separator")
    if separator not in (None, ".", "/"):
        raise MetadataError("dimension_separator: neither . nor /")
    grid = members.regular_grid(required(document, "shape"), required(document, "chunks"), dtype)
    fill, fill_object = fillvalues.from_v2(document.get("fill_value"), dtype)
    dimensions = len(grid.shape) if is_order_f(document.get("order", "C"), "order") else 0
    codecs = members.from_v2(dtype, dimensions, filters, compressor)
    return ArrayMetadata(
        "v2", grid.shape, grid, dtype, fill, codecs, _SEPARATORS[separator], attributes,
        fill_object=fill_object, keys_assumed=separator is None,
    )  # fmt: skip


def is_order_f(value: JSON, name: str) -> bool:
    """Whether a member says that chunks are in order F; MetadataError for what is neither."""
    if value not in ("C", "F"):
        raise MetadataError(f"{name}: neither C nor F")
    return bool(value == "F")


def data_type(value: JSON, codecs: list[JSON]) -> DataType:
    """A dtype; which objects `|O` are is told by the codec that makes bytes of them. MetadataError."""
    dtype = dtypes.parse_v2(value)
    if dtype.kind == "O":
        names = {codec.get("id") for codec in codecs if isinstance(codec, dict) and isinstance(codec.get("id"), str)}
        if "vlen-utf8" in names:
            return dtypes.TEXT
        if "vlen-bytes" in names:
            return dtypes.BYTES
    return dtype
