"""Blocks of targets, and requests for them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from zarrfs.net.responses import Entry, System
from zarrfs.system.buffers import Buffer

if TYPE_CHECKING:
    from zarrfs.cache.diskindex import IndexRow

_ON_DISK = 16 << 10  # bytes that a BlockOnDisk counts as in the cache in memory


class BlockRequest(NamedTuple):
    """A request for the block [start, stop) of `path`; `expected`: attributes that the value must have, if known."""

    system: System
    path: str
    start: int
    stop: int
    expected: Entry | None = None
    run: bool = False  # a stretch of many values, whatever they are
    alone: bool = False  # it says nothing of what is read next of the target

    @property
    def at(self) -> tuple[int, str]:
        """The target."""
        return id(self.system), self.path

    @property
    def target(self) -> str:
        """The identity of the target in the disk cache."""
        return self.system.identity(self.path)

    @property
    def key(self) -> Hashable:
        """Its key in the cache."""
        entry = self.expected
        version = entry and (entry.size, entry.tag or entry.mtime_ns)
        return id(self.system), self.path, version, self.start, self.stop


class BlockOnDisk:
    """A large block that was verified and stays on the disk: what is read of it is in the page cache.

    A copy of it in memory would be fresh memory, which costs more than to read the parts of the block as they are
    wanted. It counts as _ON_DISK bytes, so that the bound of the cache in memory also bounds how many it knows.
    """

    __slots__ = ("row",)

    def __init__(self, row: IndexRow) -> None:
        self.row = row

    def __len__(self) -> int:
        return _ON_DISK


Block: TypeAlias = Buffer | BlockOnDisk
