"""Sparse files: data extents, and copies and writes that keep holes. Also restores times of a changed directory."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from zarrfs.errors import ReadError, reason_of
from zarrfs.system.buffers import Buffer, write_all

_HOLE = 64 << 10  # bytes; an aligned run of zeros of this size is left as a hole
_ZEROS = bytes(_HOLE)
_PIECE = 64 << 20  # bytes copied by one call
_READ = 1 << 20


def data_extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Return the extents of each_extent() as a list."""
    return list(each_extent(descriptor, size))


def each_extent(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the data extents in the first `size` bytes. Source: lseek(2), SEEK_DATA.

    On a file system without SEEK_DATA, yield the whole range as one extent. Raise OSError as lseek(2).
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


@contextlib.contextmanager
def keep_times(directory: int) -> Iterator[None]:
    """Restore the atime and mtime of a directory after the body, which changes its entries."""
    status = os.fstat(directory)
    yield
    with contextlib.suppress(OSError):  # only the owner may set times
        os.utime(b".", ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=directory)


def write_sparse(descriptor: int, data: Buffer, at: int) -> None:
    """Write `data` at offset `at`, except long runs of zeros, for which holes are left."""
    view = memoryview(data).cast("B")
    for start, stop in _data_runs(view):
        write_all(descriptor, view[start:stop], at + start)


def copy_data(source: int, to: int, name: str, copied: Callable[[int], object]) -> None:
    """Copy the data extents of a file to a new file.

    `copied` is called after each piece with its number of bytes, and may raise to cancel the copy. Raise OSError for a
    failed write, and ReadError about `name` if the source cannot be read or ends early. Source: copy_file_range(2).
    """
    in_kernel = True
    with _reading(name):
        status = os.fstat(source)
        size = status.st_size
        sparse = status.st_blocks * 512 < size
        extents = data_extents(source, size) if sparse else [(0, size)]
    for start, stop in extents:
        at = start
        while at < stop:
            count = 0
            if in_kernel:
                # not supported everywhere. On failure, fall back to pread and pwrite, which show the failing file
                with contextlib.suppress(OSError):
                    count = os.copy_file_range(source, to, min(stop - at, _PIECE), at, at)
            if not count:  # some file systems return 0 instead of an error
                in_kernel = False
                with _reading(name):
                    data = os.pread(source, min(stop - at, _READ), at)
                if not data:
                    raise ReadError(name, f"ended at byte {at:,} while it was read")
                count = write_all(to, data, at) - at
            at += count
            copied(count)
    if sparse:
        os.ftruncate(to, size)


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ReadError(name, reason_of(exc)) from exc


def _data_runs(view: memoryview) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the runs of blocks that are not all zeros."""
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
