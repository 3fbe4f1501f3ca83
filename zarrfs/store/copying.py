"""What copies of files and directories take care of: holes, and the times of directories."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from zarrfs.store.api import Buffer

_HOLE = 64 << 10  # bytes: zeros that begin at a multiple of this are not written
_ZEROS = bytes(_HOLE)


@contextlib.contextmanager
def same_time(directory: int) -> Iterator[None]:
    """What is done in a directory meanwhile is no change to who looks at it."""
    status = os.fstat(directory)
    yield
    with contextlib.suppress(OSError):  # of somebody else's directory
        os.utime(b".", ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=directory)


def write_sparse(descriptor: int, data: Buffer, at: int) -> None:
    """Write `data`, leaving out long stretches of zeros: holes stay holes."""
    view = memoryview(data).cast("B")
    for start, stop in _written(view):
        write_all(descriptor, view[start:stop], at + start)


def write_all(descriptor: int, data: Buffer, at: int) -> int:
    """Write `data` from offset `at` on; returns the offset behind it."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, at)
        at, view = at + count, view[count:]
    return at


def _written(view: memoryview) -> Iterator[tuple[int, int]]:
    """(start, stop) of the stretches that are not all zeros."""
    begin = None
    for at in range(0, len(view), _HOLE):
        piece = view[at : at + _HOLE]
        if not piece[0] and bytes(piece) == _ZEROS[: len(piece)]:
            if begin is not None:
                yield begin, at
            begin = None
        elif begin is None:
            begin = at
    if begin is not None:
        yield begin, len(view)
