"""The index of a shard, and the inner chunks of a sharded array. Source: Zarr v3, "sharding_indexed"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from zarrfs.zarr.model import ArrayMetadata

if TYPE_CHECKING:
    from zarrfs.transfer.api import Buffer


class Sharding(NamedTuple):
    """How the chunks of an array are shards."""

    inner: ArrayMetadata  # its grid counts inner chunks over the whole array: decode_chunk(inner, data) decodes one
    per_shard: tuple[int, ...]  # inner chunks in each dimension
    index_length: int  # bytes
    index_at: Literal["start", "end"]

    def shard(self, index: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The shard that inner chunk `index` lies in, and its place in the list that read_index() gives."""
        raise NotImplementedError

    def read_index(self, data: Buffer, shard_size: int) -> ShardIndex:
        """The index in `data` (`index_length` bytes) of a shard of `shard_size` bytes; CodecError where it lies."""
        raise NotImplementedError


class ShardIndex:
    """Where the inner chunks of one shard lie, in C order."""

    def __getitem__(self, place: int) -> tuple[int, int] | None:
        """Offset and length in bytes, inside the shard; None: not there, the fill value."""
        raise NotImplementedError


def sharding_of(array: ArrayMetadata) -> Sharding | None:
    """The sharding of `array`; None where its chunks are not shards, or can only be decoded whole."""
    raise NotImplementedError


def inner_array(array: ArrayMetadata) -> ArrayMetadata | None:
    """sharding_of(array).inner, or None."""
    raise NotImplementedError
