"""Consolidated metadata of a source, translated: readers of the view then ask for no other document."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import trio

from zarrfs.store.api import join_key, split_key
from zarrfs.views.hierarchy import Hierarchy
from zarrfs.zarr import v2, v3
from zarrfs.zarr.documents import ATTRIBUTE_DOCUMENTS, NODE_DOCUMENTS, parse_document
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

log = logging.getLogger("zarrfs")

Metadata = ArrayMetadata | GroupMetadata
_PIECE = 64  # nodes translated before others have a turn


async def consolidated_nodes(hierarchy: Hierarchy, key: str) -> dict[str, Metadata] | None:
    """The nodes that the consolidated metadata at `key` has, and the groups above them, by path and sorted.

    None where it has none, or a document in it is bad: readers then ask for each, and hear which.
    """
    found: dict[str, Metadata] = {}
    for number, (path, documents) in enumerate((await hierarchy.consolidated(key)).items()):
        name = next((name for name in NODE_DOCUMENTS if name in documents), None)
        if name is None:
            continue
        try:
            metadata = parse_document(name, documents[name], documents.get(ATTRIBUTE_DOCUMENTS.get(name, "")))
        except MetadataError as exc:
            log.warning("%s: not shown, as what it says of %s is bad: %s", key, path or "/", exc)
            return None
        if isinstance(metadata, ArrayMetadata) and metadata.keys_assumed:
            node = await hierarchy.node(path)  # which has looked at the names of chunks
            if node is not None and isinstance(node.metadata, ArrayMetadata):
                metadata = dataclasses.replace(metadata, keys=node.metadata.keys)
        found[path] = metadata
        if number % _PIECE == 0:
            await trio.lowlevel.checkpoint()
    for path in [*found]:
        while path:
            path = split_key(path)[0]
            found.setdefault(path, GroupMetadata("v3", {}, implied=True))
    return {path: found[path] for path in sorted(found)} if len(found) > 1 or found.keys() - {""} else None


def inline_metadata(nodes: dict[str, Metadata], leave_out: Callable[[str, MetadataError], None]) -> JSON:
    """The consolidated_metadata of a zarr.json at the root; `leave_out` hears of what v3 cannot have."""
    documents: dict[str, JSON] = {}
    for path, metadata in nodes.items():
        try:
            if isinstance(metadata, ArrayMetadata):
                documents[path] = v3.array_json(metadata)
            elif path:
                documents[path] = v3.group_json(metadata)
        except MetadataError as exc:
            leave_out(path, exc)
    return {"kind": "inline", "must_understand": False, "metadata": documents}


def zmetadata(nodes: dict[str, Metadata], leave_out: Callable[[str, MetadataError], None]) -> JSON:
    """The .zmetadata of a v2 hierarchy; `leave_out` as above."""
    documents: dict[str, JSON] = {}
    for path, metadata in nodes.items():
        try:
            if isinstance(metadata, ArrayMetadata):
                documents[join_key(path, ".zarray")] = v2.array_json(metadata)
            else:
                documents[join_key(path, ".zgroup")] = v2.GROUP_DOCUMENT
            if attributes := v2.attributes_json(metadata):
                documents[join_key(path, ".zattrs")] = attributes
        except MetadataError as exc:
            leave_out(path, exc)
    return {"zarr_consolidated_format": 1, "metadata": documents}
