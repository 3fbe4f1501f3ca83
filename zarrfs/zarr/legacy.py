"""The first two generations: v0 (`__zmeta__`, zarr 0.3 and 0.4) and v1 (`meta`, zarr 1.0 and 1.1).

Source: zarr-legacy-persistence (0.4.0); Zarr v1 specification; stores written by these releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from zarrfs.system.buffers import Buffer
from zarrfs.zarr import dtypes, fillvalues, members
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import JSON, MetadataError
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.keys import FLAT, V0
from zarrfs.zarr.members import required
from zarrfs.zarr.model import ArrayMetadata, CodecSpec
from zarrfs.zarr.v2 import check_format, is_order_f

_META_MAX = 1 << 20  # bytes: no document of Zarr v1 is nearly as long


class OtherFile(MetadataError):
    """A file that is called like a document, but is another program's: no node, and nothing is wrong."""


def load_meta(data: Buffer, load: Callable[[Buffer], JSON]) -> dict[str, JSON]:
    """The JSON of a `meta`; OtherFile where it does not say that it is of Zarr v1: many programs write such files."""
    if len(data) <= _META_MAX and b'"zarr_format"' in bytes(data):
        document = load(data)
        if isinstance(document, dict) and "zarr_format" in document:
            return document
    raise OtherFile("not a document of Zarr v1")


def array_v0(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    """The array of a `__zmeta__`. MetadataError."""
    dtype, grid = _described(document)
    opts = {name: required(document, name) for name in ("cname", "clevel", "shuffle")}
    fill, _ = fillvalues.from_v0_v1(required(document, "fill_value"), dtype)
    codecs = members.to_bytes(dtype), members.blosc(opts, dtype.itemsize, "cname")
    return ArrayMetadata("v0", grid.shape, grid, dtype, fill, codecs, V0, attributes)


def array_v1(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    """The array of a `meta`. MetadataError.

    Order F counts only with blosc: the other compressors got bytes in order C.
    """
    check_format(document, 1)
    dtype, grid = _described(document)
    compression = _compression(document.get("compression"), document.get("compression_opts"), dtype)
    fill, _ = fillvalues.from_v0_v1(required(document, "fill_value"), dtype)
    codecs = [members.to_bytes(dtype), *compression]
    if is_order_f(document.get("order", "C"), "order") and compression and compression[0].name == "blosc":
        codecs[:0] = [members.transposed(len(grid.shape))] if len(grid.shape) > 1 else []
    return ArrayMetadata("v1", grid.shape, grid, dtype, fill, tuple(codecs), FLAT, attributes)


def _described(document: dict[str, JSON]) -> tuple[DataType, Grid]:
    dtype = dtypes.parse_v2(required(document, "dtype"))
    if dtype.kind == "O":
        raise MetadataError("dtype |O: chunks hold addresses, not objects")
    grid = members.regular_grid(required(document, "shape"), required(document, "chunks"), dtype, empty=False)
    if not grid.shape:
        raise MetadataError("shape: no dimensions, which Zarr before v2 did not have")
    return dtype, grid


def _compression(name: JSON, opts: JSON, dtype: DataType) -> list[CodecSpec]:
    if name in (None, "none"):
        return []
    if name == "blosc":
        if not isinstance(opts, dict):
            _refuse("blosc")
        return [members.blosc(opts, dtype.itemsize, "compression_opts")]
    if name in ("zlib", "bz2"):
        if type(opts) is not int and opts is not None:
            _refuse(name)
        return [CodecSpec(f"numcodecs.{name}", {"level": 1 if opts is None else opts})]
    if name == "lzma":
        if not isinstance(opts, dict) and opts is not None:
            _refuse(name)
        return [CodecSpec("numcodecs.lzma", dict(opts or {}))]
    raise MetadataError(f"compression {str(name)[:60]!r} is not known")


def _refuse(name: str) -> NoReturn:
    raise MetadataError(f"compression_opts: not those of {name}")
