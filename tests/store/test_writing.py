"""Files that get their names when they are complete, on file systems with and without O_TMPFILE."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zarrfs.store.writing import NewFile, remove_abandoned


@pytest.fixture(params=["unnamed", "named"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    if request.param == "named":
        real = os.open

        def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *more, **named)

        monkeypatch.setattr(os, "open", opened)
    descriptor = os.open(tmp_path, os.O_PATH)
    yield descriptor
    os.close(descriptor)


def test_a_file_appears_when_it_is_placed(directory: int, tmp_path: Path) -> None:
    file = NewFile(directory)
    os.write(file.descriptor, b"data")
    assert not (tmp_path / "f").exists()
    file.place(directory, b"f")
    file.close()
    assert ((tmp_path / "f").read_bytes(), os.listdir(tmp_path)) == (b"data", ["f"])


def test_a_file_replaces_another_only_if_asked(directory: int, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    file = NewFile(directory)
    with pytest.raises(FileExistsError):
        file.place(directory, b"f", replace=False)
    file.close()
    assert ((tmp_path / "f").read_bytes(), os.listdir(tmp_path)) == (b"old", ["f"])
    file = NewFile(directory)
    os.write(file.descriptor, b"new")
    file.place(directory, b"f")
    assert ((tmp_path / "f").read_bytes(), os.listdir(tmp_path)) == (b"new", ["f"])


def test_a_directory_is_not_replaced(directory: int, tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    file = NewFile(directory)
    with pytest.raises(OSError, match="directory"):
        file.place(directory, b"d")
    file.close()
    assert os.listdir(tmp_path) == ["d"]


def test_a_file_that_is_closed_leaves_nothing(directory: int, tmp_path: Path) -> None:
    file = NewFile(directory)
    os.write(file.descriptor, b"data")
    file.close()
    file.close()
    assert os.listdir(tmp_path) == []


def test_what_killed_processes_left_a_day_ago_is_removed(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".zarrfs-staging.0123").write_bytes(b"half")
    (tmp_path / ".zarrfs-staging").mkdir()
    living = NewFile(directory)
    os.utime(living.descriptor, (0, 0))  # a copy keeps the time of its source
    remove_abandoned(directory)
    living.place(directory, b"f")
    assert sorted(os.listdir(tmp_path)) == [".zarrfs-staging", ".zarrfs-staging.0123", "f"]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    remove_abandoned(directory)
    assert sorted(os.listdir(tmp_path)) == [".zarrfs-staging", "f"]
