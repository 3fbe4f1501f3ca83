"""What the documents of every Zarr generation say, in one form: ArrayMetadata, GroupMetadata and their parts.

The codec pipeline is told in the words of Zarr v3, whatever the generation: order F is a transpose codec, filters and
compressors are `numcodecs.ID`, but for those that v3 names itself. Source: Zarr v3 core specification; Zarr v2
specification; zarr-legacy-persistence (0.4.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from zarrfs.zarr.errors import JSON
from zarrfs.zarr.keys import NESTED, KeyTemplate

if TYPE_CHECKING:
    from zarrfs.zarr.dtypes import DataType
    from zarrfs.zarr.grid import Grid

Generation = Literal["v0", "v1", "v2", "v3", "v3-draft"]  # v0: also its pickled predecessor


class CodecSpec(NamedTuple):
    """One step of a codec pipeline."""

    name: str  # bytes, transpose, blosc, gzip, zstd, crc32c, sharding_indexed, vlen-utf8, ..., or numcodecs.ID
    configuration: Mapping[str, JSON] = {}


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """An array. `shape` in items; `grid` counts chunks, the last of which may overhang the shape."""

    generation: Generation
    shape: tuple[int, ...]
    grid: Grid  # of stored chunks: of shards, where the array is sharded
    dtype: DataType
    fill: bytes | None  # one item as decoded chunks hold it (dtype.itemsize bytes, its byte order); None: undefined
    codecs: tuple[CodecSpec, ...]  # in the order of encoding: array -> array, array -> bytes, bytes -> bytes
    keys: KeyTemplate  # of chunks, below the array
    attributes: Mapping[str, JSON]
    dimension_names: tuple[str | None, ...] | None = None
    storage_transformers: tuple[JSON, ...] = ()
    fill_object: JSON = None  # of dtypes without a size (strings of any length): the value itself
    keys_assumed: bool = False  # v2 without dimension_separator: old stores may nest chunks, see keys.nested()

    @property
    def ndim(self) -> int:
        """Dimensions; 0 for a scalar."""
        return len(self.shape)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk, always of full chunk shape."""
        size = self.dtype.itemsize
        for extent in self.grid.chunks:
            size *= extent
        return size


@dataclasses.dataclass(frozen=True)
class GroupMetadata:
    """A group; `implied`: no document says so, only nodes below it."""

    generation: Generation
    attributes: Mapping[str, JSON]
    implied: bool = False


def nested(array: ArrayMetadata) -> KeyTemplate | None:
    """The other way in which chunks of `array` may be called ("0/0"), where its document leaves that open.

    None where the document says it, or both are the same. Who can look at names decides: old stores nest.
    """
    return NESTED if array.keys_assumed and array.ndim > 1 else None
