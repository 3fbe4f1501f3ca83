"""Documents of the first two generations: v0 (`__zmeta__`, zarr 0.3 and 0.4) and v1 (`meta`, zarr 1.0 and 1.1).

Source: zarr-legacy-persistence (0.4.0); Zarr v1 specification; stores written by these releases.
"""

from __future__ import annotations

from typing import NoReturn

from zarrfs.system.buffers import Buffer
from zarrfs.zarr import dtypes, fillvalues
from zarrfs.zarr.common import check_format, is_order_f, regular_grid, required
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.jsontext import JSON, load_json
from zarrfs.zarr.keys import FLAT, V0
from zarrfs.zarr.model import ArrayMetadata, CodecSpec
from zarrfs.zarr.pipelines import PREFIX, blosc_codec, bytes_codec, order_f_codec

_META_MAX = 1 << 20  # bytes; documents of Zarr v1 are far shorter


class OtherFile(MetadataError):
    """The error for a file of another program that has the name of a document: the file is ignored, not reported."""


def load_meta(data: Buffer) -> dict[str, JSON]:
    """Parse the JSON of a `meta`.

    Raise OtherFile if it has no zarr_format or more than 1 MiB, because other programs use the name, too, and
    MetadataError if it has the text "zarr_format" and is invalid JSON.
    """
    if len(data) <= _META_MAX and b'"zarr_format"' in bytes(data):
        document = load_json(data)
        if isinstance(document, dict) and "zarr_format" in document:
            return document
    raise OtherFile("not a document of Zarr v1")


def parse_v0(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    """Parse the members of a `__zmeta__`. Raise MetadataError."""
    dtype, grid = _dtype_and_grid(document)
    opts = {name: required(document, name) for name in ("cname", "clevel", "shuffle")}
    fill, _ = fillvalues.from_v0_v1(required(document, "fill_value"), dtype)
    codecs = bytes_codec(dtype), blosc_codec(opts, dtype.itemsize, "cname")
    return ArrayMetadata("v0", grid.shape, grid, dtype, fill, codecs, V0, attributes)


def parse_v1(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    """Parse the members of a `meta`. Raise MetadataError.

    Memory order F applies to chunks that Blosc compressed; zarr 1.x passed bytes in order C to other compressors.
    """
    check_format(document, 1)
    dtype, grid = _dtype_and_grid(document)
    compression = _compression(document.get("compression"), document.get("compression_opts"), dtype)
    fill, _ = fillvalues.from_v0_v1(required(document, "fill_value"), dtype)
    codecs = [bytes_codec(dtype), *compression]
    if is_order_f(document.get("order", "C"), "order") and compression and compression[0].name == "blosc":
        codecs[:0] = [order_f_codec(len(grid.shape))] if len(grid.shape) > 1 else []
    return ArrayMetadata("v1", grid.shape, grid, dtype, fill, tuple(codecs), FLAT, attributes)


def _dtype_and_grid(document: dict[str, JSON]) -> tuple[DataType, Grid]:
    dtype = dtypes.parse_v2(required(document, "dtype"))
    if dtype.kind == "O":
        raise MetadataError("dtype |O: chunks hold addresses, not objects")
    grid = regular_grid(required(document, "shape"), required(document, "chunks"), dtype, empty=False)
    if not grid.shape:
        raise MetadataError("shape: no dimensions, which Zarr before v2 did not have")
    return dtype, grid


def _compression(name: JSON, opts: JSON, dtype: DataType) -> list[CodecSpec]:
    if name in (None, "none"):
        return []
    if name == "blosc":
        if not isinstance(opts, dict):
            _refuse("blosc")
        return [blosc_codec(opts, dtype.itemsize, "compression_opts")]
    if name in ("zlib", "bz2"):
        if type(opts) is not int and opts is not None:
            _refuse(name)
        return [CodecSpec(f"{PREFIX}{name}", {"level": 1 if opts is None else opts})]
    if name == "lzma":
        if not isinstance(opts, dict) and opts is not None:
            _refuse(name)
        return [CodecSpec(f"{PREFIX}lzma", dict(opts or {}))]
    raise MetadataError(f"compression {str(name)[:60]!r} is not known")


def _refuse(name: str) -> NoReturn:
    raise MetadataError(f"compression_opts: not those of {name}")
