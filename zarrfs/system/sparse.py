"""What copies of files and directories take care of: holes, and the times of directories."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from zarrfs.system.buffers import Buffer, write_all
from zarrfs.system.extents import data_extents

_HOLE = 64 << 10  # bytes: zeros that begin at a multiple of this are not written
_ZEROS = bytes(_HOLE)
_PIECE = 64 << 20  # bytes copied by one call
_READ = 1 << 20
# what copy_file_range(2) says where the two file systems cannot do it
_ELSEWHERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


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


def copy_data(source: int, to: int, size: int, pause: Callable[[], object] = lambda: None) -> None:
    """Copy the first `size` bytes of a file to another, but for holes. OSError, also where there are fewer.

    `pause` is called now and then, and may raise. Source: copy_file_range(2).
    """
    in_kernel = True
    for start, stop in data_extents(source, size):
        at = start
        while at < stop:
            pause()
            count = 0
            if in_kernel:
                try:
                    count = os.copy_file_range(source, to, min(stop - at, _PIECE), at, at)
                except OSError as exc:
                    if exc.errno not in _ELSEWHERE:
                        raise
            if not count:  # some file systems say so instead of failing
                in_kernel = False
                data = os.pread(source, min(stop - at, _READ), at)
                if not data:
                    raise OSError(errno.EIO, f"ended at byte {at:,} while it was read")
                count = write_all(to, data, at) - at
            at += count
    os.ftruncate(to, size)


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
