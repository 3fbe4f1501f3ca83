"""Data extents of sparse files, and copies and writes that keep holes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarrfs.system.sparse import copy_data, data_extents, write_sparse

MIB = 1 << 20


@pytest.fixture
def sparse(tmp_path: Path) -> int:
    """A file of 4 MiB with data in its second mebibyte."""
    descriptor = os.open(tmp_path / "sparse", os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, b"data" * (MIB // 4), MIB)
    os.ftruncate(descriptor, 4 * MIB)
    if data_extents(descriptor, 4 * MIB) != [(MIB, 2 * MIB)]:
        pytest.skip("a file system without holes")
    return descriptor


@pytest.mark.parametrize(
    ("size", "extents"),
    [(4 * MIB, [(MIB, 2 * MIB)]), (MIB + 5, [(MIB, MIB + 5)]), (MIB, []), (0, []), (8 * MIB, [(MIB, 2 * MIB)])],
)
def test_extents_end_with_the_size_asked_for(size: int, extents: list[tuple[int, int]], sparse: int) -> None:
    """A file may have grown since its size was read."""
    assert data_extents(sparse, size) == extents


@pytest.mark.parametrize("size", [4 * MIB, MIB + 5])
def test_a_copy_has_the_same_bytes_and_holes(size: int, sparse: int, tmp_path: Path) -> None:
    copy = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    copy_data(sparse, copy, size)
    assert os.fstat(copy).st_size == size
    assert os.pread(copy, size, 0) == os.pread(sparse, size, 0)
    assert os.fstat(copy).st_blocks <= os.fstat(sparse).st_blocks


def test_long_runs_of_zeros_are_written_as_holes(tmp_path: Path) -> None:
    data = b"a" + bytes(MIB) + b"b" + bytes(100) + b"c" + bytes(MIB)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_sparse(descriptor, data, 7)
    os.ftruncate(descriptor, 7 + len(data))
    assert os.pread(descriptor, len(data), 7) == data
    assert os.fstat(descriptor).st_blocks * 512 < MIB // 2
