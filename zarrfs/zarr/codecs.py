"""Decoding of chunks: codec pipelines and shards.

A pipeline has the form of Zarr v3, whatever the generation, and decoding runs it backwards. The output of each step is
checked: no codec may return more bytes than the chunk can have, and the last one must return exactly the size of the
chunk. Compressors release the GIL, so that threads decode in parallel. Source: Zarr v3 core and its registered codecs;
Zarr v2 specification; the documentation of numcodecs.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import google_crc32c
import numpy as np

from zarrfs.zarr import compressors, external, filters
from zarrfs.zarr.errors import CodecError, library_error
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import SHARDING, ArrayMetadata, CodecSpec, Shards
from zarrfs.zarr.pipelines import CONVERTING, PREFIX
from zarrfs.zarr.representation import (
    OBJECTS_LIMIT,
    Array,
    Codec,
    CodecFactory,
    Decode,
    PipelineContext,
    Representation,
)

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer


def decode_chunk(array: ArrayMetadata, data: Buffer) -> Array:
    """Decode a stored chunk to an array of the full chunk shape.

    The result may be read-only, and may be a view in any memory order. Raise CodecError if the data is damaged or a
    codec is not available. Thread-safe.
    """
    chunk: Array = decoder_of(array).decode(data)
    return chunk


def decode_chunk_at(array: ArrayMetadata, data: Buffer, index: tuple[int, ...]) -> Array:
    """Decode the stored chunk at `index` as decode_chunk() does, also if the writer cut it at the edge of the array.

    Some writers compress only the part of a chunk that is inside the array; the rest is filled with the fill value.
    Shards are excluded: no writer cuts them, and the index of a cut shard would be read from the wrong place.
    """
    try:
        return decode_chunk(array, data)
    except CodecError:
        extents = zip(index, array.grid.chunks, array.shape, strict=True)
        part = tuple(min(step, extent - at * step) for at, step, extent in extents)
        inside = all(extent > 0 for extent in part) and part != array.grid.chunks
        cut = inside and not any(spec.shards for spec in array.codecs)
        if not cut or not array.dtype.itemsize or decoder_of(array).encoded.exact:
            raise
        try:
            short: Array = decoder_of(array, part).decode(data)
        except CodecError:
            short = np.empty(0)
        if short.shape != part:
            raise
    padded = np.empty(array.grid.chunks, short.dtype)
    padded[...] = np.frombuffer(array.fill, short.dtype)[0] if array.fill else np.zeros((), short.dtype)
    padded[tuple(slice(0, extent) for extent in part)] = short
    return padded


def check_codecs(array: ArrayMetadata) -> list[str]:
    """Return a list with the reason why no chunk of `array` can be decoded, or an empty list."""
    try:
        decoder_of(array)
    except CodecError as exc:
        return [str(exc)]
    return []


def takes_child(array: ArrayMetadata) -> bool:
    """Return whether `array` has a codec of another package, which may run in a child process."""
    return any(
        spec.name.startswith(PREFIX) and spec.name.removeprefix(PREFIX) not in _NUMCODECS for spec in array.codecs
    )


@functools.lru_cache(1024)
def decoder_of(array: ArrayMetadata, shape: tuple[int, ...] | None = None) -> Decoder:
    """Return the decoder of chunks of `array`, which have the shape of its grid unless `shape` is given.

    Raise CodecError if a codec is not available.
    """
    decoded = Representation.array(array.dtype.numpy, array.grid.chunks if shape is None else shape)
    context = PipelineContext(array.generation != "v3", array.fill, array.fill_object, array.dtype.itemsize)
    return Decoder(array.codecs, decoded, context)


class _Step(NamedTuple):
    name: str
    decode: Decode
    decoded: Representation  # of its output


class Decoder:
    """A codec pipeline that decodes chunks. `encoded` is the representation of stored chunks."""

    def __init__(self, codecs: Iterable[CodecSpec], decoded: Representation, context: PipelineContext) -> None:
        """Build the pipeline from `codecs` in encoding order and `decoded`, the representation of decoded chunks.

        Raise CodecError if a codec is not available, cannot be used with its configuration or its input, or if the
        codecs together may need far more memory than the decoded chunk.
        """
        steps = []
        current = decoded
        for name, configuration, shards in codecs:
            short, options = name.removeprefix(PREFIX), cast("Any", shards or configuration)
            try:
                decode, encoded = _factory(name)(options, current, context)
            except CodecError:
                raise
            except Exception as exc:
                raise CodecError(short, f"cannot be used as it is configured: {library_error(exc)}") from exc
            steps.append(_Step(short, decode, current))
            current, context = encoded, context._replace(filtered=context.filtered or name != "transpose")
        if current.dtype is not None:
            if current.dtype.hasobject or not context.untyped:
                raise CodecError("chunk", "no codec makes bytes of it")
            steps.append(_Step("bytes", lambda data: data, current))
            current = current.longer(0)
        self._steps, self._untyped, self.encoded = steps[::-1], context.untyped, current
        if self.limit > max(4 * OBJECTS_LIMIT, 64 * decoded.limit):
            raise CodecError("chunk", f"a codec may make {self.limit} bytes on the way to {decoded.limit}")

    @property
    def limit(self) -> int:
        """The most bytes that any codec returns: the size of the chunk, or of a longer intermediate form like JSON."""
        return max((step.decoded.limit for step in self._steps), default=self.encoded.limit)

    def check_stored(self, size: int) -> None:
        """Raise CodecError if no stored chunk can have `size` bytes."""
        limit = self.encoded.limit
        if size > limit or (self.encoded.exact and size != limit):
            most = "" if self.encoded.exact else " more than"
            raise CodecError(self._steps[0].name, f"{size} bytes are stored, not{most} {limit}")

    def decode(self, data: Any) -> Any:
        """Decode a stored chunk. Raise CodecError."""
        self.check_stored(len(data))
        value = data
        for name, decode, decoded in self._steps:
            try:
                value = decode(value)
            except CodecError:
                raise
            except MemoryError as exc:
                raise CodecError(name, f"no memory for the {decoded.limit} bytes that it may decode to") from exc
            except Exception as exc:
                raise CodecError(name, f"damaged: {library_error(exc)}") from exc
            value = decoded.convert(name, value, self._untyped)
        return value


def _bytes(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    """Make the codec of plain items. Its configuration states the byte order of v3; in v2, the dtype does."""
    if decoded.dtype is None and context.untyped:
        return lambda data: data, decoded
    if decoded.dtype is None or decoded.dtype.hasobject:
        raise CodecError("bytes", "made for arrays of items of a fixed size")
    if context.untyped:
        return lambda data: data, decoded.longer(0)
    endian = configuration.get("endian")
    if endian not in (None, "little", "big"):
        raise CodecError("bytes", f"endian {endian} is not known")
    stored = decoded._replace(dtype=decoded.dtype if endian is None else decoded.dtype.newbyteorder(endian))
    return lambda data: stored.convert("bytes", data, True), decoded.longer(0)


def _compressor(decompress: Callable[[Any, int], Buffer]) -> CodecFactory:
    def build(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
        decoded.require_bytes(context.untyped)
        return lambda data: decompress(data, decoded.limit), decoded.compressed()

    return build


def _blosc(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    if configuration.get("cname") == "snappy":
        raise CodecError("blosc", "snappy, which the package blosc does not have")
    return _compressor(compressors.blosc)(configuration, decoded, context)


def _lzma(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    decompress = _compressor(lambda data, limit: compressors.lzma(data, limit, configuration))
    return decompress(configuration, decoded, context)


def _crc32c(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    """Make the codec with a checksum of four bytes at the "end" of the data, or at its "start"."""
    decoded.require_bytes(context.untyped)
    at_start = configuration.get("location") == "start"

    def decode(data: Any) -> Array:
        whole = np.frombuffer(data, np.uint8)
        if whole.size < 4:
            raise CodecError("crc32c", "shorter than its checksum")
        body, stored = (whole[4:], whole[:4]) if at_start else (whole[:-4], whole[-4:])
        body.flags.writeable = False  # as google_crc32c requires
        if google_crc32c.value(body) != int.from_bytes(stored.tobytes(), "little"):
            raise CodecError("crc32c", "the checksum does not match")
        return body

    return decode, decoded.longer(4)


def _pickle(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
    raise CodecError("pickle", "never decoded, because that executes code in the chunk")


def _external(name: str) -> CodecFactory:
    """Return the factory of a codec that another package registers with numcodecs; a child process usually runs it."""

    def build(configuration: Mapping[str, JSON], decoded: Representation, context: PipelineContext) -> Codec:
        from numcodecs import registry

        image = name.startswith(external.IMAGECODECS)
        if image and importlib.util.find_spec("imagecodecs") is None:
            raise CodecError(name, "needs the Python package imagecodecs, which is not installed here")
        if not image and name not in registry.codec_registry and name not in registry.entries:
            raise CodecError(name, "numcodecs has no such codec here")
        # other codecs may need far more bytes, such as those that write text
        encoded = decoded.compressed(least=0 if image else OBJECTS_LIMIT)
        return external.ExternalCodec(name, configuration, decoded.limit).decode, encoded

    return build


_V3: dict[str, CodecFactory] = {
    "bytes": _bytes,
    "transpose": filters.transpose,
    SHARDING: lambda configuration, decoded, context: _sharding(configuration, decoded, context),
    "blosc": _blosc,
    "gzip": _compressor(compressors.gzip),
    "zstd": _compressor(compressors.zstd),
    "crc32c": _crc32c,
    "vlen-utf8": filters.variable("vlen-utf8"),
    "vlen-bytes": filters.variable("vlen-bytes"),
}
_NUMCODECS: dict[str, CodecFactory] = {
    **{name: _V3[name] for name in ("blosc", "gzip", "zstd", "crc32c", "vlen-utf8", "vlen-bytes")},
    "zlib": _compressor(compressors.zlib),
    "bz2": _compressor(compressors.bz2),
    "lzma": _lzma,
    "lz4": _compressor(compressors.lz4),
    "base64": _compressor(lambda data, limit: base64.standard_b64decode(data)),
    "shuffle": filters.shuffle,
    **{name: filters.checksum(name) for name in ("crc32", "adler32", "fletcher32", "jenkins_lookup3")},
    **{name: filters.converting(name) for name in CONVERTING},
    "bitround": filters.bitround,
    "packbits": filters.packbits,
    "categorize": filters.categorize,
    "vlen-array": filters.variable("vlen-array"),
    "json": filters.json_list("json"),
    "json2": filters.json_list("json2"),
    "pickle": _pickle,
}


def _factory(name: str) -> CodecFactory:
    short = name.removeprefix(PREFIX)
    if short == name:
        if name not in _V3:
            raise CodecError(name, "unknown codec")
        return _V3[name]
    return _NUMCODECS.get(short) or _external(short)


# -- shards. Source: Zarr v3, "sharding_indexed"

_ABSENT = (1 << 64) - 1  # offset and length of an inner chunk that does not exist
_OFFSETS = np.dtype("<u8")


class ShardIndex:
    """The byte ranges of the inner chunks of one shard, in C order."""

    def __init__(self, entries: Array, shard_size: int) -> None:
        """`entries` has the offset and length of each inner chunk, `shard_size` is in bytes."""
        self._entries, self._size = entries.reshape(-1, 2), shard_size

    def __getitem__(self, number: int) -> tuple[int, int] | None:
        """Return offset and length in bytes of an inner chunk; None if it is not stored and has only fill values.

        Raise CodecError if the range is not inside the shard.
        """
        offset, length = self._entries[number].tolist()
        if offset == length == _ABSENT:
            return None
        if offset + length > self._size:
            raise CodecError(SHARDING, f"inner chunk {number} lies at {offset} + {length} of {self._size} bytes")
        return offset, length


class Sharding:
    """The codec of shards of one shape, whose inner chunks can be read one by one.

    `inner` is the array with the inner chunks as chunks: decode_chunk(inner, data) decodes one.
    """

    inner: ArrayMetadata

    def __init__(self, shards: Shards) -> None:
        """Raise CodecError if the length of the index is unknown."""
        self.inner_shape, self.per_shard, self.codecs, index_codecs, self._at_start = shards
        entries = Representation.array(_OFFSETS, (*self.per_shard, 2))
        self._index = Decoder(index_codecs, entries, PipelineContext(untyped=False))
        if not self._index.encoded.exact:
            raise CodecError(SHARDING, "the index is compressed, so that its length is unknown")
        self.index_length = self._index.encoded.limit  # bytes

    def index_range(self, shard_size: int) -> tuple[int, int]:
        """Return start and stop in bytes of the index in a shard. Raise CodecError if the shard is too short."""
        if shard_size < self.index_length:
            raise CodecError(SHARDING, f"a shard of {shard_size} bytes, shorter than the index of {self.index_length}")
        start = 0 if self._at_start else shard_size - self.index_length
        return start, start + self.index_length

    def read_index(self, data: Buffer, shard_size: int) -> ShardIndex:
        """Decode the index (`data` has `index_length` bytes) of a shard of `shard_size` bytes. Raise CodecError."""
        return ShardIndex(self._index.decode(data), shard_size)

    def shard(self, index: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Return the index of the shard that holds the inner chunk at `index`, and the chunk's number in it."""
        shard, number = [], 0
        for at, count in zip(index, self.per_shard, strict=True):
            shard_at, within = divmod(at, count)
            shard.append(shard_at)
            number = number * count + within
        return tuple(shard), number


