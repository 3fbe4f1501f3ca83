"""Bytes-like objects, and writing them whole to a file."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

_WRITE = 256 << 10  # bytes of one call: of more, the page cache takes some five times as long (docs/speed.md)
_PARTS = 1000  # that one writev(2) takes: the system has 1,024


def write_all(descriptor: int, data: Buffer, at: int) -> int:
    """Write `data` from offset `at` on; returns the offset behind it."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view[:_WRITE], at)
        at, view = at + count, view[count:]
    return at


def write_parts(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write some buffers, one after the other, from where the descriptor is."""
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
