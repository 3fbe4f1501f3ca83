"""Open directories of a read-only mount: listings that resume at any offset and are read a little ahead.

After a refresh, an open listing goes on in the new version, after the last name that was sent.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import AsyncGenerator
from typing import NamedTuple, cast

import trio

from zarrfs.fuse.inodes import InodeTable
from zarrfs.fuse.sizes import StatAhead
from zarrfs.fuse.versions import StoreVersion
from zarrfs.store.api import Info

_PIECE = 512  # entries fetched at a time; the last name of each piece is kept for seekdir


class Listed(NamedTuple):
    """An entry ready for the reply. One lookup of its inode is counted; the kernel sends a FORGET for it later."""

    name: bytes
    info: Info
    inode: int


class DirectoryHandle:
    """An open directory: the current piece of its listing, and the names at which the listing can resume.

    Positions count entries from 0, without "." and "..".
    """

    def __init__(self, version: StoreVersion, key: str, inodes: InodeTable, stat_ahead: StatAhead) -> None:
        """The caller releases `version` after close()."""
        self.version, self.key = version, key
        self._inodes, self._stat_ahead = inodes, stat_ahead
        self._marks = [(0, "")]  # positions at which the listing can resume, each with the name before it
        self._piece: list[Listed] = []
        self._start = 0  # position of the first entry of the piece
        self._sent = 0  # position of the first entry not yet sent to the kernel
        self._listing: AsyncGenerator[Info, None] | None = None
        self._prepared: list[Listed] | None = None  # the piece after this one
        self._failure: Exception | None = None  # raised by the listing after the entries fetched so far
        self._lock = trio.Lock()  # a generator can run only once at a time

    async def entries(self, version: StoreVersion, position: int, more: bool = False) -> list[Listed]:
        """Return some entries of `version` from `position` on; [] at the end. Position 0 restarts the listing.

        An error that ended the listing is raised for every position after the entries fetched before it, until the
        listing is restarted. With `more`, the reply already holds entries that an error would discard, so return []
        instead of raising it. The caller reports with sent() which entries the kernel has received.
        """
        async with self._lock:
            if version is not self.version:
                await self._switch(version)
                await self._seek(position)
            elif position == 0 or position != self._sent or position > self._start + len(self._piece):
                await self._seek(position)
            if position == self._start + len(self._piece):
                await self._read_on()
            if position >= self._start + len(self._piece) and self._failure is not None and not more:
                raise self._failure.with_traceback(None)
            return self._piece[position - self._start :]

    def sent(self, position: int) -> None:
        """Note that the kernel has received the entries before `position`. It sends FORGETs for their inodes."""
        self._sent = position

    @property
    def wants_more(self) -> bool:
        """Return whether prepare() would fetch anything."""
        return self._prepared is None and self._listing is not None and len(self._piece) == _PIECE

    async def prepare(self) -> None:
        """Fetch the next entries while the kernel processes the last ones. A failure is raised by entries()."""
        async with self._lock:
            if self.wants_more:
                self._prepared = await self._take()

    async def close(self) -> None:
        """End the listing and forget the inodes of entries that were not sent."""
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        unsent = self._piece[max(self._sent - self._start, 0) :]
        for entry in unsent + (self._prepared or []):
            self._inodes.forget(entry.inode, 1)
        self._piece, self._prepared, self._failure = [], None, None
        if self._listing is not None:
            await self._listing.aclose()
            self._listing = None

    async def _switch(self, version: StoreVersion) -> None:
        """Continue in another version, after the last name that was sent."""
        sent = self._sent - self._start
        if 0 < sent <= len(self._piece):
            self._mark(self._sent, self._piece[sent - 1].info.name)
        await self._end()
        self.version = version

    def _mark(self, position: int, name: str) -> None:
        del self._marks[bisect.bisect_left(self._marks, position, key=operator.itemgetter(0)) :]
        self._marks.append((position, name))

    async def _seek(self, position: int) -> None:
        """Load the piece that holds `position`, resuming the listing at the nearest known name before it."""
        await self._end()
        del self._marks[bisect.bisect_right(self._marks, position, key=operator.itemgetter(0)) :]
        self._start, after = self._marks[-1]
        self._sent = self._start
        self._listing = cast(AsyncGenerator[Info, None], self.version.store.list_dir(self.key, after))
        await self._read_on()
        while self._piece and position >= self._start + len(self._piece):
            await self._read_on()
        for entry in self._piece[: position - self._start]:
            self._inodes.forget(entry.inode, 1)
        self._sent = position

    async def _read_on(self) -> None:
        """Load the next piece; forget the inodes of unsent entries of the previous one."""
        for entry in self._piece[max(self._sent - self._start, 0) :]:
            self._inodes.forget(entry.inode, 1)
        self._start += len(self._piece)
        prepared, self._prepared = self._prepared, None
        self._piece = []
        self._piece = await self._take() if prepared is None else prepared
        if len(self._piece) == _PIECE:
            self._mark(self._start + _PIECE, self._piece[-1].info.name)

    async def _take(self) -> list[Listed]:
        """Fetch the next _PIECE entries; fewer at the end, or before a failure, which is stored in _failure."""
        piece: list[Listed] = []
        if self._listing is None:
            return piece
        prefix, lookup, new = self.key + "/" if self.key else "", self._inodes.lookup, tuple.__new__
        try:
            async for info in self._listing:
                inode = lookup(prefix + info.name, info.kind, info.identity)
                piece.append(new(Listed, (info.name.encode("utf-8", "surrogateescape"), info, inode)))
                if len(piece) == _PIECE:
                    break
        except Exception as exc:
            self._failure = exc
        self._stat_ahead.listed([prefix + entry.info.name for entry in piece if entry.info.size is None])
        return piece
