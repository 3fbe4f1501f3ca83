"""Buffers: allocation without zeros, and reads and writes that are complete."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

_WRITE = 256 << 10  # bytes per call; one of 1 MiB takes four times as long as four of 256 KiB
_ZEROED = 64 << 10  # bytes; up to this size, filling with zeros takes no extra time


def unfilled(size: int) -> bytearray:
    """Return a bytearray with arbitrary contents. The caller must overwrite all of it, or cut off the rest.

    Filling 4 MiB with zeros would take a tenth of the time that receiving and decrypting 4 MiB takes.
    """
    return bytearray(size) if size <= _ZEROED else _allocator()(size)


@functools.cache
def _allocator() -> Callable[[int], bytearray]:
    """Return PyByteArray_FromStringAndSize of Python's C API, called without a string; bytearray if it is missing."""
    import ctypes

    try:
        make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    except AttributeError:
        return bytearray
    make.argtypes, make.restype = [ctypes.c_void_p, ctypes.c_ssize_t], ctypes.py_object
    return functools.partial(make, None)


def read_all(descriptor: int, length: int, at: int) -> bytes:
    """Read `length` bytes at offset `at`; fewer only at the end of the file. Raise OSError.

    A single pread(2) returns 2 GiB at most, and less on some network file systems.
    """
    data = os.pread(descriptor, length, at)
    if len(data) == length or not data:
        return data
    parts = [data]
    have = len(data)
    while have < length and (data := os.pread(descriptor, length - have, at + have)):
        parts.append(data)
        have += len(data)
    return b"".join(parts)


def write_all(descriptor: int, data: Buffer, at: int) -> int:
    """Write all of `data` at offset `at`; return the offset after it. Raise OSError."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view[:_WRITE], at)
        at, view = at + count, view[count:]
    return at


def write_parts(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write buffers in sequence at the current file offset. Raise OSError."""
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            view = view[os.write(descriptor, view[:_WRITE]) :]
