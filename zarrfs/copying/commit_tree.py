"""The merged tree of an overlay, as commit reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from zarrfs.archives.tree import Entry, Tree, entry_of
from zarrfs.errors import SourceError
from zarrfs.store.api import Info, Kind, join_key
from zarrfs.store.overlay import Overlay, OverlayEntry

_BATCH = 1000  # maximum number of entries held while values are prefetched
_AHEAD = 64  # values prefetched at the same time


class MergedTree(Tree):
    """The merged tree of `overlay`, over `source`."""

    def __init__(self, overlay: Overlay, source: str, warn: Callable[[str], None], skip: bool = False) -> None:
        super().__init__(overlay, source, warn, skip)
        self.overlay = overlay

    def nodes(self, rule: Callable[[Entry], str | None]) -> AsyncIterator[Entry]:
        """Yield every entry except the root, as below()."""
        return self.below(entry_of("", Info("", Kind.DIRECTORY)), rule)

    async def with_values_ahead(self, nodes: AsyncIterator[Entry]) -> AsyncIterator[Entry]:
        """Yield `nodes` in order, after prefetching the values of lower files, a batch at a time."""
        batch: list[Entry] = []
        files = 0
        async for node in nodes:
            batch.append(node)
            files += node.kind is Kind.FILE and not node.changed
            if files == _AHEAD or len(batch) == _BATCH:
                async for ready in self._fetched(batch):
                    yield ready
                batch, files = [], 0
        async for ready in self._fetched(batch):
            yield ready

    async def _fetched(self, batch: list[Entry]) -> AsyncIterator[Entry]:
        await self.overlay.prefetch([node.key for node in batch if node.kind is Kind.FILE])
        for node in batch:
            yield node

    async def is_empty(self, node: Entry) -> bool:
        """Return whether a directory is empty."""
        return not await self.overlay.entries(node.key)

    async def children(self, key: str) -> Iterator[Entry]:
        return (self._entry(join_key(key, name), one) for name, one in (await self.overlay.entries(key)).items())

    def _entry(self, key: str, found: OverlayEntry) -> Entry:
        if found.status is not None:
            return entry_of(key, self.overlay.info_of(key, found.status), changed=True)
        assert found.info is not None
        return entry_of(key, found.info)

    def error(self, entry: Entry, rule: str) -> SourceError:
        place = self.overlay.upper.path if entry.changed else self.source
        return SourceError(place, rule, entry.key or "/")
