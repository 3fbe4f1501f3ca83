"""Consolidated metadata: the documents of a whole hierarchy in one.

Source: zarr-python 2.3 (`.zmetadata`); zarr-python 3 (`consolidated_metadata` of zarr.json).
"""

from __future__ import annotations

from zarrfs.transfer.api import Buffer
from zarrfs.zarr.model import JSON


def consolidated(name: str, data: Buffer) -> dict[str, dict[str, JSON]] | None:
    """The documents by node and name: {"a/b": {".zarray": {...}, ".zattrs": {...}}}; None where it has none.

    `name`: .zmetadata or zarr.json, paths are relative to where it lies. Those of v3 are called zarr.json.
    MetadataError where what is there breaks a rule.
    """
    raise NotImplementedError
