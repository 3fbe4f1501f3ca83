"""Parsing of metadata documents of every generation into arrays and groups.

Source: Zarr v3 core; Zarr v2 specification; zarr-legacy-persistence (0.4.0); stores written by zarr 0.3 to 3.1.
"""

from __future__ import annotations

from collections.abc import Callable

from zarrfs.system.buffers import Buffer
from zarrfs.zarr import ATTRIBUTE_DOCUMENTS, legacy, pickles, v2, v3
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import JSON, load_json
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

DOCUMENT_MAX = 256 << 20  # bytes; longer documents are not read
Metadata = ArrayMetadata | GroupMetadata

_PARSERS: dict[str, Callable[[dict[str, JSON], dict[str, JSON]], Metadata]] = {
    ".zarray": v2.parse_array,
    ".zgroup": v2.parse_group,
    "__zmeta__": legacy.parse_v0,
    "meta": legacy.parse_v1,
}


def is_litter(name: str) -> bool:
    """Return True for names of files that writers leave behind: `__zattr__.lock`, `0.0.<uuid>.partial`."""
    return name.endswith((".lock", ".partial"))


def parse_node(name: str, data: Buffer, attributes: Buffer | None = None) -> Metadata:
    """Parse the document called `name`, one of NODE_DOCUMENTS, to the array or group that it describes.

    `attributes` is the content of the document that ATTRIBUTE_DOCUMENTS names, if that exists. Raise MetadataError,
    which states the rule that a document breaks, and legacy.OtherFile if a `meta` belongs to another program.
    """
    if name == "__zmeta__" and bytes(data[:1]) != b"{":
        document = pickles.load(bytes(data))
    elif name == "meta":
        document = legacy.load_meta(data)
    else:
        document = load_json(data)
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
        if attributes is None:
            attributes = {}
        elif not isinstance(attributes, dict):
            raise MetadataError(f"{ATTRIBUTE_DOCUMENTS[name]} is not a JSON object")
        return _PARSERS[name](document, attributes)
    except RecursionError:
        raise MetadataError("JSON too deep") from None
