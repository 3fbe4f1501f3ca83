"""Statahead: fetch sizes that a listing did not include, ahead of a client that stats one name after the other."""

from __future__ import annotations

import contextlib
import time
from collections import deque

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import ZarrfsError
from zarrfs.store.api import Kind, Store, join_key, split_key

_RECENT = 60.0  # seconds after a listing in which stats in its directory are attributed to it
_DIRECTORIES = 64  # directories to remember
_MOST = 128  # sizes to request ahead
_NAMES = 8192  # names to take from one listing, because many stores read a whole directory for any part of it


class _UnsizedDirectory:
    """A directory that was listed without sizes."""

    def __init__(self) -> None:
        self.listed = time.monotonic()
        self.asked: set[str] = set()  # names whose sizes were requested, and that no client has statted yet
        self.last = ""  # the last name that was requested, or that a client has statted beyond it
        self.names: deque[str] = deque()  # names without a size, to be requested next
        self.ended = False  # the directory has no names after those
        self.busy = False
        self.store: Store | None = None  # the store that listed the names

    def skip(self) -> None:
        """Drop the next names up to `last`."""
        while self.names and self.names[0] <= self.last:
            self.names.popleft()


class StatAhead:
    """The statahead of one mount."""

    def __init__(self) -> None:
        self._directories: LRU[str, _UnsizedDirectory] = LRU(_DIRECTORIES)

    def listed(self, directory: str) -> None:
        """Note that a listing returned entries without a size."""
        state = self._directories.get(directory)
        if state is None or time.monotonic() - state.listed >= _RECENT:  # names of an old listing may be gone
            state = _UnsizedDirectory()
        self._directories.put(directory, state)
        state.listed, state.ended = time.monotonic(), False

    def walks(self, key: str) -> bool:
        """Return whether a client that stats `key` has probably listed its directory, and will not read the value."""
        state = self._directories.get(split_key(key)[0])
        return state is not None and time.monotonic() - state.listed < _RECENT

    def due(self, key: str) -> bool:
        """Note that a client stats `key`; return whether advance() should run."""
        directory, name = split_key(key)
        state = self._directories.get(directory)
        if state is None or not self.walks(key):
            return False
        if name in state.asked:
            state.asked.discard(name)
        elif name > state.last or not state.asked:
            if name <= state.last:  # the client has started again from the beginning
                state.names, state.ended = deque(), False
            state.asked, state.last = set(), name
            state.skip()
        more = bool(state.names) or not state.ended
        return more and not state.busy and len(state.asked) < _MOST // 2

    async def advance(self, store: Store, key: str) -> None:
        """Request the sizes of the names after `key` in its directory."""
        directory = split_key(key)[0]
        state = self._directories.get(directory)
        if state is None or state.busy:
            return
        state.busy = True
        names: list[str] = []

        async def ask(name: str) -> None:
            with contextlib.suppress(ZarrfsError):  # a client that stats the name will get the error
                await store.info(join_key(directory, name))

        try:
            with contextlib.suppress(ZarrfsError):
                if state.store is not store:  # a refresh has replaced it
                    state.names, state.ended, state.store = deque(), False, store
                if not state.names and not state.ended:
                    await _list(state, store, directory)
                while state.names and len(names) + len(state.asked) < _MOST:
                    names.append(state.names.popleft())
                if names:
                    state.asked.update(names)
                    state.last = names[-1]
                    await for_each(ask, names)
        finally:
            state.busy = False


async def _list(state: _UnsizedDirectory, store: Store, directory: str) -> None:
    """List the next names of a directory."""
    start, names, ended = state.last, deque[str](), True
    async for info in store.list_dir(directory, start):
        if info.kind is Kind.FILE and info.size is None:
            names.append(info.name)
        if len(names) >= _NAMES:
            ended = False
            break
    if state.last >= start:  # otherwise the client has started again meanwhile
        state.names, state.ended = names, ended
        if state.last > start:
            state.skip()
