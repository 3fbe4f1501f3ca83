"""Where a sparse file has data."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


def data_extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """As each_extent(), in one list."""
    return list(each_extent(descriptor, size))


def each_extent(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of what is not a hole in the first `size` bytes. Source: lseek(2), SEEK_DATA.

    Where the file system does not know, it is all one extent. OSError as lseek(2).
    """
    stop = 0
    while stop < size:
        try:
            start = os.lseek(descriptor, stop, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # a hole up to the end
                return
            if exc.errno == errno.EINVAL:
                yield 0, size
                return
            raise
        stop = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        if start < stop:
            yield start, stop
