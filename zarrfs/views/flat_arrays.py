"""The readers of the arrays of a view, which share a cache of decoded chunks, and check chunks for changes.

DecodedView is the base class of the views that show decoded chunks.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.concurrency.lru import LRU
from zarrfs.config.options import Options
from zarrfs.store.api import Store, WrappingStore
from zarrfs.system.memory import heap
from zarrfs.views.decoded_cache import DecodedCache
from zarrfs.views.hierarchy import Node

if TYPE_CHECKING:
    from zarrfs.views.flat import FlatArray  # imports numpy, which would delay the start of a mount

_FRESH = 1.0  # seconds for which chunks of a mutable store are not checked again
_OPEN = 1024  # readers to keep


class FlatArrays:
    """The readers of the arrays of one store, with one bounded cache of decoded chunks."""

    def __init__(self, store: Store, budget: int, in_chunks: bool = False) -> None:
        """`budget`: bytes of decoded chunks to cache. `in_chunks`: the readers have the order of FlatArray's
        `in_chunks`."""
        self._store, self._in_chunks = store, in_chunks
        self.cache = DecodedCache(budget)
        self._arrays: LRU[str, FlatArray] = LRU(_OPEN, self._forget)
        self._seen: dict[str, tuple[float, int]] = {}  # last check and last change (ns) of chunks
        self._editions: dict[str, int] = {}
        heap()

    def reader(self, node: Node) -> FlatArray:
        """Return the reader of an array."""
        from zarrfs.views.flat import FlatArray

        found = self._arrays.use(node.path)
        if found is None or (found.chunks.node is not node and found.chunks.node != node):
            found = self._arrays.put(node.path, FlatArray(self._store, node, self.cache, self._in_chunks))
        return found

    async def look_at_chunks(self, node: Node) -> int:
        """Check whether chunks read so far have changed. If so, the array gets a new edition and a new mtime.

        Return the number of stored values to check; 0 if nothing was read or the last check is under a second old.
        """
        flat, now = self._arrays.get(node.path), trio.current_time()
        if flat is None or now - self.last_look(node) < _FRESH:
            return 0
        if await flat.chunks.unchanged():
            self._seen[node.path] = now, self.changed(node)
        else:
            self._seen[node.path] = now, time.time_ns()
            self._editions[node.path] = self.edition(node) + 1
            self._arrays.pop(node.path, None)
        return flat.chunks.noted

    def last_look(self, node: Node) -> float:
        """Return when the chunks of an array were last checked, in trio's time; 0 for never."""
        return self._seen.get(node.path, (0.0, 0))[0]

    def changed(self, node: Node) -> int:
        """Return when a change of chunks was last noticed, in ns since 1970; 0 for never."""
        return self._seen.get(node.path, (0.0, 0))[1]

    def edition(self, node: Node) -> int:
        """Return a number that increases when chunks have changed, even if the document has a later mtime.

        It also increases when a reader is evicted, because the chunks that it has read can no longer be checked.
        """
        return self._editions.get(node.path, 0)

    def _forget(self, flat: FlatArray) -> None:
        """Count a new edition for an evicted reader, because the versions of its chunks are lost."""
        if flat.chunks.noted:
            self._editions[flat.chunks.node.path] = self.edition(flat.chunks.node) + 1


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

    def adjust(self, options: Options) -> None:
        super().adjust(options)
        self._arrays.cache.resize(options.array_cache)

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "arrays": self._arrays.cache.stats()}
