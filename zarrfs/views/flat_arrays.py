"""The readers of the arrays of a view, which share a cache of decoded chunks.

DecodedView is the base class of the views that show decoded chunks.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.store.api import Store, WrappingStore
from zarrfs.system.memory import heap
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Node

if TYPE_CHECKING:
    from zarrfs.views.flat import FlatArray  # imports numpy, which would delay the start of a mount

_OPEN = 1024  # readers to keep


class FlatArrays:
    """The readers of the arrays of one store, with one bounded cache of decoded chunks."""

    def __init__(self, store: Store, budget: int, in_chunks: bool = False) -> None:
        """`budget`: bytes of decoded chunks to cache. `in_chunks`: the readers have the order of FlatArray's
        `in_chunks`."""
        self._store, self._in_chunks = store, in_chunks
        self.cache = DecodedCache(budget)
        self._arrays: LRU[str, FlatArray] = LRU(_OPEN)
        heap()

    def reader(self, node: Node) -> FlatArray:
        """Return the reader of an array."""
        from zarrfs.views.flat import FlatArray

        found = self._arrays.use(node.path)
        if found is None or (found.chunks.node is not node and found.chunks.node != node):
            found = self._arrays.put(node.path, FlatArray(self._store, node, self.cache, self._in_chunks))
        return found


class DecodedView(WrappingStore):
    """A view whose files consist of the decoded chunks of `arrays`."""

    def __init__(self, store: Store, arrays: FlatArrays) -> None:
        super().__init__(store)
        self._arrays = arrays

    @property
    def remote(self) -> bool:
        return False  # the view prefetches chunks along the array, so that read-ahead by file names gains nothing

    async def get_ready(self) -> None:
        await trio.to_thread.run_sync(importlib.import_module, "zarrfs.views.flat")
        await super().get_ready()

    async def prefetch(self, keys: Sequence[str]) -> None:
        """Do nothing: FlatArray fetches chunks ahead of sequential readers."""

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "arrays": self._arrays.cache.stats()}
