"""A request for a block."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from zarrfs.net.responses import Entry
from zarrfs.net.systems import System


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
