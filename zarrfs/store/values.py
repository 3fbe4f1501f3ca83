"""Values that several stores use: bytes in memory and open files."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable

from zarrfs.errors import TargetChanged
from zarrfs.store.api import Info, Store, Value
from zarrfs.system.beneath import file_version
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

    The value owns `descriptor`, and closes it if `info_of` fails. A file that is modified in place changes for its
    readers, as any local file does.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int, info_of: Callable[[os.stat_result], Info]) -> None:
        self._descriptor = descriptor
        try:
            status = os.fstat(descriptor)
            info = info_of(status)
        except BaseException:
            self.close()
            raise
        super().__init__(info, file_version(status))

    async def read(self, start: int, length: int) -> Buffer:
        return await read_file(self._descriptor, start, length)

    def fileno(self) -> int | None:
        return self._descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


async def open_sized(store: Store, key: str, size: int) -> Value:
    """Open a value that had `size` bytes when it was listed; raise TargetChanged if it now has another size.

    A local file is exempt: it may grow in place, and its reader sees where it ends.
    """
    value = await store.open(key)
    if value.fileno() is None and value.size != size:
        value.close()
        raise TargetChanged(key, f"has changed: it has {value.size} bytes, and had {size}")
    return value
