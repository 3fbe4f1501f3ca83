"""StatAhead: sizes that a listing did not have, asked for ahead of a reader that goes from one name to the next."""

from __future__ import annotations

import contextlib
import time

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import at_once
from zarrfs.errors import ZarrfsError
from zarrfs.store.api import Kind, Store, join_key, split_key

_RECENT = 60.0  # seconds after which a listing says nothing of what is asked
_PLACES = 64  # directories that are remembered
_MOST = 128  # sizes that are asked for ahead


class _Place:
    """A directory that was listed without sizes."""

    def __init__(self) -> None:
        self.listed = time.monotonic()
        self.asked: set[str] = set()  # names whose sizes were asked for, and that nobody has wanted so far
        self.last = ""  # the last of them
        self.busy = False


class StatAhead:
    """See the module. Of one mount."""

    def __init__(self) -> None:
        self._places: LRU[str, _Place] = LRU(_PLACES)

    def listed(self, directory: str) -> None:
        """A listing has shown entries without a size."""
        place = self._places.put(directory, self._places.get(directory) or _Place())
        place.listed = time.monotonic()

    def walks(self, key: str) -> bool:
        """Return whether a listing of the directory, and no read, is likely to be why a size is asked for."""
        place = self._places.get(split_key(key)[0])
        return place is not None and time.monotonic() - place.listed < _RECENT

    def due(self, key: str) -> bool:
        """The size of `key` is asked for; whether advance() has something to do."""
        directory, name = split_key(key)
        place = self._places.get(directory)
        if place is None or not self.walks(key):
            return False
        if name in place.asked:
            place.asked.discard(name)
        elif name > place.last or not place.asked:
            place.asked, place.last = set(), name
        return not place.busy and len(place.asked) < _MOST // 2

    async def advance(self, store: Store, key: str) -> None:
        """Ask for the sizes of what comes after `key` in its directory."""
        directory = split_key(key)[0]
        place = self._places.get(directory)
        if place is None or place.busy:
            return
        place.busy = True
        names: list[str] = []

        async def ask(name: str) -> None:
            with contextlib.suppress(ZarrfsError):  # a reader that asks gets the error
                await store.info(join_key(directory, name))

        try:
            with contextlib.suppress(ZarrfsError):
                async for info in store.list_dir(directory, place.last):
                    if info.kind is Kind.FILE and info.size is None:
                        names.append(info.name)
                    if len(names) + len(place.asked) >= _MOST:
                        break
                if names:
                    place.asked.update(names)
                    place.last = names[-1]
                    await at_once(ask, names)
        finally:
            place.busy = False
