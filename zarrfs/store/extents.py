"""Where a sparse file has data."""

from __future__ import annotations

import errno
import os


def data_extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """(start, stop) of what is not a hole in the first `size` bytes. Source: lseek(2), SEEK_DATA.

    Where the file system does not know, it is all one extent. OSError as lseek(2).
    """
    found: list[tuple[int, int]] = []
    stop = 0
    while stop < size:
        try:
            start = os.lseek(descriptor, stop, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # a hole up to the end
                break
            if exc.errno == errno.EINVAL:
                return [(0, size)]
            raise
        stop = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        if start < stop:
            found.append((start, stop))
    return found
