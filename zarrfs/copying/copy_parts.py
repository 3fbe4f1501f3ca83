"""What materialise() takes besides: room for bytes, pieces of files, names that are none, how failures are told."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import trio

from zarrfs.copying.staging_directory import Folder
from zarrfs.errors import SourceError, StoreError, ZarrfsError
from zarrfs.store.api import Info, Store, name_rule
from zarrfs.store.staging import RESERVED
from zarrfs.store.walk import extents

_PIECE = 4 << 20  # bytes of a large file that are asked for at once


class Room:
    """Bytes that may be in memory at the same time."""

    def __init__(self, size: int) -> None:
        self._free = self._size = size
        self._waiting = trio.lowlevel.ParkingLot()

    async def take(self, count: int) -> int:
        """Wait for room for `count` bytes, or for all there is; returns what to give back."""
        count = min(count, self._size)
        while self._free < count:
            await self._waiting.park()
        self._free -= count
        return count

    def give(self, count: int) -> None:
        """Room that is free again."""
        self._free += count
        self._waiting.unpark_all()


async def stretches(store: Store, key: str, info: Info) -> AsyncIterator[tuple[int, int]]:
    """(start, length) of pieces of what is not a hole in a file; small neighbours come together."""
    begin = stop = 0
    async for start, length in extents(store, key, info):
        if start == stop and stop - begin + length <= _PIECE:
            stop += length
            continue
        for at in range(begin, stop, _PIECE):
            yield at, min(_PIECE, stop - at)
        begin, stop = start, start + length
    for at in range(begin, stop, _PIECE):
        yield at, min(_PIECE, stop - at)


def broken_rule(name: str, folder: Folder) -> str | None:
    """The rule that a name breaks, whatever store it is from."""
    rule = name_rule(name) or ("a name with a slash" if "/" in name else None)
    if rule is None and folder.parent is None and name.startswith(RESERVED):
        rule = f"a name that begins with {RESERVED}, which is reserved"
    if rule is None:
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            rule = "a lone surrogate"
    return rule


def want(folder: Folder) -> None:
    """Note that a directory is to be made, with those that it lies in: it, or something in it, was asked for."""
    at: Folder | None = folder
    while at is not None and not at.wanted:
        at.wanted = True
        at = at.parent


def held(info: Info) -> int:
    """Bytes of a file that are not holes, as far as that is known."""
    size = info.size or 0
    return size if info.allocated is None else min(size, info.allocated)


def told(destination: str, key: str, exc: Exception) -> ZarrfsError:
    """What ends a run, as one line that names the entry."""
    if isinstance(exc, StoreError):
        rule = exc.reason or type(exc).__doc__ or str(exc)
    elif isinstance(exc, ZarrfsError):
        rule = str(exc)
    elif isinstance(exc, OSError):
        rule = f"cannot be written: {(exc.strerror or str(exc)).lower()}"
    else:
        rule = f"{type(exc).__name__}: {exc}"
    return SourceError(destination, rule, key or "/")
