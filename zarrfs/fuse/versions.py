"""Versions of a source: the store that a mount serves now, and those from before a refresh that are still in use."""

from __future__ import annotations

import logging

from zarrfs.config.options import Options
from zarrfs.prefetch.readahead import KeyReadAhead
from zarrfs.store.api import Store

log = logging.getLogger(__name__)


class StoreVersion:
    """One version of a source.

    `users` counts requests in flight, open handles and work in the background. A `retired` version is closed when the
    count reaches zero.
    """

    def __init__(self, store: Store, options: Options, values: Store | None = None) -> None:
        """`values` is the store that open files are read from; default: `store`."""
        self.store = store
        self.values = values or store
        self.sizes_known = self.values.sizes_known
        self.ahead = KeyReadAhead(self.values, options.prefetch)
        self.users = 0
        self.retired = False
        self.changed = False  # a read found that a target has changed
        self.closed = False

    async def aclose(self) -> None:
        """Close the store; a second call does nothing."""
        if not self.closed:
            self.closed = True
            await self.store.aclose()
