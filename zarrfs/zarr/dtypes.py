"""Data types of arrays, as Zarr v2 (numpy's typestrs, lists of fields) and Zarr v3 (names) tell them.

Source: Zarr v2 specification, "Data type encoding"; Zarr v3 core, "Data types"; what zarr-python 3.1 writes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from zarrfs.zarr.model import JSON

if TYPE_CHECKING:
    import numpy as np

Endian = Literal["little", "big"]


@dataclasses.dataclass(frozen=True)
class DataType:
    """The type of an item. `text` is that of Zarr v2, always in one spelling: equal types have equal texts."""

    text: str | tuple[Any, ...]  # numpy's typestr, or a tuple of fields: (name, text) or (name, text, shape)
    itemsize: int  # bytes; 0: no fixed size (kinds O, T, B)
    kind: str  # numpy's: b i u f c m M S U V; also T (text of any length), B (bytes of any length), O (other objects)
    endian: Endian | None  # None: items of single bytes, no fixed size, or mixed
    mixed: bool = False  # fields of different byte order

    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype; object where there is no fixed size."""
        raise NotImplementedError


def parse_v2(value: JSON) -> DataType:
    """The dtype of a v2 document, also of v0 and v1. MetadataError."""
    raise NotImplementedError


def parse_v3(value: JSON, endian: Endian = "little") -> DataType:
    """The data_type of a v3 document; `endian`: that of its bytes codec. MetadataError."""
    raise NotImplementedError


def as_v2(dtype: DataType) -> JSON:
    """The dtype of a v2 document: a typestr or lists of fields. What objects are is told by a filter."""
    raise NotImplementedError


def as_v3(dtype: DataType) -> JSON:
    """The data_type of a v3 document. MetadataError says why v3 has none."""
    raise NotImplementedError
