"""What codecs take and give, so that a pipeline of one version can be told as one of another.

Source: Zarr v3 core, "Codecs"; numcodecs; which numcodecs zarr-python 3.1 takes in a pipeline of v3.
"""

from __future__ import annotations

from typing import NamedTuple

from zarrfs.zarr.model import ArrayMetadata, CodecSpec, MetadataError

# of numcodecs, by what they are in v3
_ARRAY_TO_ARRAY = frozenset(("delta", "bitround", "fixedscaleoffset", "quantize", "packbits", "astype"))
_ARRAY_TO_BYTES = frozenset(("pcodec", "zfpy"))
_BYTES_TO_BYTES = frozenset(
    (
        "blosc", "lz4", "zstd", "zlib", "gzip", "bz2", "lzma", "shuffle", "crc32", "crc32c", "adler32", "fletcher32",
        "jenkins_lookup3",
    )
)  # fmt: skip
_SERIALIZERS = frozenset(("bytes", "vlen-utf8", "vlen-bytes", "sharding_indexed"))
_COMPRESSORS = frozenset(("blosc", "gzip", "zstd", "crc32c"))
PREFIX = "numcodecs."


class Pipeline(NamedTuple):
    """The codecs of an array in the order of encoding, by what they are."""

    filters: tuple[CodecSpec, ...]  # array -> array
    serializer: CodecSpec  # array -> bytes
    compressors: tuple[CodecSpec, ...]  # bytes -> bytes


def pipeline_of(array: ArrayMetadata) -> Pipeline:
    """The codecs of `array`, sorted into what v3 allows.

    Bytes codecs that v2 had as its last filters (shuffle and zlib, as in HDF5) go behind the serializer, where they
    see the same bytes. MetadataError where a codec is unknown, or bytes codecs and array codecs are mixed.
    """
    filters: list[CodecSpec] = []
    serializer: CodecSpec | None = None
    compressors: list[CodecSpec] = []
    for spec in array.codecs:
        name = spec.name.removeprefix(PREFIX)
        known = _numcodec(name) if name != spec.name else _native(name)
        if known == "array -> array":
            if compressors or serializer is not None:
                raise MetadataError(f"codec {name} follows one of bytes")
            filters.append(spec)
        elif known == "array -> bytes":
            if serializer is not None or (compressors and name != "bytes"):
                raise MetadataError(f"codec {name} follows one of bytes")
            serializer = spec
        elif known == "bytes -> bytes":
            compressors.append(spec)
        else:
            raise MetadataError(f"codec {name}, which Zarr v3 has no name for")
    if serializer is None:
        raise MetadataError("no codec that makes bytes of the array")
    return Pipeline(tuple(filters), serializer, tuple(compressors))


def _numcodec(name: str) -> str | None:
    if name in _ARRAY_TO_ARRAY:
        return "array -> array"
    if name in _ARRAY_TO_BYTES:
        return "array -> bytes"
    return "bytes -> bytes" if name in _BYTES_TO_BYTES else None


def _native(name: str) -> str | None:
    if name == "transpose":
        return "array -> array"
    if name in _SERIALIZERS:
        return "array -> bytes"
    return "bytes -> bytes" if name in _COMPRESSORS else None
