"""Values that several stores use: bytes in memory, open files, and values that are read by their key."""

from __future__ import annotations

import os
from collections.abc import Hashable

from zarrfs.errors import TargetChanged
from zarrfs.store.api import Info, Store, Value
from zarrfs.system.buffers import Buffer
from zarrfs.system.localfiles import read_file


class BytesValue(Value):
    """Bytes in memory."""

    __slots__ = ("_data",)

    def __init__(self, info: Info, data: Buffer, version: Hashable | None = None) -> None:
        super().__init__(info, version)
        self._data = memoryview(data)

    async def read(self, start: int, length: int) -> Buffer:
        return self._data[start : start + length]


class FileValue(Value):
    """A regular file, held open: replacing the file under its name does not affect the value.

    The value owns `descriptor`. A file that is modified in place changes for its readers, as any local file does.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, info: Info, descriptor: int, status: os.stat_result) -> None:
        super().__init__(info, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        self._descriptor = descriptor

    async def read(self, start: int, length: int) -> Buffer:
        return await read_file(self._descriptor, start, length)

    def fileno(self) -> int | None:
        return self._descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class KeyedValue(Value):
    """A value that its store looks up by key at every read, for stores whose keys never change."""

    __slots__ = ("_key", "_store")

    def __init__(self, store: Store, key: str, info: Info, version: Hashable | None = None) -> None:
        super().__init__(info, version)
        self._store, self._key = store, key

    async def read(self, start: int, length: int) -> Buffer:
        return await self._store.get(self._key, start, length)


async def open_sized(store: Store, key: str, size: int) -> Value:
    """Open a value that had `size` bytes when it was listed; raise TargetChanged if it has another size by now."""
    value = await store.open(key)
    if value.size != size:
        value.close()
        raise TargetChanged(key, f"has changed: it has {value.size} bytes, and had {size}")
    return value
