"""Fill values: from the JSON of each generation to the bytes of one item, and back.

Source: Zarr v2 specification, "Fill value encoding"; Zarr v3 core, "Fill value"; numpy 1 for v0 and v1.
"""

from __future__ import annotations

from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.model import JSON, ArrayMetadata

Fill = tuple[bytes | None, JSON]  # the bytes of an item, and the value itself where items have no fixed size


def from_v0_v1(value: JSON, dtype: DataType) -> Fill:
    """A fill value cast as numpy 1 did it; null: undefined. MetadataError."""
    raise NotImplementedError


def from_v2(value: JSON, dtype: DataType) -> Fill:
    """A fill value of v2; null: undefined. MetadataError."""
    raise NotImplementedError


def from_v3(value: JSON, dtype: DataType) -> Fill:
    """A fill value of v3, in any form that the specification allows. MetadataError."""
    raise NotImplementedError


def as_v2(array: ArrayMetadata) -> JSON:
    """The fill_value of a v2 document, strict JSON; None where it is undefined."""
    raise NotImplementedError


def as_v3(array: ArrayMetadata) -> JSON:
    """The fill_value of a v3 document, strict JSON; the type's zero where it is undefined."""
    raise NotImplementedError
