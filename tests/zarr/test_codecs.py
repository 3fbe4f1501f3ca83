"""Decoding of chunks written by releases of Zarr and, with random pipelines, by zarr-python."""

from __future__ import annotations

import json
import math
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.codecs import numcodecs as zarr3
from zarr.storage import MemoryStore

from tests.zarr.chunks import array_of, assembled, parsed
from zarrfs.zarr.codecs import CodecError, check_codecs, decode_chunk

pytestmark = pytest.mark.filterwarnings("ignore")  # zarr-python warns of future changes, numcodecs of overflows
RELAXED = settings(deadline=None, max_examples=35, suppress_health_check=list(HealthCheck))


NUMBERS = ["<i1", "<i2", ">i2", "<i4", ">i4", "<i8", "<u2", ">u8", "<f4", ">f4", "<f8", ">f8"]
OTHERS = ["|b1", "<c8", ">c16", "<M8[s]", "<m8[D]", "|S5", "<U3", ">U2", "|V3"]
RECORDS = [[("a", "<i4"), ("b", ">f8")], [("x", "|S3"), ("y", "<u2")]]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return shape, tuple(draw(st.integers(1, 6)) for _ in shape)


@st.composite
def content(draw: st.DrawFn, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Draw random values of a type, some of them repeated."""
    kind = np.dtype(dtype)
    random = np.random.default_rng(draw(st.integers(0, 9)))
    if not math.prod(shape):
        return np.zeros(shape, kind)
    if kind.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind.kind in "US":
        return random.integers(0, 999, shape).astype(kind)
    return random.integers(0, draw(st.sampled_from([2, 250])), (*shape, kind.itemsize), "u1").view(kind)[..., 0]


SUMS = [[], [], [numcodecs.CRC32()], [numcodecs.Adler32()], [numcodecs.Fletcher32()], [numcodecs.Zlib(1)]]


@st.composite
def filters(draw: st.DrawFn, dtype: str) -> list[Any]:
    """Draw filters of v2 for a dtype."""
    kind, found = np.dtype(dtype).kind, []
    if kind in "iuf" and draw(st.booleans()):
        found.append(numcodecs.Delta(dtype=dtype))
    if kind == "f" and draw(st.booleans()):
        found.append(draw(st.sampled_from([
            numcodecs.FixedScaleOffset(offset=1, scale=4, dtype=dtype, astype=">i4"),
            numcodecs.Quantize(digits=1, dtype=dtype, astype=dtype),
            numcodecs.AsType(encode_dtype="<f4", decode_dtype=dtype),
        ])))  # fmt: skip
        if isinstance(found[-1], numcodecs.Quantize) and dtype[0] == "<" and draw(st.booleans()):
            found.append(numcodecs.BitRound(keepbits=3))
    if kind == "b" and draw(st.booleans()):
        found.append(numcodecs.PackBits())
    if draw(st.booleans()):
        found.append(numcodecs.Shuffle(1 if found else np.dtype(dtype).itemsize))
    return found + draw(st.sampled_from(SUMS))


V2_COMPRESSORS = [
    None, numcodecs.Zlib(3), numcodecs.GZip(1), numcodecs.BZ2(1), numcodecs.LZMA(preset=0), numcodecs.LZ4(),
    numcodecs.Zstd(2), numcodecs.Zstd(1, checksum=True), numcodecs.CRC32C(), numcodecs.Base64(),
    numcodecs.JenkinsLookup3(),
    *(numcodecs.Blosc(cname, 5, shuffle) for cname in ("lz4", "zstd", "blosclz", "zlib") for shuffle in (0, 1, 2)),
]  # fmt: skip


def _written(store: MemoryStore) -> Any:
    held = store._store_dict
    return lambda key: held[key].to_bytes() if key in held else None


def _same(ours: np.ndarray[Any, Any], theirs: Any) -> None:
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert ours.astype(theirs.dtype).tobytes() == theirs.tobytes()


@RELAXED
@given(st.data())
def test_v2_arrays_of_zarr_python_are_read(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([*NUMBERS, *OTHERS, *RECORDS]))
    shape, chunks = data.draw(shapes())
    plain = isinstance(dtype, str)
    store = MemoryStore()
    written = zarr.create_array(
        store, shape=shape, chunks=chunks, dtype=np.dtype(dtype), zarr_format=2,
        filters=(data.draw(filters(dtype)) if plain else None) or None,
        compressors=data.draw(st.sampled_from(V2_COMPRESSORS)), order=data.draw(st.sampled_from("CF")),
        config={"write_empty_chunks": data.draw(st.booleans())},
    )  # fmt: skip
    values = data.draw(content(dtype, shape))
    written[...] = values
    get = _written(store)
    _same(assembled(parsed(get), get), written[...])


@RELAXED
@given(st.data())
def test_v3_arrays_of_zarr_python_are_read(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from([*NUMBERS, "|b1", "<c8", "<M8[s]", "|S5", "<U3"])))
    shape, chunks = data.draw(shapes())
    store = MemoryStore()
    codecs: list[Any] = []
    if filtered := dtype.kind in "iuf" and dtype.itemsize > 1 and data.draw(st.booleans()):
        codecs.append(data.draw(st.sampled_from(_filters_of_v3(dtype))))
    if not filtered and data.draw(st.booleans()):  # zarr-python's filters flatten their input
        codecs.append(TransposeCodec(order=data.draw(st.permutations(range(len(shape))))))
    # zarr-python's filters ignore the byte order of items
    made = BytesCodec(endian="little" if filtered else data.draw(st.sampled_from(["little", "big"])))
    if shape and not filtered and data.draw(st.booleans()):  # zarr-python cannot write a shard without dimensions
        # zarr-python compares the shapes of shards and chunks without regard to the transposition
        inner, times = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        chunks = (inner * times,) * len(shape)
        codecs.append(
            ShardingCodec(
                chunk_shape=(inner,) * len(shape),
                codecs=[made, *data.draw(st.lists(st.sampled_from(V3_BYTES), max_size=2))],
                index_location=data.draw(st.sampled_from(["start", "end"])),
            )
        )
    else:
        codecs += [made, *data.draw(st.lists(st.sampled_from(V3_BYTES), max_size=2))]
    written = zarr.create(
        shape, chunks=chunks, dtype=dtype, zarr_format=3, codecs=codecs, store=store, fill_value=dtype.type()
    )
    written[...] = data.draw(content(dtype, shape))
    get = _written(store)
    _same(assembled(parsed(get), get), written[...])


def _filters_of_v3(dtype: np.dtype[Any]) -> list[Any]:
    name = dtype.newbyteorder("<").str
    found = [zarr3.Delta(dtype=name), zarr3.AsType(encode_dtype="<f8", decode_dtype=name)]
    return [*found, zarr3.FixedScaleOffset(offset=1, scale=2, dtype=name)] if dtype.kind == "f" else found


V3_BYTES = [
    zarr3.Zlib(level=1), zarr3.LZ4(), zarr3.BZ2(level=1), zarr3.LZMA(preset=0), zarr3.Shuffle(elementsize=1),
    zarr3.CRC32(), zarr3.Adler32(), zarr3.Fletcher32(), zarr3.JenkinsLookup3(), zarr3.Zstd(level=1), zarr3.GZip(),
    GzipCodec(level=1), ZstdCodec(level=1), ZstdCodec(level=3, checksum=True), Crc32cCodec(),
    *(BloscCodec(typesize=4, cname=cname, clevel=5, shuffle=shuffle)
      for cname in ("lz4", "zstd", "zlib") for shuffle in ("noshuffle", "shuffle", "bitshuffle")),
]  # fmt: skip


OBJECT_FILTERS = [
    numcodecs.VLenUTF8(), numcodecs.JSON(), numcodecs.Categorize(["x", "yy"], dtype=object),
]  # fmt: skip


@settings(RELAXED, max_examples=25)
@given(st.data())
def test_variable_length_text_is_decoded(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2)))
    values = np.empty(shape, object)
    texts = st.sampled_from(["x", "yy"]) if (labels := data.draw(st.booleans())) else st.text(max_size=5)
    for at in np.ndindex(shape):
        values[at] = data.draw(texts)
    filter_ = data.draw(st.sampled_from(OBJECT_FILTERS if labels else OBJECT_FILTERS[:2]))
    compressor = data.draw(st.sampled_from([None, numcodecs.Zstd(), numcodecs.LZ4(), numcodecs.Blosc()]))
    coded = filter_.encode(values)
    stored = compressor.encode(coded) if compressor else bytes(coded)
    codecs = [(f"numcodecs.{codec.codec_id}", _configuration(codec)) for codec in (filter_, compressor) if codec]
    found = decode_chunk(array_of("|O", shape, *codecs, generation="v2"), stored)
    assert found.shape == shape
    assert found.tolist() == values.tolist()


def _configuration(codec: Any) -> dict[str, Any]:
    return {key: value for key, value in codec.get_config().items() if key != "id"}


def test_variable_length_arrays_are_decoded() -> None:
    values = np.empty(3, object)
    values[:] = [np.array([1, 2]), np.array([], "i8"), np.array([7])]
    coded = numcodecs.VLenArray("<i8").encode(values)
    found = decode_chunk(array_of("|O", (3,), ("numcodecs.vlen-array", {"dtype": "<i8"}), generation="v2"), coded)
    assert [part.tolist() for part in found] == [[1, 2], [], [7]]


@pytest.mark.parametrize(
    ("codecs", "says"),
    [
        ([("bytes", {}), ("numcodecs.pickle", {})], "pickle: never decoded, because that executes code"),
        ([("numcodecs.nowhere", {"id": "pickle"})], "nowhere: numcodecs has no such codec here"),
        ([("bytes", {}), ("numcodecs.nowhere", {})], "nowhere: numcodecs has no such codec here"),
        ([("bytes", {}), ("lzo", {})], "lzo: unknown codec"),
        ([("numcodecs.delta", {"dtype": "<f4"}), ("bytes", {})], "delta: made for float32, the array has int32"),
        ([("numcodecs.delta", {"dtype": "|O"}), ("bytes", {})], "delta: cannot be used as it is configured"),
        ([("numcodecs.astype", {"encode_dtype": "|V99999999"}), ("bytes", {})], "astype: dtype |V99999999 is not"),
        ([("numcodecs.astype", {"encode_dtype": "<c8"}), ("bytes", {})], "astype: complex64 to int32"),
        ([("bytes", {}), ("numcodecs.shuffle", {"elementsize": "4"})], "shuffle: cannot be used as it is configured"),
        ([("numcodecs.astype", {"encode_dtype": "|u1"}), ("numcodecs.packbits", {}), ("bytes", {})], "packbits"),
        ([("gzip", {}), ("bytes", {})], "chunk: a codec made for bytes comes before the one that makes them"),
        ([("bytes", {"endian": "pdp"})], "bytes: endian pdp is not known"),
        ([("vlen-utf8", {})], "vlen-utf8: holds objects, the array has int32"),
        ([("bytes", {}), *[("gzip", {})] * 20], "chunk: a codec may make 34"),  # GB, in a tiny document
        ([], "chunk: no codec makes bytes of it"),
    ],
)
def test_invalid_pipelines_are_refused_without_data(codecs: list[Any], says: str) -> None:
    array = array_of("<i4", (2, 3), *codecs)
    (reason,) = check_codecs(array)
    assert reason.startswith(says)
    with pytest.raises(CodecError) as caught:
        decode_chunk(array, bytes(24))
    assert str(caught.value) == reason


def test_a_chunk_beyond_any_address_space_is_refused() -> None:
    (reason,) = check_codecs(array_of("<i8", (1 << 40, 1 << 40), ("bytes", {}), ("zstd", {})))
    assert reason == f"chunk: {8 << 80} bytes"


@pytest.mark.parametrize("size", [0, 23, 25])
def test_an_uncompressed_chunk_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(CodecError, match=f"bytes: {size} bytes are stored, not 24"):
        decode_chunk(array_of("<i4", (2, 3), ("bytes", {"endian": "little"})), bytes(size))


@pytest.mark.parametrize("codec", ["crc32c", "numcodecs.crc32", "numcodecs.adler32", "numcodecs.fletcher32"])
def test_every_flipped_byte_fails_the_checksum(codec: str) -> None:
    array = array_of("|u1", (9,), ("bytes", {}), (codec, {}))
    stored = bytearray(numcodecs.get_codec({"id": codec.removeprefix("numcodecs.")}).encode(b"123456789"))
    assert decode_chunk(array, stored).tobytes() == b"123456789"
    for at in range(len(stored)):
        stored[at] ^= 4
        with pytest.raises(CodecError, match=codec.removeprefix("numcodecs.")) as caught:
            decode_chunk(array, stored)
        assert "\n" not in str(caught.value)
        stored[at] ^= 4


def test_a_chunk_larger_than_memory_is_refused() -> None:
    claim = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\x00\x00"  # an empty frame of zstd
    with pytest.raises(CodecError, match=f"zstd: no memory for the {1 << 50} bytes"):
        decode_chunk(array_of("|u1", (1 << 25, 1 << 25), ("bytes", {}), ("zstd", {})), claim)


@pytest.mark.parametrize(
    ("dtype", "codec", "items"),
    [
        ("<f4", ("fixedscaleoffset", {"offset": 0, "scale": 1, "dtype": "<f4", "astype": "<i2"}), [0, 1, 2, 3, 4, 5]),
        ("<i2", ("delta", {"dtype": "<i2"}), [0, 1, 3, 6, 10, 15]),
        ("<f4", ("astype", {"encode_dtype": "<i2", "decode_dtype": "<f4"}), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_filter_before_a_transposition_gets_items_in_order(
    dtype: str, codec: tuple[str, Any], items: list[int]
) -> None:
    stored = np.array([0, 3, 1, 4, 2, 5], "<i2").tobytes()
    codecs = ((f"numcodecs.{codec[0]}", codec[1]), ("transpose", {"order": [1, 0]}), ("bytes", {"endian": "little"}))
    assert decode_chunk(array_of(dtype, (2, 3), *codecs), stored).tolist() == [items[:3], items[3:]]


@pytest.mark.parametrize(
    ("dtype", "codec", "data", "says"),
    [
        ("|O", ("vlen-utf8", {}), b"\xff\xff\xff\xff" + bytes(12), "vlen-utf8: does not hold 3 objects"),
        ("|O", ("vlen-utf8", {}), b"\x04\0\0\0" + bytes(16), "vlen-utf8: does not hold 3 objects"),
        ("|O", ("vlen-utf8", {}), b"\x03\0\0\0" + bytes(8), "vlen-utf8: does not hold 3 objects"),
        ("|O", ("vlen-utf8", {}), b"\x03\0\0\0" + bytes(8) + b"\xff" * 4, "vlen-utf8: damaged: corrupt buffer"),
        ("|O", ("vlen-utf8", {}), b"\x03\0\0\0" + bytes(8) + b"\1\0\0\0\xff", "vlen-utf8: damaged: 'utf-8' codec"),
        ("|b1", ("numcodecs.packbits", {}), b"\x04\xe0", "packbits: decodes to 4 bytes, not 3"),
        ("|O", ("numcodecs.json2", {}), b'["a","b","|O",[3]]', "json2: 2 objects where 3 are expected"),
        ("|O", ("numcodecs.json2", {}), b'["a","b","c","|O",[1099511627776]]', "json2: .O of shape"),
        ("|O", ("numcodecs.json2", {}), b'["a","b","c","<U99999999",[3]]', "json2: <U99999999 of shape"),
        ("|O", ("numcodecs.json2", {}), b"[" * 50000, "json2: damaged: "),
    ],
)
def test_damaged_filter_output_is_an_error(dtype: str, codec: tuple[str, Any], data: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode_chunk(array_of(dtype, (3,), codec, generation="v2"), data)


def test_items_of_a_fixed_length_may_be_stored_as_objects() -> None:
    """zarr-python 3.0 did so in v2."""
    text, data = np.array(["é", "", "four"]), np.array([b"a", b"bc"])
    for codec, items in ((numcodecs.VLenUTF8(), text), (numcodecs.VLenBytes(), data)):
        array = array_of(items.dtype.str, items.shape, (codec.codec_id, {}), generation="v2")
        assert decode_chunk(array, codec.encode(items.astype(object))).tolist() == items.tolist()


@pytest.mark.parametrize("encoding", ["punycode", "idna", "utf-7", "rot13", "unicode_escape", 5, None])
def test_json_in_an_encoding_of_python_is_refused(encoding: object) -> None:
    """Decoding punycode takes quadratic time, in a thread that cannot be cancelled."""
    document = {
        "zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "|O", "fill_value": None, "order": "C",
        "compressor": None, "filters": [{"id": "json2", "encoding": encoding}],
    }  # fmt: skip
    (reason,) = check_codecs(parsed({".zarray": json.dumps(document).encode()}.get))
    assert f"encoding {encoding}" in reason


@pytest.mark.parametrize("dtype", ["<i2", ">i2"])
def test_v3_filters_get_values_in_any_byte_order(dtype: str) -> None:
    stored = np.array([300, 1, 1, 2], dtype=">i2").tobytes()
    codecs = (("numcodecs.delta", {"dtype": "<i2"}), ("bytes", {"endian": "big"}))
    found = decode_chunk(array_of(dtype, (2, 2), *codecs), stored)
    assert found.dtype == np.dtype(dtype)
    assert found.tolist() == [[300, 301], [302, 304]]
