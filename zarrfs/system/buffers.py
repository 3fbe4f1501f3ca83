"""Bytes-like objects, and complete writes of them to a file."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

_WRITE = 256 << 10  # bytes per call: larger writes take the page cache some five times as long (docs/speed.md)
_PARTS = 1000  # buffers per writev(2): IOV_MAX is 1,024


def write_all(descriptor: int, data: Buffer, at: int) -> int:
    """Write all of `data` at offset `at`; return the offset behind it. Raise OSError."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view[:_WRITE], at)
        at, view = at + count, view[count:]
    return at


def write_parts(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write buffers one after the other at the descriptor's position. Raise OSError."""
    left = deque(memoryview(part).cast("B") for part in parts)
    while left:
        batch: list[memoryview] = []
        size = 0
        while left and size < _WRITE and len(batch) < _PARTS:
            part = left.popleft()
            if len(part) > _WRITE - size:
                left.appendleft(part[_WRITE - size :])
                part = part[: _WRITE - size]
            batch.append(part)
            size += len(part)
        count = os.writev(descriptor, batch)
        if count < size:
            while count >= len(batch[0]):
                count -= len(batch.pop(0))
            left.extendleft(reversed([batch[0][count:], *batch[1:]]))
