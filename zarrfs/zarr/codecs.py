"""Decoding of chunks: a pipeline of codecs, told in the words of Zarr v3, run backwards.

Each step is checked: no codec gives more bytes than the chunk may have, and what comes out has the chunk's size.
Blosc frames go through numcodecs, which carries C-Blosc 1.21 with every inner codec but snappy; frames that it
cannot read are taken apart in zarrfs.zarr.frames, so no second blosc binding is needed. The compressors release the
interpreter's lock: threads decode side by side.
Source: Zarr v3 core and its registered codecs; Zarr v2 specification; the documents of numcodecs.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from zarrfs.zarr import filters, foreign, frames, streams
from zarrfs.zarr.errors import JSON, CodecError
from zarrfs.zarr.forms import Array, Builder, Context, Decode, Form
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.model import ArrayMetadata, CodecSpec

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_REMEMBERED = 1024  # arrays
_NEVER = ("pickle",)  # runs what it reads


def decode_chunk(array: ArrayMetadata, data: Buffer) -> Array:
    """The chunk that `data` holds, of full chunk shape; may be read-only, may be a view in any memory order.

    CodecError where the data is damaged, or where its codec is missing. Any number of threads may call it at once.
    """
    found: Array = decoder_of(array).decode(data)
    return found


def check_codecs(array: ArrayMetadata) -> list[str]:
    """What nobody here decodes in the pipeline of `array`, the first reason; seen without data."""
    try:
        decoder_of(array)
    except CodecError as exc:
        return [str(exc)]
    return []


_decoders: dict[int, tuple[ArrayMetadata, Decoder]] = {}  # by the array's id(), which it keeps while it is here
_lock = threading.Lock()


def decoder_of(array: ArrayMetadata) -> Decoder:
    """How the chunks of `array` are decoded; made once. CodecError where a codec is missing."""
    found = _decoders.get(id(array))
    if found is None:
        context = Context(array.generation != "v3", array.fill, array.fill_object)
        decoder = Decoder(array.codecs, Form.array(array.dtype.numpy(), array.grid.chunks), context)
        with _lock:
            while len(_decoders) >= _REMEMBERED:
                del _decoders[next(iter(_decoders))]
            found = _decoders[id(array)] = array, decoder
    return found[1]


class _Step(NamedTuple):
    name: str
    decode: Decode
    form: Form  # of what it decodes to


class Decoder:
    """Codecs of chunks that are of `form` when they are decoded; `encoded`: what is known of them stored."""

    def __init__(self, codecs: Iterable[CodecSpec], form: Form, context: Context) -> None:
        """CodecError where a codec is missing, or does not do what is asked of it."""
        steps = []
        for name, configuration in codecs:
            short = name.removeprefix("numcodecs.")
            try:
                decode, encoded = _builder(name)(configuration, form, context)
            except CodecError:
                raise
            except Exception as exc:
                raise CodecError(short, f"cannot be used as it is configured: {_line(exc)}") from exc
            steps.append(_Step(short, decode, form))
            form, context = encoded, context._replace(filtered=context.filtered or name != "transpose")
        if form.dtype is not None:
            if form.dtype.hasobject or not context.lax:
                raise CodecError("chunk", "no codec makes bytes of it")
            steps.append(_Step("bytes", lambda data: data, form))
            form = form.longer(0)
        self._steps, self._lax, self.encoded = steps[::-1], context.lax, form

    def check_stored(self, size: int) -> None:
        """CodecError where no chunk is stored as `size` bytes."""
        limit = self.encoded.limit
        if size > limit or (self.encoded.exact and size != limit):
            most = "" if self.encoded.exact else " more than"
            raise CodecError(self._steps[0].name, f"{size} bytes are stored, not{most} {limit}")

    def decode(self, data: Any) -> Any:
        """What `data` decodes to; CodecError."""
        self.check_stored(len(data))
        value = data
        for name, decode, form in self._steps:
            try:
                value = decode(value)
            except CodecError:
                raise
            except MemoryError as exc:
                raise CodecError(name, f"no memory for the {form.limit} bytes that it may decode to") from exc
            except Exception as exc:
                raise CodecError(name, f"damaged: {_line(exc)}") from exc
            value = form.fit(name, value, self._lax)
        return value


def _line(exc: Exception) -> str:
    """What a library says, on one line."""
    return " ".join(str(exc).split())[:200] or type(exc).__name__


def _bytes(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """Items one after another. What v2 says of byte order is said in its dtypes."""
    if form.dtype is None and context.lax:
        return lambda data: data, form
    if form.dtype is None or form.dtype.hasobject:
        raise CodecError("bytes", "made for arrays of items of a fixed size")
    if context.lax:
        return lambda data: data, form.longer(0)
    endian = configuration.get("endian")
    if endian not in (None, "little", "big"):
        raise CodecError("bytes", f"endian {endian} is not known")
    stored = form._replace(dtype=form.dtype if endian is None else form.dtype.newbyteorder(endian))
    return lambda data: stored.fit("bytes", data, True), form.longer(0)


def _compressor(decompress: Callable[[Any, int], Buffer]) -> Builder:
    def build(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
        form.need_bytes(context.lax)
        return lambda data: decompress(data, form.limit), form.packed()

    return build


def _lzma(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    return _compressor(lambda data, limit: streams.lzma(data, limit, configuration))(configuration, form, context)


def _checksum(name: str, place: str, compute: Callable[[Array], int]) -> Builder:
    """Four bytes of a checksum, by default at `place` of the bytes."""

    def build(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
        form.need_bytes(context.lax)
        at_start = configuration.get("location", place) == "start"

        def decode(data: Any) -> Array:
            whole = np.frombuffer(data, np.uint8)
            if whole.size < 4:
                raise CodecError(name, "shorter than its checksum")
            body, stored = (whole[4:], whole[:4]) if at_start else (whole[:-4], whole[-4:])
            body.flags.writeable = False  # which is what google_crc32c wants
            if compute(body) & 0xFFFFFFFF != int.from_bytes(stored.tobytes(), "little"):
                raise CodecError(name, "the checksum is not that of the bytes")
            return body

        return decode, form.longer(4)

    return build


def _crc32c(body: Array) -> int:
    import google_crc32c

    return int(google_crc32c.value(body))


def _crc32(body: Array) -> int:
    import zlib

    return zlib.crc32(body.data)


def _adler32(body: Array) -> int:
    import zlib

    return zlib.adler32(body.data)


def _hdf5_checksum(name: str) -> Builder:
    """A checksum of HDF5 behind the bytes, which numcodecs checks."""

    def build(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
        import numcodecs

        form.need_bytes(context.lax)
        codec = numcodecs.get_codec({**configuration, "id": name})

        def decode(data: Any) -> Any:
            if len(data) <= 4:
                raise CodecError(name, "shorter than its checksum")
            return codec.decode(data)

        return decode, form.longer(4)

    return build


def _base64(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    import base64

    form.need_bytes(context.lax)
    return base64.standard_b64decode, form.packed()


def _foreign(name: str) -> Builder:
    """A codec that numcodecs has from elsewhere: in a process of its own, as nobody bounds what it allocates."""

    def build(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
        import numcodecs
        from numcodecs import registry

        known, installed = registry.codec_registry.get(name), name in registry.entries
        if known is None and not installed:
            raise CodecError(name, "numcodecs has no such codec here")
        if known is not None and not installed and not known.__module__.startswith("numcodecs."):
            # registered by the very program that calls us
            return numcodecs.get_codec({**configuration, "id": name}).decode, form.packed()
        return foreign.ForeignCodec(name, configuration, form.limit).decode, form.packed()

    return build


_OWN: dict[str, Builder] = {
    "bytes": _bytes,
    "endian": _bytes,  # its name before v3 was accepted
    "transpose": filters.transpose,
    "sharding_indexed": lambda configuration, form, context: _sharding(configuration, form, context),
    "blosc": _compressor(frames.decompress),
    "gzip": _compressor(streams.gzip),
    "zstd": _compressor(streams.zstd),
    "crc32c": _checksum("crc32c", "end", _crc32c),
    "vlen-utf8": filters.variable("vlen-utf8"),
    "vlen-bytes": filters.variable("vlen-bytes"),
}
_NUMCODECS: dict[str, Builder] = {
    **{name: _OWN[name] for name in ("blosc", "gzip", "zstd", "crc32c", "vlen-utf8", "vlen-bytes")},
    "zlib": _compressor(streams.zlib),
    "bz2": _compressor(streams.bz2),
    "lzma": _lzma,
    "lz4": _compressor(streams.lz4),
    "base64": _base64,
    "shuffle": filters.shuffle,
    "crc32": _checksum("crc32", "start", _crc32),
    "adler32": _checksum("adler32", "start", _adler32),
    "fletcher32": _hdf5_checksum("fletcher32"),
    "jenkins_lookup3": _hdf5_checksum("jenkins_lookup3"),
    "delta": filters.converting("delta"),
    "fixedscaleoffset": filters.converting("fixedscaleoffset"),
    "quantize": filters.converting("quantize"),
    "astype": filters.converting("astype", "decode_dtype", "encode_dtype"),
    "bitround": filters.unchanged,
    "packbits": filters.packbits,
    "categorize": filters.categorize,
    "vlen-array": filters.variable("vlen-array"),
    "json2": filters.json2,
}


def _builder(name: str) -> Builder:
    short = name.removeprefix("numcodecs.")
    if short == name:
        if name not in _OWN:
            raise CodecError(name, "a codec that nobody here knows")
        return _OWN[name]
    if short in _NEVER:
        raise CodecError(short, "runs what it reads, and is never decoded")
    return _NUMCODECS.get(short) or _foreign(short)


# -- shards: the index, and the inner chunks. Source: Zarr v3, "sharding_indexed"

_SHARDING = "sharding_indexed"
_ABSENT = (1 << 64) - 1  # offset and length of an inner chunk that is not there
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
        if offset == length == _ABSENT:
            return None
        if offset + length > self._size:
            raise CodecError(_SHARDING, f"inner chunk {place} lies at {offset} + {length} of {self._size} bytes")
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
            raise CodecError(_SHARDING, f"a shard of {shard_size} bytes, its index has {self.index_length}")
        return (0, self.index_length) if self.index_at == "start" else (shard_size - self.index_length, shard_size)

    def read_index(self, data: Buffer, shard_size: int) -> ShardIndex:
        return ShardIndex(self.index_codecs.decode(data), shard_size)


def _layout(configuration: Mapping[str, JSON], shape: tuple[int, ...]) -> _Layout:
    inner = configuration.get("chunk_shape")
    if not isinstance(inner, list | tuple) or len(inner) != len(shape):
        raise CodecError(_SHARDING, f"chunk_shape {inner} where shards have {len(shape)} dimensions")
    for extent, whole in zip(inner, shape, strict=True):
        if type(extent) is not int or extent < 1 or whole % extent:
            raise CodecError(_SHARDING, f"shards of {list(shape)} are no whole number of chunks of {list(inner)}")
    per_shard = tuple(whole // extent for extent, whole in zip(inner, shape, strict=True))
    index_form = Form.array(_OFFSETS, (*per_shard, 2))
    index = Decoder(_specs(configuration.get("index_codecs", _INDEX_CODECS)), index_form, Context(lax=False))
    if not index.encoded.exact:
        raise CodecError(_SHARDING, "the index is compressed: nobody can tell how long it is")
    at = configuration.get("index_location", "end")
    if at not in ("start", "end"):
        raise CodecError(_SHARDING, f"index_location {at} is not known")
    return _Layout(tuple(inner), per_shard, _specs(configuration.get("codecs")), index, at)


def _specs(codecs: JSON) -> tuple[CodecSpec, ...]:
    if not isinstance(codecs, list | tuple) or not codecs:
        raise CodecError(_SHARDING, "no codecs of the inner chunks, or of the index")
    found = []
    for codec in codecs:
        spec: Mapping[str, JSON] = codec if isinstance(codec, Mapping) else {"name": codec}
        if not isinstance(spec.get("name"), str):
            raise CodecError(_SHARDING, f"{codec} is not a codec")
        found.append(CodecSpec(spec["name"], spec.get("configuration") or {}))
    return tuple(found)


def _sharding(configuration: Mapping[str, JSON], form: Form, context: Context) -> tuple[Decode, Form]:
    """How whole shards are decoded, for a pipeline."""
    if form.dtype is None:
        raise CodecError(_SHARDING, "made for arrays, not for bytes")
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
                raise CodecError(_SHARDING, "a chunk is missing behind filters: its value is not defined")
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
    if len(array.codecs) != 1 or array.codecs[0].name != _SHARDING:
        return None
    layout = _layout(array.codecs[0].configuration, array.grid.chunks)
    try:
        grid = Grid(array.shape, layout.inner_shape)
    except ValueError as exc:
        raise CodecError(_SHARDING, str(exc)) from exc
    return Sharding(dataclasses.replace(array, grid=grid, codecs=layout.codecs), layout)


def inner_array(array: ArrayMetadata) -> ArrayMetadata | None:
    """`array` in inner chunks, as sharding_of() tells it; None as there."""
    found = sharding_of(array)
    return None if found is None else found.inner
