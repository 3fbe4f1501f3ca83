"""Parsing of metadata documents of every generation into arrays and groups.

Source: Zarr v3 core; Zarr v2 specification; zarr-legacy-persistence (0.4.0); stores written by zarr 0.3 to 3.1.
"""

from __future__ import annotations

from zarrfs.system.buffers import Buffer
from zarrfs.zarr import ATTRIBUTE_DOCUMENTS, legacy, v2, v3
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON, load_json
from zarrfs.zarr.layout import layout_of, load_document
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

Metadata = ArrayMetadata | GroupMetadata


def parse_node(name: str, data: Buffer, attributes: Buffer | None = None) -> Metadata:
    """Parse the document called `name`, one of NODE_DOCUMENTS, to the array or group that it describes.

    `attributes` is the content of the document that ATTRIBUTE_DOCUMENTS names, if that exists. Raise MetadataError,
    which states the rule that a document breaks, and OtherFile if a `meta` belongs to another program.
    """
    document = load_document(name, data)
    try:
        beside = None if attributes is None else load_json(attributes)
    except MetadataError as exc:
        raise MetadataError(f"{ATTRIBUTE_DOCUMENTS[name]}: {exc}") from None
    return parse_document(name, document, beside)


def parse_document(name: str, document: JSON, attributes: JSON = None) -> Metadata:
    """Parse documents as parse_node() does, but from parsed JSON, such as that returned by consolidated()."""
    if not isinstance(document, dict):
        raise MetadataError("not a JSON object")
    try:
        if name == "zarr.json":
            return v3.parse_node(document)
        if not isinstance(attributes, dict | None):
            raise MetadataError(f"{ATTRIBUTE_DOCUMENTS[name]} is not a JSON object")
        layout = layout_of(name, document)
        if layout is None:
            return GroupMetadata("v2", attributes or {})
        if name == ".zarray":
            return v2.parse_array(document, attributes or {}, layout)
        if name == "meta":
            return v2.parse_array(legacy.members_v1(document), attributes or {}, layout, "v1")
        return v2.parse_array(legacy.members_v0(document), attributes or {}, layout, "v0")
    except RecursionError:
        raise MetadataError("JSON too deep") from None
