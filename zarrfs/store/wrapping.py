"""What a Store that is made of another one answers as that does."""

from __future__ import annotations

from typing import Any

from zarrfs.config.options import Options
from zarrfs.store.api import AdjustableStore, PrefetchStore, Store


class OnLower:
    """A part of an overlay, or of a view: what a mount asks of the store beneath."""

    lower: Store | None

    @property
    def remote(self) -> bool:
        """As PrefetchStore.remote."""
        return isinstance(self.lower, PrefetchStore) and self.lower.remote

    async def get_ready(self) -> None:
        """As PrefetchStore.get_ready."""
        if isinstance(self.lower, PrefetchStore):
            await self.lower.get_ready()

    def adjust(self, options: Options) -> None:
        """As AdjustableStore.adjust."""
        if isinstance(self.lower, AdjustableStore):
            self.lower.adjust(options)

    def stats(self) -> dict[str, Any]:
        """Counters of the lower store."""
        found: dict[str, Any] = getattr(self.lower, "stats", dict)()
        return found
