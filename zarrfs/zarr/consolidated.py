"""Consolidated metadata: one document that holds all metadata documents of a hierarchy.

Source: zarr-python 2.3 (`.zmetadata`); zarr-python 3 (`consolidated_metadata` of zarr.json).
"""

from __future__ import annotations

from zarrfs.system.buffers import Buffer
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON, load_json

CONSOLIDATED = ("zarr.json", ".zmetadata")  # documents that may hold it; zarr.json takes precedence


def consolidated(name: str, data: Buffer) -> dict[str, dict[str, JSON]] | None:
    """Parse consolidated metadata into documents by node and name: {"a/b": {".zarray": {...}, ".zattrs": {...}}}.

    `name` is ".zmetadata" or "zarr.json"; paths of nodes are relative to its directory. With "zarr.json", all returned
    documents have this name, and the document of the directory itself is at "". Return None if the document has no
    consolidated metadata. Raise MetadataError if the document or its consolidated metadata is invalid.
    """
    document = load_json(data)
    if not isinstance(document, dict):
        raise MetadataError("not a JSON object")
    if name == "zarr.json":
        return _inline(document)
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


def _inline(document: dict[str, JSON]) -> dict[str, dict[str, JSON]] | None:
    member = document.get("consolidated_metadata")
    if member is None:
        return None
    metadata = member.get("metadata") if isinstance(member, dict) else None
    if not isinstance(metadata, dict) or member.get("kind", "inline") != "inline":
        raise MetadataError("consolidated_metadata: not inline")
    own = {name: value for name, value in document.items() if name != "consolidated_metadata"}
    return {"": {"zarr.json": own}} | {_checked(path): {"zarr.json": value} for path, value in metadata.items()}


def _checked(path: str) -> str:
    """Return `path` if it can be a key. Raise MetadataError if not, such as for a path that leaves the hierarchy."""
    parts = path.split("/")
    if path and ("" in parts or "." in parts or ".." in parts or "\0" in path):
        raise MetadataError(f"metadata: {path[:60]!r} is not the path of a node")
    return path
