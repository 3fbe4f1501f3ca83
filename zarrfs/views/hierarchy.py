"""The arrays and groups in a Store, of every generation of Zarr: found where their documents are, and remembered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from zarrfs.store.api import Store
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata


class Node(NamedTuple):
    """A node of a hierarchy. Without metadata, `problem` says what is wrong with its documents."""

    path: str  # "/"-joined names, the root is ""
    metadata: ArrayMetadata | GroupMetadata | None
    problem: str | None = None
    documents: tuple[str, ...] = ()  # keys in the source of what makes it; none: a group that only nodes below imply
    chunks: str = ""  # the directory in the source that an array's keys.key() is below: mostly `path`
    mtime_ns: int | None = None  # of its documents, where the source has times
    mode: int | None = None  # of its first document, likewise


class Hierarchy:
    """The nodes of the hierarchy in `store`, whose root is the root of the store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def node(self, path: str) -> Node | None:
        """The array or group at `path`; None where there is none, and below an array."""
        raise NotImplementedError

    async def find(self, key: str) -> tuple[Node | None, str]:
        """(the deepest node that `key` is or lies below, the rest of the key below that)."""
        raise NotImplementedError

    def children(self, node: Node, after: str = "") -> AsyncIterator[str]:
        """The names of nodes, or of what may turn out to be one, right below a group; their documents are not read."""
        raise NotImplementedError

    def walk(self, prefix: str = "") -> AsyncIterator[Node]:
        """The node at `prefix` and all below it, groups before their children; lists no chunks."""
        raise NotImplementedError
