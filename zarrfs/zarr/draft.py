"""The experimental Zarr v3 of zarr-python 2.10 to 2.18: documents apart from the data, both below the root.

`zarr.json` (entry point), `meta/root/a/b.array.json`, `meta/root/a.group.json`, `data/root/a/b/c0/1`.
"""

from __future__ import annotations

from typing import NamedTuple

from zarrfs.transfer.api import Buffer
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

META_ROOT, DATA_ROOT = "meta/root", "data/root"


class EntryPoint(NamedTuple):
    """What the zarr.json at the root says."""

    suffix: str = ".json"  # of metadata documents


def entry_point(data: Buffer) -> EntryPoint | None:
    """The entry point of an experimental store; None for a zarr.json of Zarr v3. MetadataError."""
    raise NotImplementedError


def document_keys(path: str, entry: EntryPoint) -> tuple[str, str]:
    """The keys of the documents that would make the array, and the group, at `path` ("" is the root)."""
    raise NotImplementedError


def node_of_key(key: str, entry: EntryPoint) -> tuple[str, str] | None:
    """(path, "array" or "group") of the node that the document at `key` makes; None for other keys."""
    raise NotImplementedError


def data_directory(path: str) -> str:
    """The key of the directory that the chunk keys of the array at `path` are relative to."""
    raise NotImplementedError


def parse(kind: str, data: Buffer) -> ArrayMetadata | GroupMetadata:
    """The node that a document of `kind` ("array" or "group") makes. MetadataError."""
    raise NotImplementedError
