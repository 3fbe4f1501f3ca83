"""Tables in shared memory: a process finds the records of another one, also after that was killed."""

from __future__ import annotations

import mmap
import os
import random
import signal

import pytest

from zarrfs.system import sharedtable
from zarrfs.system.sharedtable import SharedTable

COUNT = 20_000  # several segments


def test_another_process_finds_the_records_of_a_killed_writer_and_adds_its_own() -> None:
    table, numbers = SharedTable(), random.Random(0).sample(range(1 << 62), COUNT)
    written, seen = os.pipe()
    writer = os.fork()
    if writer == 0:
        for number in numbers[: COUNT // 2]:
            table.put(number, b"%d" % number)
        os.write(seen, b"x")
        signal.pause()
        os._exit(1)
    os.read(written, 1)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    for number in numbers[COUNT // 2 :]:
        table.put(number, b"%d" % number)
    assert all(table.get(number) == b"%d" % number for number in numbers)
    assert table.get(12345) is None
    assert dict(table.items()) == {number: b"%d" % number for number in numbers}
    assert len(table) == COUNT


def test_values_of_any_length() -> None:
    table = SharedTable()
    for number, size in enumerate((0, 1, 65_535, 65_535, 3)):
        table.put(number + 1, bytes(size))
    assert [len(table.get(number) or b"") for number in range(1, 6)] == [0, 1, 65_535, 65_535, 3]


def test_segments_begin_at_pages_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of 64 KiB, as on arm64 and ppc64, mmap(2) accepts only offsets that are multiples of 64 KiB."""
    offsets, mapped = [], mmap.mmap

    def note(file: int, length: int, offset: int = 0) -> mmap.mmap:
        offsets.append(offset)
        return mapped(file, length, offset=offset)

    monkeypatch.setattr(sharedtable, "_HEADER", 65_536)
    monkeypatch.setattr(mmap, "PAGESIZE", 65_536)
    monkeypatch.setattr(mmap, "mmap", note)
    table = SharedTable()
    for number in range(5000):
        table.put(number + 1, b"%d" % number)
    assert len(offsets) == 4
    assert all(offset % 65_536 == 0 for offset in offsets)
    assert all(table.get(number + 1) == b"%d" % number for number in range(5000))
