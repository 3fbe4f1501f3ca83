"""Members that the metadata documents of several generations share."""

from __future__ import annotations

from collections.abc import Mapping

from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError, Unsupported
from zarrfs.zarr.grid import Grid, one_for_empty
from zarrfs.zarr.jsontext import JSON

DIMENSIONS_MAX = 64  # numpy's limit
_EXTENT_MAX = (1 << 63) - 1  # items of a dimension, and bytes of a chunk: the address space of a process


def required(document: Mapping[str, JSON], name: str) -> JSON:
    """Return a member of a document. Raise MetadataError if it is missing."""
    try:
        return document[name]
    except KeyError:
        raise MetadataError(f"{name} is missing") from None


def check_format(document: dict[str, JSON], number: int) -> None:
    """Raise MetadataError unless `zarr_format` is `number`."""
    found = required(document, "zarr_format")
    if type(found) is not int or found != number:
        raise MetadataError(f"zarr_format is not {number}")


def node_attributes(document: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the attributes of a node; null means none, as in zarr-python. Raise MetadataError."""
    found = document.get("attributes")
    if not isinstance(found, dict | None):
        raise MetadataError("attributes: not a JSON object")
    return found or {}


def regular_grid(shape: JSON, chunks: JSON, dtype: DataType) -> Grid:
    """Make the chunk grid of an array from its members shape and chunks, both in items.

    A chunk extent of 0 is accepted where the shape is 0 as well, and read as 1. Raise MetadataError if the members are
    invalid, or chunks have more than 2^63 - 1 bytes, which no process can address (decoding has a smaller bound).
    """
    try:
        grid = Grid(shape, one_for_empty(shape, chunks))
    except ValueError as error:
        raise MetadataError(str(error)) from None
    if len(grid.shape) > DIMENSIONS_MAX:
        raise Unsupported(f"shape: more than {DIMENSIONS_MAX} dimensions")
    size = dtype.itemsize or 1
    for extent, step in zip(grid.shape, grid.chunks, strict=True):
        size *= step
        if extent > _EXTENT_MAX or size > _EXTENT_MAX:
            raise MetadataError("shape, chunks: over 2^63 - 1 items, or bytes in a chunk")
    return grid
