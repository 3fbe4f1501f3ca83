"""Documents of generations before v2 in the form of v2: v0 (`__zmeta__`, zarr 0.3 and 0.4) and v1 (`meta`, zarr 1).

Source: zarr-legacy-persistence (0.4.0); Zarr v1 specification; stores written by these releases.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from zarrfs.zarr import dtypes
from zarrfs.zarr.dtypes import Dtype, fields_of
from zarrfs.zarr.errors import MetadataError, Unsupported
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.layout import required


def members_v0(document: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the members of a `__zmeta__` as those of a `.zarray`. Raise MetadataError."""
    opts = {name: required(document, name) for name in ("cname", "clevel", "shuffle")}
    return _members(document, {**opts, "id": "blosc"})


def members_v1(document: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the members of a `meta` as those of a `.zarray`. Raise MetadataError.

    Memory order F applies to chunks that Blosc compressed; zarr 1.x passed bytes in order C to other compressors.
    """
    name, opts, order = document.get("compression"), document.get("compression_opts"), document.get("order", "C")
    if name in (None, "none"):
        return _members(document, None, "C" if order == "F" else order)
    if name not in ("blosc", "zlib", "bz2", "lzma"):
        raise Unsupported(f"compression {str(name)[:60]!r} is not known")
    if name in ("zlib", "bz2"):
        opts = {"level": 1 if opts is None else opts} if opts is None or type(opts) is int else None
    if name == "lzma" and opts is None:
        opts = {}
    if not isinstance(opts, dict) or "id" in opts:
        raise MetadataError(f"compression_opts: not those of {name}")
    return _members(document, {"id": name, **opts}, "C" if order == "F" and name != "blosc" else order)


def _members(document: Mapping[str, JSON], compressor: JSON, order: JSON = "C") -> dict[str, JSON]:
    dtype = dtypes.parse_v2(required(document, "dtype"))
    if dtype.kind == "O":
        raise Unsupported("dtype |O: chunks hold addresses, not objects")
    fill = fill_in_v2(required(document, "fill_value"), dtype.numpy)
    return {"dtype": document["dtype"], "fill_value": fill, "compressor": compressor, "order": order}


def fill_in_v2(value: JSON, dtype: Dtype) -> JSON:
    """Return a fill value as in v2, where bytes are base64; in v0 and v1, they are plain text, or bytes of a pickle.

    Raise MetadataError for values that numpy 1 converted, such as 0 to the text "0" in fields.
    """
    if dtype.kind == "S" and isinstance(value, str):
        value = value.encode() if value.isascii() else value
    if isinstance(value, bytes) and dtype.kind in "SV" and len(value) <= dtype.itemsize:
        return base64.b64encode(value).decode()
    texts = any(inner.kind in "SUV" for _name, inner in fields_of(dtype))
    if isinstance(value, bytes) or (isinstance(value, str) and dtype.kind == "S") or (value is not None and texts):
        raise MetadataError(f"fill_value: {value!r:.60} is not a value of dtype {'fields' if texts else dtype.str}")
    return value
