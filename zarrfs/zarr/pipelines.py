"""Conversion of the codecs of Zarr v0, v1 and v2 to pipelines of v3, and a check of the order that v3 requires.

Source: Zarr v2 specification, "compressor", "filters", "order"; Zarr v3 core, "Codecs"; numcodecs 0.16; the codecs of
numcodecs that zarr-python 3.1 accepts in a pipeline of v3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarrfs.zarr import dtypes
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import ArrayMetadata, CodecSpec

PREFIX = "numcodecs."  # of the names in v3 pipelines of codecs that only numcodecs defines
BLOSC_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")  # v3's names; the index is Blosc's number

# Codecs of numcodecs from arrays to arrays, and from arrays to bytes; all others convert bytes to bytes
CONVERTING = ("astype", "delta", "fixedscaleoffset", "quantize")  # filters from one type of numbers to another
_ARRAY_TO_ARRAY = frozenset((*CONVERTING, "bitround", "categorize", "packbits"))
OBJECT_CODECS = ("json", "json2", "msgpack2", "pickle", "vlen-array", "vlen-bytes", "vlen-utf8")  # filters in v2
ARRAY_TO_BYTES = frozenset((*OBJECT_CODECS, "pcodec", "zfpy"))
_V3_COMPRESSORS = (
    "blosc", "lz4", "zstd", "zlib", "gzip", "bz2", "lzma", "shuffle", "crc32", "crc32c", "adler32", "fletcher32",
    "jenkins_lookup3",
)  # fmt: skip
_V3_STAGES = {  # 0: array -> array, 1: array -> bytes, 2: bytes -> bytes
    "transpose": 0, "bytes": 1, "vlen-utf8": 1, "vlen-bytes": 1, "blosc": 2, "gzip": 2, "zstd": 2, "crc32c": 2,
    f"{PREFIX}pcodec": 1, f"{PREFIX}zfpy": 1,
    **{PREFIX + name: 0 for name in _ARRAY_TO_ARRAY - {"categorize"}},
    **{PREFIX + name: 2 for name in _V3_COMPRESSORS},
}  # fmt: skip


def _bytes(dtype: DataType) -> CodecSpec:
    """Return the codec "bytes" for items of `dtype`, with no endian if its fields have several byte orders."""
    return CodecSpec("bytes", {"endian": dtype.endian} if dtype.endian else {})


def _blosc(opts: Mapping[str, JSON], itemsize: int, member: str) -> CodecSpec:
    """Parse Blosc options of v0, v1 or v2. Shuffle -1 selects bit shuffle for single bytes, else byte shuffle.

    Raise MetadataError that names `member`, the member with the options.
    """
    cname, clevel, shuffle = opts.get("cname", "lz4"), opts.get("clevel", 5), opts.get("shuffle", 1)
    if shuffle == -1:
        shuffle = 2 if itemsize == 1 else 1
    known = isinstance(shuffle, int) and 0 <= shuffle < len(BLOSC_SHUFFLES)
    if not isinstance(cname, str) or not isinstance(clevel, int) or not known:
        raise MetadataError(f"{member}: blosc with a cname, clevel or shuffle that it does not have")
    return CodecSpec(
        "blosc",
        {
            "typesize": min(itemsize or 1, 255), "cname": cname, "clevel": int(clevel),
            "shuffle": BLOSC_SHUFFLES[shuffle], "blocksize": opts.get("blocksize", 0),
        },
    )  # fmt: skip


def _numcodec(value: JSON, itemsize: int, member: str) -> CodecSpec:
    name = value.get("id") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise MetadataError(f"{member}: expected objects with an id")
    if name == "blosc":
        return _blosc(value, itemsize, member)
    configuration = {key: item for key, item in value.items() if key != "id"}
    if name == "shuffle":  # the default of numcodecs; Zarr v3 has another one
        configuration.setdefault("elementsize", 4)
    if name == "gzip":
        return CodecSpec("gzip", {"level": configuration.get("level", 1)})
    if name == "zstd":
        checksum = configuration.get("checksum", False)
        return CodecSpec("zstd", {"level": configuration.get("level", 1), "checksum": checksum})
    if name == "crc32c" and configuration.get("location", "end") == "end":
        return CodecSpec("crc32c")
    if name in ("vlen-utf8", "vlen-bytes"):
        return CodecSpec(name)
    return CodecSpec(f"{PREFIX}{name}", configuration)


def pipeline_from_v2(dtype: DataType, transposed: int, filters: list[Any], compressor: JSON) -> tuple[CodecSpec, ...]:
    """Make a pipeline of v3 codecs, in encoding order, from the filters and the compressor of a v2 array.

    `transposed` is the number of dimensions of an array in order F, and 0 in order C. The codec "bytes" is inserted
    before the first codec that takes bytes. v2 allows filters of arrays after such codecs; they keep their position,
    although v3 does not allow such pipelines (see check_v3_order). Raise MetadataError if a codec is invalid.
    """
    found = [CodecSpec("transpose", {"order": [*range(transposed)][::-1]})] if transposed > 1 else []
    steps = [("filters", item) for item in filters]
    if compressor is not None:
        steps.append(("compressor", compressor))
    current: DataType | None = dtype  # the input of the next codec; None: bytes
    itemsize = dtype.itemsize
    for member, step in steps:
        codec = _numcodec(step, itemsize, member)
        name = step["id"]
        if name in _ARRAY_TO_ARRAY:
            current = filtered(name, codec.configuration, current) if current else None
            itemsize = current.itemsize if current else itemsize
        elif name in ARRAY_TO_BYTES:
            current = None
        elif current:
            found.append(_bytes(current))
            current = None
        found.append(codec)
    if current:
        found.append(_bytes(current))
    return tuple(found)


def filtered(name: str, configuration: Mapping[str, JSON], dtype: DataType) -> DataType:
    """Return the data type to which a filter encodes items of `dtype`."""
    if name == "packbits":
        return dtypes.parse_v2("|u1")
    text = configuration.get("encode_dtype" if name == "astype" else "astype")
    return dtypes.parse_v2(text) if isinstance(text, str) else dtype


def check_v3_order(array: ArrayMetadata) -> None:
    """Raise MetadataError unless the codecs of `array` are a valid pipeline of v3.

    In v3, codecs of arrays come first, then exactly one that turns the array into bytes, then codecs of bytes.
    """
    current = 0
    for spec in array.codecs:
        stage = _V3_STAGES.get(spec.name)
        name = spec.name.removeprefix(PREFIX)
        if stage is None:
            raise MetadataError(f"codec {name}, which Zarr v3 does not have")
        if stage < current or stage == current == 1 or (stage == 2 and not current):
            raise MetadataError(f"codec {name} after one that makes bytes")
        current = stage
    if not current:
        raise MetadataError("no codec that makes bytes of the array")
