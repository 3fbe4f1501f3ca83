"""What the documents of several generations share: grids, and the codecs of v0, v1 and v2 in the words of v3.

Source: Zarr v2 specification, "compressor", "filters", "order"; numcodecs 0.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarrfs.zarr import dtypes
from zarrfs.zarr.dtypes import DataType, Endian
from zarrfs.zarr.errors import JSON, MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.model import CodecSpec

DIMENSIONS_MAX = 64  # numpy has no more
_EXTENT_MAX = (1 << 63) - 1  # items, bytes of a chunk: what a process can address at all

# numcodecs that turn arrays into arrays, and into bytes; all others turn bytes into bytes
TO_ARRAYS = frozenset(("astype", "bitround", "categorize", "delta", "fixedscaleoffset", "packbits", "quantize"))
TO_BYTES = frozenset(("json2", "msgpack2", "pcodec", "pickle", "vlen-array", "vlen-bytes", "vlen-utf8", "zfpy"))
_SHUFFLES = {0: "noshuffle", 1: "shuffle", 2: "bitshuffle"}
_BYTES: dict[Endian | None, CodecSpec] = {
    "little": CodecSpec("bytes", {"endian": "little"}),
    "big": CodecSpec("bytes", {"endian": "big"}),
    None: CodecSpec("bytes"),
}


def regular_grid(shape: JSON, chunks: JSON, dtype: DataType, empty: bool = True) -> Grid:
    """The grid of an array; MetadataError. `empty`: chunks may be 0 long where the shape is, read as 1.

    zarr-python 2 and 3 write such chunks. Chunks have at most 2^63 - 1 bytes; to decode them takes a bound of its own.
    """
    if empty and isinstance(chunks, list) and 0 in chunks and isinstance(shape, list) and len(shape) == len(chunks):
        chunks = [1 if step == 0 == extent else step for extent, step in zip(shape, chunks, strict=True)]
    try:
        grid = Grid(shape, chunks)
    except ValueError as error:
        raise MetadataError(str(error)) from None
    if len(grid.shape) > DIMENSIONS_MAX:
        raise MetadataError(f"shape: more than {DIMENSIONS_MAX} dimensions")
    size = dtype.itemsize or 1
    for extent, step in zip(grid.shape, grid.chunks, strict=True):
        size *= step
        if extent > _EXTENT_MAX or size > _EXTENT_MAX:
            raise MetadataError("shape, chunks: over 2^63 - 1 items, or bytes in a chunk")
    return grid


def required(document: Mapping[str, JSON], name: str) -> JSON:
    """A member of a document; MetadataError where it is missing."""
    try:
        return document[name]
    except KeyError:
        raise MetadataError(f"{name} is missing") from None


def to_bytes(dtype: DataType) -> CodecSpec:
    """The codec that makes bytes of items: in their own byte order, or of fields of several."""
    return _BYTES[dtype.endian]


def transposed(ndim: int) -> CodecSpec:
    """Order F: dimensions in reverse."""
    return CodecSpec("transpose", {"order": list(range(ndim))[::-1]})


def blosc(opts: Mapping[str, JSON], itemsize: int, where: str) -> CodecSpec:
    """Blosc as v0, v1 and v2 configure it: shuffle -1 is up to the size of items."""
    cname, clevel, shuffle = opts.get("cname", "lz4"), opts.get("clevel", 5), opts.get("shuffle", 1)
    if shuffle == -1:
        shuffle = 2 if itemsize == 1 else 1
    known = isinstance(shuffle, int) and shuffle in _SHUFFLES
    if not isinstance(cname, str) or not isinstance(clevel, int) or not known:
        raise MetadataError(f"{where}: blosc with a cname, clevel or shuffle that it does not have")
    return CodecSpec(
        "blosc",
        {
            "typesize": min(itemsize or 1, 255), "cname": cname, "clevel": int(clevel), "shuffle": _SHUFFLES[shuffle],
            "blocksize": opts.get("blocksize", 0),
        },
    )  # fmt: skip


def from_numcodecs(value: JSON, itemsize: int, where: str) -> CodecSpec:
    """The codec that a v2 document configures; MetadataError names the member that it is in."""
    name = value.get("id") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise MetadataError(f"{where}: expected objects with an id")
    if name == "blosc":
        return blosc(value, itemsize, where)
    configuration = {key: item for key, item in value.items() if key != "id"}
    if name == "gzip":
        return CodecSpec("gzip", {"level": configuration.get("level", 1)})
    if name == "zstd":
        checksum = configuration.get("checksum", False)
        return CodecSpec("zstd", {"level": configuration.get("level", 1), "checksum": checksum})
    if name == "crc32c" and configuration.get("location", "end") == "end":
        return CodecSpec("crc32c")
    if name in ("vlen-utf8", "vlen-bytes"):
        return CodecSpec(name)
    return CodecSpec(f"numcodecs.{name}", configuration)


def from_v2(dtype: DataType, order_f: int, filters: list[Any], compressor: JSON) -> tuple[CodecSpec, ...]:
    """The pipeline of a v2 array in the words of v3; `order_f`: dimensions to transpose, 0 in order C.

    The codec "bytes" stands before the first one that takes bytes. v2 lets filters for arrays come after such
    ones; they stay where they are, though v3 has no such pipelines.
    """
    found = [transposed(order_f)] if order_f > 1 else []
    steps = [("filters", item) for item in filters]
    if compressor is not None:
        steps.append(("compressor", compressor))
    current: DataType | None = dtype  # what the next codec gets; None: bytes
    itemsize = dtype.itemsize
    for where, step in steps:
        codec = from_numcodecs(step, itemsize, where)
        name = step["id"]
        if name in TO_ARRAYS:
            current = _filtered(name, codec.configuration, current) if current else None
            itemsize = current.itemsize if current else itemsize
        elif name in TO_BYTES:
            current = None
        elif current:
            found.append(to_bytes(current))
            current = None
        found.append(codec)
    if current:
        found.append(to_bytes(current))
    return tuple(found)


def _filtered(name: str, configuration: Mapping[str, JSON], dtype: DataType) -> DataType:
    """The type of items behind a filter."""
    if name == "packbits":
        return dtypes.parse_v2("|u1")
    text = configuration.get("encode_dtype" if name == "astype" else "astype")
    return dtypes.parse_v2(text) if isinstance(text, str) else dtype
