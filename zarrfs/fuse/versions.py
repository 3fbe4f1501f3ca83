"""Version: a store that is shown, or was shown before a refresh, as long as somebody uses it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from zarrfs.config.options import Options
from zarrfs.errors import ZarrfsError
from zarrfs.fuse.pagecache import Pusher
from zarrfs.prefetch.readahead import KeyReadAhead
from zarrfs.store.api import Store
from zarrfs.system.memory import memory_limit

log = logging.getLogger("zarrfs")

_ROOM = 16  # of memory_limit and array_cache: the part that an older version has,
_ROOM_LEAST = 8 << 20  # or so many bytes: two parts of a large value


class Version:
    """One version of a source.

    `users` are the requests that go on and the handles that are open: when a version is `retired`, and the last of
    them is gone, it is closed. Until then it keeps no blocks in memory, unless it is `roomy`, and then a few.
    """

    def __init__(self, store: Store, options: Options, values: Store | None = None) -> None:
        """`values`: where an open file is read, if not in `store`."""
        self.store = store
        self._options = options
        self.values = values or store
        self.ahead = KeyReadAhead(self.values, options.prefetch)
        self.pusher: Pusher | None = None  # set where pages are to be pushed ahead
        self.users = 0
        self.retired = False
        self.roomy = False
        self.changed = False  # a target is not the one that was read first
        self.closed = False

    async def get_ready(self) -> None:
        """Start what the first read over a network takes, if there are such."""
        try:
            await self.values.get_ready()
        except (ZarrfsError, OSError) as exc:  # the first reader gets the error
            log.debug("get_ready: %s", exc)

    def adjust(self, options: Options) -> None:
        """Take over what may change of the options."""
        self._options = options = dataclasses.replace(options, asked_since=self._options.asked_since)
        if self.retired:
            whole = memory_limit(options)
            most = max(whole // _ROOM, min(whole, _ROOM_LEAST)) if self.roomy else 0
            arrays = options.array_cache // _ROOM if self.roomy else 0
            options = dataclasses.replace(options, memory_limit=most, array_cache=arrays)
        self.ahead.resize(0 if self.retired else options.prefetch)
        self.store.adjust(options)

    def retire(self) -> None:
        """It is shown no more: what it has in memory, and nobody waits for, is given back."""
        self.retired = True
        self.adjust(self._options)

    def give_room(self, roomy: bool) -> None:
        """Of a retired version: whether it may keep some blocks."""
        self.roomy = roomy
        self.adjust(self._options)

    def stats(self) -> dict[str, Any]:
        """The counters of the store and its read-ahead."""
        return {"read_ahead": self.ahead.stats(), **self.store.stats()}

    async def aclose(self) -> None:
        """Close the store; the first call does it."""
        if not self.closed:
            self.closed = True
            try:
                await self.ahead.aclose()
            finally:
                await self.store.aclose()
