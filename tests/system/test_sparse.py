"""Data extents of sparse files, and copies and writes that keep holes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zarrfs.errors import ReadError
from zarrfs.system import sparse as sparse_files
from zarrfs.system.sparse import copy_data, data_extents, write_sparse

MIB = 1 << 20


@pytest.fixture
def sparse(tmp_path: Path) -> int:
    """Open a file of 4 MiB with data only in its second mebibyte; return the descriptor."""
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
def test_extents_end_at_the_given_size(size: int, extents: list[tuple[int, int]], sparse: int) -> None:
    """A file may have grown since its size was read."""
    assert data_extents(sparse, size) == extents


@pytest.mark.parametrize("size", [4 * MIB, MIB + 5])
def test_a_copy_has_the_same_bytes_and_holes(size: int, sparse: int, tmp_path: Path) -> None:
    copy = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    copy_data(sparse, copy, size, "sparse")
    assert os.fstat(copy).st_size == size
    assert os.pread(copy, size, 0) == os.pread(sparse, size, 0)
    assert os.fstat(copy).st_blocks <= os.fstat(sparse).st_blocks


def failing(real: Any, bad: int) -> Callable[..., Any]:
    """Return the system call `real`, which now fails with EIO if its first or second argument is `bad`."""

    def call(*arguments: Any) -> Any:
        if bad in arguments[:2]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    return call


def test_a_failure_to_read_is_distinguished_from_a_failure_to_write(
    sparse: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    for bad, kind in ((sparse, ReadError), (copy, OSError)):
        with monkeypatch.context() as patch:
            for name in ("copy_file_range", "pread", "pwrite"):
                patch.setattr(os, name, failing(getattr(os, name), bad))
            with pytest.raises(kind, match="input/output error" if bad == sparse else "Input/output error"):
                copy_data(sparse, copy, 4 * MIB, "key")
    os.truncate(tmp_path / "sparse", 0)
    with monkeypatch.context() as patch:
        patch.setattr(sparse_files, "data_extents", lambda descriptor, size: [(0, size)])
        with pytest.raises(ReadError, match="key: ended at byte 0 while it was read"):
            copy_data(sparse, copy, 4 * MIB, "key")


def test_long_runs_of_zeros_are_written_as_holes(tmp_path: Path) -> None:
    data = b"a" + bytes(MIB) + b"b" + bytes(100) + b"c" + bytes(MIB)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_sparse(descriptor, data, 7)
    os.ftruncate(descriptor, 7 + len(data))
    assert os.pread(descriptor, len(data), 7) == data
    assert os.fstat(descriptor).st_blocks * 512 < MIB // 2
