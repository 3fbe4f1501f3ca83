"""Shards: the index, inner chunks read one by one and together, and damaged shards."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, ShardingCodec
from zarr.storage import MemoryStore

from tests.zarr.chunks import array_of, assembled, parsed
from zarrfs.zarr.codecs import CodecError, check_codecs, decode_chunk, decode_chunk_at, inner_array, sharding_of
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.model import ArrayMetadata

NONE = (1 << 64) - 1
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}


def sharded(shape: tuple[int, ...], inner: tuple[int, ...], **more: Any) -> ArrayMetadata:
    """Return the metadata of an array of 16-bit numbers with a single shard."""
    configuration = {"chunk_shape": list(inner), "codecs": [LITTLE], "index_codecs": [LITTLE, CRC], **more}
    return array_of("<u2", shape, ("sharding_indexed", configuration))


def index(*entries: int) -> bytes:
    data = struct.pack(f"<{len(entries)}Q", *entries)
    return data + struct.pack("<I", google_crc32c.value(data))


def test_shards_within_shards_are_read() -> None:
    shape, middle, least = (8, 8), (4, 4), (2, 2)
    nested = ShardingCodec(chunk_shape=middle, codecs=[ShardingCodec(chunk_shape=least, codecs=[BytesCodec()])])
    store = MemoryStore()
    written = zarr.create(shape, chunks=shape, dtype="<i4", zarr_format=3, codecs=[nested], store=store, fill_value=0)
    values = np.arange(64, dtype="<i4").reshape(shape)
    written[...] = values
    parts = {key: held.to_bytes() for key, held in store._store_dict.items()}
    array = parsed(parts.get)
    inner = inner_array(array)
    assert inner is not None
    assert (inner.grid.chunks, inner.grid.counts, inner.codecs[0].name) == (middle, (2, 2), "sharding_indexed")
    assert inner_array(inner).grid.chunks == least  # type: ignore[union-attr]
    assert np.array_equal(assembled(array, parts.get), values)


def test_missing_inner_chunks_are_the_fill_value() -> None:
    array = dataclasses.replace(sharded((4,), (2,)), fill=b"\x07\x01")
    assert decode_chunk(array, b"abcd" + index(NONE, NONE, 0, 4)).tobytes() == b"\x07\x01\x07\x01abcd"
    filtered = array_of("<u2", (4,), ("numcodecs.delta", {"dtype": "<u2"}), *(spec[:2] for spec in array.codecs))
    assert check_codecs(filtered) == []
    assert decode_chunk(filtered, struct.pack("<4H", 1, 1, 1, 1) + index(0, 4, 4, 4)).tolist() == [1, 2, 3, 4]
    with pytest.raises(CodecError, match="sharding_indexed: a chunk is missing, and filters make"):
        decode_chunk(filtered, b"abcd" + index(NONE, NONE, 0, 4))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "sharding_indexed: a shard of 0 bytes, shorter than the index of 36"),
        (bytes(35), "sharding_indexed: a shard of 35 bytes"),
        (b"abcd" + index(0, 4, 1, 4)[:-1] + b"\0", "crc32c: the checksum does not match"),
        (b"abcd" + index(0, 4, 37, 4), "sharding_indexed: inner chunk 1 lies at 37 [+] 4 of 40 bytes"),
        (b"abcd" + index(0, 4, NONE, 4), "sharding_indexed: inner chunk 1 lies at 18446744073709551615"),
        (b"abcd" + index(0, 4, 0, NONE), "sharding_indexed: inner chunk 1 lies at 0"),
        (b"abcd" + index(0, 4, NONE - 3, 4), "sharding_indexed: inner chunk 1 lies at"),
        (b"abcd" + index(0, 4, 0, 3), "bytes: 3 bytes are stored, not 4"),
    ],
)
def test_damaged_shards_are_errors(data: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode_chunk(sharded((4,), (2,)), data)


@pytest.mark.parametrize("before", [(), (("transpose", {"order": [0]}),)])
def test_a_damaged_shard_at_the_edge_of_the_array_is_an_error(before: tuple[tuple[str, Any], ...]) -> None:
    inner = {"chunk_shape": [2], "codecs": [{"name": "bytes"}, CRC], "index_codecs": [LITTLE]}
    array = array_of("|u1", (8,), *before, ("sharding_indexed", inner))
    array = dataclasses.replace(array, shape=(6,), grid=Grid((6,), (8,)))
    parts = [bytes(pair) + struct.pack("<I", google_crc32c.value(bytes(pair))) for pair in ((1, 2), (3, 4), (5, 6))]
    data = bytearray(b"".join(parts) + struct.pack("<8Q", 0, 6, 6, 6, 12, 6, NONE, NONE))
    assert decode_chunk_at(array, data, (0,)).tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    data[0] ^= 1
    with pytest.raises(CodecError, match="crc32c: the checksum does not match"):
        decode_chunk_at(array, data, (0,))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"chunk_shape": [3]}, r"shards of \[4\] are not a whole number of chunks of \[3\]"),
        ({"chunk_shape": [0]}, "not a whole number"),
        ({"chunk_shape": [2.0]}, "not a whole number"),
        ({"chunk_shape": [2, 2]}, "where shards have 1 dimensions"),
        ({"chunk_shape": None}, "where shards have 1 dimensions"),
        ({"index_location": "middle"}, "index_location middle is not known"),
        ({"index_codecs": [LITTLE, {"name": "gzip"}]}, "the index is compressed"),
        ({"index_codecs": []}, "not a list, or empty"),
        ({"codecs": []}, "not a list, or empty"),
        ({"codecs": [{"configuration": {}}]}, "expected a name"),
        ({"codecs": 4}, "not a list, or empty"),
    ],
)
def test_invalid_configurations_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(MetadataError, match=says):
        sharding_of(sharded((4,), (2,), **more))


def test_shards_of_packed_bits_are_refused() -> None:
    """The shape of shards is not that of the array that the filter makes."""
    specs = [spec[:2] for spec in sharded((9,), (3,)).codecs]
    (reason,) = check_codecs(array_of("|b1", (9,), ("numcodecs.packbits", {}), *specs))
    assert reason.startswith("sharding_indexed: after a filter that changes the shape")


def test_an_unknown_inner_codec_is_named() -> None:
    array = sharded((4,), (2,), codecs=[LITTLE, {"name": "lzo"}])
    assert check_codecs(array) == ["lzo: unknown codec"]


def test_a_huge_index_allocates_nothing() -> None:
    """A shard of 2^40 inner chunks is refused, as it is shorter than its index, before the index is allocated."""
    array = sharded((1 << 20, 1 << 20), (1, 1))
    with pytest.raises(CodecError, match="a shard of 100 bytes, shorter than the index of 17592186044420"):
        decode_chunk(array, bytes(100))
