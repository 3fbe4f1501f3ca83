"""Random chunks and configurations decode to an array of the declared shape and type, or raise a one-line error."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.zarr.chunks import array_of
from zarrfs.zarr.codecs import CodecError, decode_chunk
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.model import ArrayMetadata

pytestmark = pytest.mark.filterwarnings("ignore")
RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.sampled_from(["<i4", "C", "|O", "end"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "id"]), inner, max_size=2),
    max_leaves=5,
)
OPTIONS = [
    "order", "endian", "dtype", "astype", "encode_dtype", "decode_dtype", "offset", "scale", "digits", "keepbits",
    "elementsize", "labels", "location", "initval", "prefix", "chunk_shape", "codecs", "index_codecs", "format",
    "filters", "encoding", "strict", "id",
]  # fmt: skip
NAMES = [
    "transpose", "bytes", "blosc", "gzip", "zstd", "crc32c", "sharding_indexed", "vlen-utf8",
    *(f"numcodecs.{name}" for name in ("delta", "fixedscaleoffset", "quantize", "astype", "packbits", "bitround",
      "shuffle", "categorize", "lzma", "lz4", "zlib", "crc32", "jenkins_lookup3", "json2", "vlen-array", "base64")),
]  # fmt: skip


def value_or_error(array: ArrayMetadata, data: bytes) -> None:
    """Assert that a chunk decodes to the declared shape and type, or fails with an error of one line."""
    try:
        found = decode_chunk(array, data)
    except CodecError as exc:
        error: str | None = str(exc)
    else:
        error = None
        assert (found.shape, found.dtype) == (array.grid.chunks, array.dtype.numpy)
    assert error is None or "\n" not in error


@RELAXED
@given(st.data())
def test_random_configurations_and_bytes_decode_or_fail_cleanly(data: st.DataObject) -> None:
    specs = st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(OPTIONS), JSON_VALUES, max_size=3))
    codecs = data.draw(st.lists(specs, max_size=4))
    dtype = data.draw(st.sampled_from(["<i4", ">f8", "|b1", "|O", "|S3"]))
    generation = data.draw(st.sampled_from(["v2", "v3"]))
    try:
        array = array_of(dtype, (3, 2), *codecs, generation=generation)
    except MetadataError:  # an invalid configuration of shards or axes
        return
    value_or_error(array, data.draw(st.binary(max_size=60)))
