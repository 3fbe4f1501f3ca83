"""Inner chunks of shards as files: byte ranges of the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zarrfs.errors import TargetChanged
from zarrfs.store.api import Info, Kind, Value
from zarrfs.system.buffers import Buffer

if TYPE_CHECKING:
    from zarrfs.views.chunks import StoredAt  # imports numpy, which would delay the start of a mount


def inner_entry(name: str, at: StoredAt) -> Info:
    """Return the entry of an inner chunk."""
    return Info(name, Kind.FILE, at.length, at.info.mode, at.info.mtime_ns, identity=at.info.identity)


class Range(Value):
    """A byte range of an open value, which is closed with the range."""

    __slots__ = ("_offset", "_whole")

    def __init__(self, key: str, info: Info, whole: Value, at: StoredAt) -> None:
        if whole.size < at.offset + at.length or whole.version != at.version:
            whole.close()
            raise TargetChanged(key, "its shard has changed")
        version = None if whole.version is None else (whole.version, at.offset, at.length)
        super().__init__(info, version)
        self._whole, self._offset = whole, at.offset

    async def read(self, start: int, length: int) -> Buffer:
        length = max(0, min(length, self.size - start))
        return await self._whole.read(self._offset + start, length)

    def close(self) -> None:
        self._whole.close()
