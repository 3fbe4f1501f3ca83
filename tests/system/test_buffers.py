"""Memory for buffers, and complete reads."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from zarrfs.system import buffers
from zarrfs.system.buffers import read_all, unfilled


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, 4 << 20])
def test_a_buffer_has_its_length_and_can_be_written_and_cut(size: int) -> None:
    data = unfilled(size)
    assert (type(data), len(data)) == (bytearray, size)
    data[:] = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert data == bytes(range(256)) * (size // 256) + bytes(size % 256)
    del data[size // 2 :]
    assert len(data) == size // 2
    data += b"abc"
    assert data.endswith(b"abc")


def test_a_large_buffer_is_not_filled_with_zeros() -> None:
    """Memory that was freed a moment ago is allocated again with its old contents."""
    data = bytearray(b"\xaa") * 100_000
    del data
    assert b"\xaa" in unfilled(100_000)


def test_without_the_c_api_a_buffer_is_filled_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers._allocator.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "pythonapi", object())
        assert unfilled(100_000) == bytes(100_000)
    buffers._allocator.cache_clear()


@pytest.mark.parametrize(
    ("length", "at", "expected"), [(10, 0, b"0123456789"), (5, 3, b"34567"), (9, 7, b"789"), (3, 10, b"")]
)
def test_a_short_read_is_continued(
    length: int, at: int, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, count, offset: real(descriptor, min(count, 3), offset))
    with (tmp_path / "file").open("rb") as file:
        assert read_all(file.fileno(), length, at) == expected
