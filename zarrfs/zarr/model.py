"""Arrays and groups of every Zarr generation in one form: ArrayMetadata, GroupMetadata and their parts.

Codec pipelines of every generation have the form of Zarr v3: memory order F is a transpose codec, and filters and
compressors are `numcodecs.ID`, unless v3 has a name for them. Source: Zarr v3 core specification; Zarr v2
specification; zarr-legacy-persistence (0.4.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.keys import KeyTemplate

if TYPE_CHECKING:
    from zarrfs.zarr.dtypes import DataType
    from zarrfs.zarr.grid import Grid

SHARDING = "sharding_indexed"  # the codec of shards
Generation = Literal["v0", "v1", "v2", "v3", "v3-draft"]  # v0 includes the pickled documents of zarr 0.3


class Shards(NamedTuple):
    """The configuration of the codec for shards of one shape."""

    inner_shape: tuple[int, ...]
    counts: tuple[int, ...]  # inner chunks in each dimension
    codecs: tuple[CodecSpec, ...]  # of inner chunks
    index_codecs: tuple[CodecSpec, ...]
    index_at_start: bool


class CodecSpec(NamedTuple):
    """One codec of a pipeline, as in a document of v3."""

    name: str  # bytes, transpose, blosc, gzip, zstd, crc32c, sharding_indexed, vlen-utf8, ..., or numcodecs.ID
    configuration: Mapping[str, JSON] = {}
    shards: Shards | None = None  # the configuration of sharding_indexed


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """The metadata of an array. `shape` is in items; the last chunk of a dimension may extend beyond it."""

    generation: Generation
    shape: tuple[int, ...]
    grid: Grid  # of stored chunks; of shards if the array is sharded
    dtype: DataType
    fill: bytes | None  # an item as in decoded chunks (dtype.itemsize bytes, its byte order); None: undefined
    codecs: tuple[CodecSpec, ...]  # in encoding order: array -> array, array -> bytes, bytes -> bytes
    keys: KeyTemplate  # of chunks, relative to the array
    attributes: Mapping[str, JSON]
    dimension_names: tuple[str | None, ...] | None = None
    fill_object: JSON = None  # the fill value of a dtype without a fixed size, as in the document
    nested: KeyTemplate | None = None  # keys that old stores of v2 may have in place of `keys`: check which exist

    __hash__ = object.__hash__  # for caches of what derives from an array

    @property
    def ndim(self) -> int:
        """The number of dimensions; 0 for a scalar."""
        return len(self.shape)

    @property
    def chunk_bytes(self) -> int:
        """The size in bytes of a decoded chunk, which always has the full chunk shape."""
        size = self.dtype.itemsize
        for extent in self.grid.chunks:
            size *= extent
        return size


@dataclasses.dataclass(frozen=True)
class GroupMetadata:
    """The metadata of a group. A group is `implied` if it has no document of its own, only nodes below it."""

    generation: Generation
    attributes: Mapping[str, JSON]
    implied: bool = False
