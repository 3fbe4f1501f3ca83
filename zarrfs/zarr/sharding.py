"""The index of a shard, and the inner chunks of a sharded array. Source: Zarr v3, "sharding_indexed"."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from zarrfs.zarr.codecs import Decoder
from zarrfs.zarr.forms import Array, Context, Decode, Form
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.model import JSON, ArrayMetadata, CodecError, CodecSpec

if TYPE_CHECKING:
    from zarrfs.transfer.api import Buffer

_NAME = "sharding_indexed"
_NONE = (1 << 64) - 1  # offset and length of an inner chunk that is not there
_OFFSETS = np.dtype("<u8")
_INDEX_CODECS = ({"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"})


class ShardIndex:
    """Where the inner chunks of one shard lie, in C order."""

    def __init__(self, entries: Array, shard_size: int) -> None:
        """`entries`: offset and length of each."""
        self._entries, self._size = entries.reshape(-1, 2), shard_size

    def __getitem__(self, place: int) -> tuple[int, int] | None:
        """Offset and length in bytes, inside the shard; None: not there, the fill value. CodecError."""
        offset, length = self._entries[place].tolist()
        if offset == length == _NONE:
            return None
        if offset + length > self._size:
            raise CodecError(_NAME, f"inner chunk {place} lies at {offset} + {length} of {self._size} bytes")
        return offset, length


class _Layout(NamedTuple):
    """What the configuration of the codec says, for shards of one shape."""

    inner_shape: tuple[int, ...]
    per_shard: tuple[int, ...]  # inner chunks in each dimension
    codecs: tuple[CodecSpec, ...]  # of inner chunks
    index_codecs: Decoder
    index_at: Literal["start", "end"]

    @property
    def index_length(self) -> int:
        """Bytes."""
        return self.index_codecs.encoded.limit

    def index_range(self, shard_size: int) -> tuple[int, int]:
        """Where the index lies in a shard."""
        if shard_size < self.index_length:
            raise CodecError(_NAME, f"a shard of {shard_size} bytes, its index has {self.index_length}")
        return (0, self.index_length) if self.index_at == "start" else (shard_size - self.index_length, shard_size)

    def read_index(self, data: Buffer, shard_size: int) -> ShardIndex:
        return ShardIndex(self.index_codecs.decode(data), shard_size)


def _layout(configuration: Mapping[str, JSON], shape: tuple[int, ...]) -> _Layout:
    inner = configuration.get("chunk_shape")
    if not isinstance(inner, list | tuple) or len(inner) != len(shape):
        raise CodecError(_NAME, f"chunk_shape {inner} where shards have {len(shape)} dimensions")
    for extent, whole in zip(inner, shape, strict=True):
        if type(extent) is not int or extent < 1 or whole % extent:
            raise CodecError(_NAME, f"shards of {list(shape)} are no whole number of chunks of {list(inner)}")
    per_shard = tuple(whole // extent for extent, whole in zip(inner, shape, strict=True))
    index_form = Form.array(_OFFSETS, (*per_shard, 2))
    index = Decoder(_specs(configuration.get("index_codecs", _INDEX_CODECS)), index_form, Context(lax=False))
    if not index.encoded.exact:
        raise CodecError(_NAME, "the index is compressed: nobody can tell how long it is")
    at = configuration.get("index_location", "end")
    if at not in ("start", "end"):
        raise CodecError(_NAME, f"index_location {at} is not known")
    return _Layout(tuple(inner), per_shard, _specs(configuration.get("codecs")), index, at)


def _specs(codecs: JSON) -> tuple[CodecSpec, ...]:
    if not isinstance(codecs, list | tuple) or not codecs:
        raise CodecError(_NAME, "no codecs of the inner chunks, or of the index")
    found = []
    for codec in codecs:
        spec: Mapping[str, JSON] = codec if isinstance(codec, Mapping) else {"name": codec}
        if not isinstance(spec.get("name"), str):
            raise CodecError(_NAME, f"{codec} is not a codec")
        found.append(CodecSpec(spec["name"], spec.get("configuration") or {}))
    return tuple(found)


def build(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """How whole shards are decoded, for a pipeline."""
    if form.dtype is None:
        raise CodecError(_NAME, "made for arrays, not for bytes")
    layout, dtype = _layout(configuration, form.shape), form.dtype
    inner = Decoder(layout.codecs, Form.array(dtype, layout.inner_shape), context)
    background = None if context.filtered else _fill(dtype, context)

    def decode(data: Any) -> Array:
        view = memoryview(data).cast("B")
        start, stop = layout.index_range(len(view))
        index = layout.read_index(view[start:stop], len(view))
        out = np.empty(form.shape, dtype)
        for place, at in enumerate(itertools.product(*map(range, layout.per_shard))):
            region = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, layout.inner_shape, strict=True))
            there = index[place]
            if there is None and background is None:
                raise CodecError(_NAME, "a chunk is missing behind filters: its value is not defined")
            out[region] = background if there is None else inner.decode(view[there[0] : sum(there)])
        return out

    packed = form.packed()
    return decode, packed._replace(limit=packed.limit + layout.index_length)


def _fill(dtype: np.dtype[Any], context: Context) -> Array:
    """The fill value, as an array without dimensions."""
    if dtype.hasobject:
        found = np.empty((), dtype)
        found[()] = context.fill_object
        return found
    return np.frombuffer(context.fill, dtype)[0:1].reshape(()) if context.fill else np.zeros((), dtype)


class Sharding(NamedTuple):
    """How the chunks of an array are shards."""

    inner: ArrayMetadata  # its grid counts inner chunks over the whole array: decode_chunk(inner, data) decodes one
    layout: _Layout

    @property
    def per_shard(self) -> tuple[int, ...]:
        """Inner chunks in each dimension of a shard."""
        return self.layout.per_shard

    @property
    def index_length(self) -> int:
        """Bytes."""
        return self.layout.index_length

    @property
    def index_at(self) -> Literal["start", "end"]:
        """Where in a shard the index lies."""
        return self.layout.index_at

    def shard(self, index: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The shard that inner chunk `index` lies in, and its place in what read_index() gives."""
        shard, place = [], 0
        for at, count in zip(index, self.per_shard, strict=True):
            number, within = divmod(at, count)
            shard.append(number)
            place = place * count + within
        return tuple(shard), place

    def index_range(self, shard_size: int) -> tuple[int, int]:
        """Start and stop in bytes of the index of a shard of `shard_size` bytes; CodecError where it is too short."""
        return self.layout.index_range(shard_size)

    def read_index(self, data: Buffer, shard_size: int) -> ShardIndex:
        """The index in `data` (`index_length` bytes) of a shard of `shard_size` bytes; CodecError where it lies."""
        return self.layout.read_index(data, shard_size)


def sharding_of(array: ArrayMetadata) -> Sharding | None:
    """The sharding of `array`; None where its chunks are not shards, or can only be decoded whole. CodecError."""
    if len(array.codecs) != 1 or array.codecs[0].name != _NAME:
        return None
    layout = _layout(array.codecs[0].configuration, array.grid.chunks)
    try:
        grid = Grid(array.shape, layout.inner_shape)
    except ValueError as exc:
        raise CodecError(_NAME, str(exc)) from exc
    return Sharding(dataclasses.replace(array, grid=grid, codecs=layout.codecs), layout)


def inner_array(array: ArrayMetadata) -> ArrayMetadata | None:
    """`array` in inner chunks, as sharding_of() tells it; None as there."""
    found = sharding_of(array)
    return None if found is None else found.inner
