"""Open directories: listings that can go on, go back, and are read a little ahead."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple, cast

import trio

from zarrfs.fuse.inodes import InodeTable
from zarrfs.fuse.versions import Version
from zarrfs.store.api import Info, Store

_PIECE = 512  # entries taken at a time; one name in so many is kept for seekdir


class Listed(NamedTuple):
    """An entry, ready to be sent: its inode is counted as looked up, which the kernel will forget."""

    name: bytes
    info: Info
    inode: int


class DirectoryHandle:
    """An open directory: a piece of its listing, and names by which it can go back.

    Entries are counted from 0, "." and ".." not among them.
    """

    def __init__(self, store: Store, key: str, inodes: InodeTable, version: Version | None = None) -> None:
        """`version`: of which `store` is the store; it is in use until this is closed."""
        self.version, self.key = version, key
        self.old = False  # another version of the store is shown by now
        self._store, self._inodes = store, inodes
        self._before = [""]  # [i]: the name before entry number i * _PIECE
        self._piece: list[Listed] = []
        self._start = 0  # number of the first entry of the piece
        self._sent = 0  # number of the first entry that the kernel was not sent
        self._listing: AsyncGenerator[Info, None] | None = None
        self._prepared: list[Listed] | None = None  # what follows the piece
        self._failure: Exception | None = None  # what follows all that has been taken
        self._lock = trio.Lock()  # of the listing: a generator serves one at a time

    async def entries(self, position: int, more: bool = False) -> list[Listed]:
        """Some entries from number `position` on; [] at the end. Number 0 lists anew.

        What ended a listing early is raised whenever entries from there on are asked for, until it is listed
        anew. `more`: for a reply that holds some already, which an error would lose; [] instead of an error.
        sent() has to be told how many of them the kernel gets.
        """
        async with self._lock:
            if position == 0 or position != self._sent or position > self._start + len(self._piece):
                await self._seek(position)
            if position == self._start + len(self._piece):
                await self._read_on()
            if position >= self._start + len(self._piece) and self._failure is not None and not more:
                raise self._failure.with_traceback(None)
            return self._piece[position - self._start :]

    def sent(self, position: int) -> None:
        """The kernel has the entries before number `position`, and will forget their inodes one day."""
        self._sent = position

    @property
    def wants_more(self) -> bool:
        """Whether prepare() has something to do."""
        return self._prepared is None and self._listing is not None and len(self._piece) == _PIECE

    async def prepare(self) -> None:
        """Take the next entries while the kernel is busy with the last ones; a failure is for who asks for them."""
        async with self._lock:
            if self.wants_more:
                self._prepared = await self._take()

    async def close(self) -> None:
        """End the listing."""
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

    async def _seek(self, position: int) -> None:
        """Go to the piece of entry number `position`, from the nearest name that is known."""
        await self._end()
        if position == 0:
            del self._before[1:]
        mark = min(position // _PIECE, len(self._before) - 1)
        self._start = self._sent = mark * _PIECE
        self._listing = cast(AsyncGenerator[Info, None], self._store.list_dir(self.key, self._before[mark]))
        await self._read_on()
        while self._piece and position >= self._start + len(self._piece):
            await self._read_on()
        for entry in self._piece[: position - self._start]:
            self._inodes.forget(entry.inode, 1)
        self._sent = position

    async def _read_on(self) -> None:
        """Make the next _PIECE entries of the listing the piece; those of the last one that were not sent go."""
        for entry in self._piece[max(self._sent - self._start, 0) :]:
            self._inodes.forget(entry.inode, 1)
        self._start += len(self._piece)
        prepared, self._prepared = self._prepared, None
        self._piece = []
        self._piece = await self._take() if prepared is None else prepared
        if len(self._piece) == _PIECE and self._start + _PIECE == len(self._before) * _PIECE:
            self._before.append(self._piece[-1].info.name)

    async def _take(self) -> list[Listed]:
        """The next _PIECE entries of the listing, fewer at its end, or before what it raises: that is kept."""
        piece: list[Listed] = []
        if self._listing is None:
            return piece
        prefix, lookup, new = self.key + "/" if self.key else "", self._inodes.lookup, tuple.__new__
        try:
            async for info in self._listing:
                name = info.name
                if self.old:
                    inode = self._inodes.orphan(prefix + name, info.kind)
                else:
                    inode = lookup(prefix + name, info.kind, info.identity)
                piece.append(new(Listed, (name.encode("utf-8", "surrogateescape"), info, inode)))
                if len(piece) == _PIECE:
                    break
        except Exception as exc:
            self._failure = exc
        return piece
