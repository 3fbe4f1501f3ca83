"""Blocks of targets, and requests for them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

from zarrfs.net.responses import Entry, System
from zarrfs.system.buffers import Buffer

_ON_DISK = 16 << 10  # bytes as which the cache in memory counts a BlockOnDisk


class BlockRequest(NamedTuple):
    """A request for the block [start, stop) of `path`; `expected`: attributes that the value must have, if known."""

    system: System
    path: str
    start: int
    stop: int
    expected: Entry | None = None

    @property
    def at(self) -> tuple[int, str]:
        """The target: its system and path."""
        return id(self.system), self.path

    @property
    def server(self) -> str:
        """Return the server or bucket of the target, as System.host()."""
        return self.system.host(self.path)

    @property
    def target(self) -> str:
        """The identity of the target in the disk cache."""
        return self.system.identity(self.path)

    @property
    def key(self) -> Hashable:
        """The key of the block in the cache in memory."""
        entry = self.expected
        version = entry and (entry.size, entry.tag or entry.mtime_ns)
        return id(self.system), self.path, version, self.start, self.stop


class BlockOnDisk:
    """A large, verified block that stays on the disk: its parts are read from the page cache when they are wanted.

    A copy of the block would need fresh memory, which costs more than reading the parts. A BlockOnDisk counts as
    _ON_DISK bytes, so that the bound of the cache in memory also bounds the number of such blocks.
    """

    __slots__ = ("head", "length", "name")

    def __init__(self, name: str, head: bytes, length: int) -> None:
        self.name, self.head, self.length = name, head, length

    def __len__(self) -> int:
        return _ON_DISK


Block: TypeAlias = Buffer | BlockOnDisk
