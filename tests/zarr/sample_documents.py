"""A typical metadata document of each generation, which tests modify."""

from __future__ import annotations

import json
from typing import Any

from zarrfs.zarr.documents import parse_node
from zarrfs.zarr.model import ArrayMetadata

V2 = {
    "zarr_format": 2, "shape": [4, 6], "chunks": [2, 5], "dtype": "<f4", "fill_value": 0, "order": "C",
    "filters": None,
    "compressor": None,
}  # fmt: skip
V1 = {
    "zarr_format": 1, "shape": [4, 6], "chunks": [2, 5], "dtype": "<f4", "fill_value": 0, "order": "C",
    "compression": None, "compression_opts": None,
}  # fmt: skip
V0 = {
    "shape": [4, 6], "chunks": [2, 5], "dtype": "<f4", "fill_value": 0, "cname": "lz4", "clevel": 5, "shuffle": 1,
}  # fmt: skip
V3 = {
    "zarr_format": 3, "node_type": "array", "shape": [4, 6], "data_type": "float32", "fill_value": 0.0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 5]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
}  # fmt: skip
DOCUMENTS: dict[str, dict[str, Any]] = {"__zmeta__": V0, "meta": V1, ".zarray": V2, "zarr.json": V3}


def array(name: str, /, **members: Any) -> ArrayMetadata:
    """Parse a typical document with `members` replaced or added; the value `...` removes a member."""
    document = {key: value for key, value in {**DOCUMENTS[name], **members}.items() if value is not ...}
    found = parse_node(name, json.dumps(document).encode())
    assert isinstance(found, ArrayMetadata)
    return found
