"""Metadata documents of every generation: which names they have, and what they say.

Source: Zarr v3 core; Zarr v2 specification; zarr-legacy-persistence (0.4.0); stores written by zarr 0.3 to 3.1.
"""

from __future__ import annotations

from zarrfs.transfer.api import Buffer
from zarrfs.zarr.model import JSON, ArrayMetadata, GroupMetadata

NODE_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", "__zmeta__", "meta")  # of which one makes a node
ATTRIBUTE_DOCUMENTS = {".zarray": ".zattrs", ".zgroup": ".zattrs", "__zmeta__": "__zattr__", "meta": "attrs"}
Metadata = ArrayMetadata | GroupMetadata


def is_litter(name: str) -> bool:
    """Whether a file of that name was left behind by a writer: `__zattr__.lock`, `0.0.<uuid>.partial`."""
    raise NotImplementedError


def parse_node(name: str, data: Buffer, attributes: Buffer | None = None) -> Metadata:
    """The node that the document called `name` (one of NODE_DOCUMENTS) makes. MetadataError names the rule.

    `attributes`: of the document that ATTRIBUTE_DOCUMENTS names, where there is one.
    """
    raise NotImplementedError


def parse_document(name: str, document: JSON, attributes: JSON = None) -> Metadata:
    """As parse_node(), of documents that are parsed (by consolidated())."""
    raise NotImplementedError


def load_json(data: Buffer) -> JSON:
    """JSON that may have NaN, Infinity and -Infinity, as old writers left it. MetadataError."""
    raise NotImplementedError


def dump_json(value: JSON) -> bytes:
    """Strict JSON, indented as zarr-python does. ValueError for a NaN."""
    raise NotImplementedError