def _sharding(shards: Any, decoded: Representation, context: PipelineContext) -> Codec:
    """Make the codec of whole shards."""
    if decoded.dtype is None:
        raise CodecError(SHARDING, "made for arrays, not for bytes")
    layout, dtype = Sharding(shards), decoded.dtype
    if decoded.shape != tuple(map(int.__mul__, layout.inner_shape, layout.per_shard)):
        raise CodecError(SHARDING, "after a filter that changes the shape of chunks")
    inner = Decoder(layout.codecs, Representation.array(dtype, layout.inner_shape), context)
    background = None if context.filtered else _fill_scalar(dtype, context)

    def decode(data: Any) -> Array:
        view = memoryview(data).cast("B")
        start, stop = layout.index_range(len(view))
        index = layout.read_index(view[start:stop], len(view))
        out = np.empty(decoded.shape, dtype)
        for number, at in enumerate(itertools.product(*map(range, layout.per_shard))):
            region = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, layout.inner_shape, strict=True))
            extent = index[number]
            if extent is None and background is None:
                raise CodecError(SHARDING, "a chunk is missing, and filters make its fill value undefined")
            out[region] = background if extent is None else inner.decode(view[extent[0] : sum(extent)])
        return out

    compressed = decoded.compressed()
    return decode, compressed._replace(limit=compressed.limit + layout.index_length)


def _fill_scalar(dtype: np.dtype[Any], context: PipelineContext) -> Array:
    """Return the fill value as a 0-D array."""
    if dtype.hasobject:
        found = np.empty((), dtype)
        found[()] = context.fill_object
        return found
    return np.frombuffer(context.fill, dtype)[0:1].reshape(()) if context.fill else np.zeros((), dtype)


def sharding_of(array: ArrayMetadata) -> Sharding | None:
    """Return the sharding of `array`; None if its chunks are not shards or can only be decoded whole.

    Raise CodecError if the configuration of the codec is invalid.
    """
    if len(array.codecs) != 1 or array.codecs[0].shards is None:
        return None
    found = Sharding(array.codecs[0].shards)
    try:
        grid = Grid(array.shape, found.inner_shape)
    except ValueError as exc:
        raise CodecError(SHARDING, str(exc)) from exc
    found.inner = dataclasses.replace(array, grid=grid, codecs=found.codecs)
    return found


def inner_array(array: ArrayMetadata) -> ArrayMetadata | None:
    """Return `array` with its inner chunks as chunks. Return None and raises CodecError as sharding_of() does."""
    sharding = sharding_of(array)
    return None if sharding is None else sharding.inner
