"""Consolidated metadata: the documents of a whole hierarchy in one.

Source: zarr-python 2.3 (`.zmetadata`); zarr-python 3 (`consolidated_metadata` of zarr.json).
"""

from __future__ import annotations

from zarrfs.system.buffers import Buffer
from zarrfs.zarr.documents import load_json
from zarrfs.zarr.errors import JSON, MetadataError

CONSOLIDATED = ("zarr.json", ".zmetadata")  # what may have consolidated metadata; who has the first one is of v3


def consolidated(name: str, data: Buffer) -> dict[str, dict[str, JSON]] | None:
    """The documents by node and name: {"a/b": {".zarray": {...}, ".zattrs": {...}}}; None where it has none.

    `name`: .zmetadata or zarr.json, paths are relative to where it lies. Those of v3 are called zarr.json; the one
    that lies there is among them, as "". MetadataError where what is there breaks a rule.
    """
    document = load_json(data)
    if not isinstance(document, dict):
        raise MetadataError("not a JSON object")
    if name == "zarr.json":
        return _of_v3(document)
    metadata = document.get("metadata")
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise MetadataError("metadata: not a JSON object")
    found: dict[str, dict[str, JSON]] = {}
    for key, value in metadata.items():
        path, _, file = key.rpartition("/")
        if file in (".zarray", ".zgroup", ".zattrs"):
            found.setdefault(_checked(path), {})[file] = value
    return found


def _of_v3(document: dict[str, JSON]) -> dict[str, dict[str, JSON]] | None:
    about = document.get("consolidated_metadata")
    if about is None:
        return None
    metadata = about.get("metadata") if isinstance(about, dict) else None
    if not isinstance(metadata, dict) or about.get("kind", "inline") != "inline":
        raise MetadataError("consolidated_metadata: not inline")
    own = {name: value for name, value in document.items() if name != "consolidated_metadata"}
    return {"": {"zarr.json": own}} | {_checked(path): {"zarr.json": value} for path, value in metadata.items()}


def _checked(path: str) -> str:
    """A path that could be a key; MetadataError for one that leads out of the hierarchy, or nowhere."""
    parts = path.split("/")
    if path and ("" in parts or "." in parts or ".." in parts or "\0" in path):
        raise MetadataError(f"metadata: {path[:60]!r} is not the path of a node")
    return path
