"""Documents of the first two generations: v0 (`__zmeta__`, zarr 0.3 and 0.4) and v1 (`meta`, zarr 1.0 and 1.1).

Source: zarr-legacy-persistence (0.4.0); Zarr v1 specification; stores written by these releases.
"""

from __future__ import annotations

import base64
import dataclasses

from zarrfs.system.buffers import Buffer
from zarrfs.zarr import dtypes, v2
from zarrfs.zarr.common import check_format, required
from zarrfs.zarr.dtypes import DataType
from zarrfs.zarr.errors import MetadataError, Unsupported
from zarrfs.zarr.jsontext import JSON, load_json
from zarrfs.zarr.keys import V0
from zarrfs.zarr.model import ArrayMetadata

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
    opts = {name: required(document, name) for name in ("cname", "clevel", "shuffle")}
    return dataclasses.replace(_parse(document, attributes, {**opts, "id": "blosc"}), generation="v0", keys=V0)


def parse_v1(document: dict[str, JSON], attributes: dict[str, JSON]) -> ArrayMetadata:
    """Parse the members of a `meta`. Raise MetadataError.

    Memory order F applies to chunks that Blosc compressed; zarr 1.x passed bytes in order C to other compressors.
    """
    check_format(document, 1)
    name, opts, order = document.get("compression"), document.get("compression_opts"), document.get("order", "C")
    if name not in (None, "none", "blosc", "zlib", "bz2", "lzma"):
        raise Unsupported(f"compression {str(name)[:60]!r} is not known")
    if name in ("zlib", "bz2"):
        opts = {"level": 1 if opts is None else opts} if opts is None or type(opts) is int else None
    if name == "lzma" and opts is None:
        opts = {}
    compressor = {"id": name, **opts} if isinstance(opts, dict) and "id" not in opts else None
    if name in (None, "none"):
        compressor = None
    elif compressor is None:
        raise MetadataError(f"compression_opts: not those of {name}")
    found = _parse(document, attributes, compressor, "C" if order == "F" and name != "blosc" else order)
    return dataclasses.replace(found, generation="v1")


def _parse(
    document: dict[str, JSON], attributes: dict[str, JSON], compressor: JSON, order: JSON = "C"
) -> ArrayMetadata:
    """Parse the members that v0 and v1 share, as those of v2."""
    dtype = dtypes.parse_v2(required(document, "dtype"))
    if dtype.kind == "O":
        raise Unsupported("dtype |O: chunks hold addresses, not objects")
    if required(document, "shape") == []:
        raise MetadataError("shape: no dimensions, which Zarr before v2 did not have")
    same = {name: required(document, name) for name in ("shape", "chunks", "dtype")}
    fill = fill_in_v2(required(document, "fill_value"), dtype)
    about = {"zarr_format": 2, **same, "fill_value": fill, "compressor": compressor, "order": order}
    return dataclasses.replace(v2.parse_array(about, attributes), keys_assumed=False)


def fill_in_v2(value: JSON, dtype: DataType) -> JSON:
    """Return a fill value as in v2, where bytes are base64; in v0 and v1, they are plain text, or bytes of a pickle.

    Raise MetadataError for values that numpy 1 converted, such as 0 to the text "0" in fields.
    """
    if dtype.kind == "S" and isinstance(value, str):
        value = value.encode() if value.isascii() else value
    if isinstance(value, bytes) and dtype.kind in "SV" and len(value) <= dtype.itemsize:
        return base64.b64encode(value).decode()
    texts = any(inner.kind in "SUV" for _name, inner, _shape in dtype.fields or ())
    if isinstance(value, bytes) or (isinstance(value, str) and dtype.kind == "S") or (value is not None and texts):
        raise MetadataError(f"fill_value: {value!r:.60} is not a value of dtype {dtype.text}")
    return value
