"""DestinationDirectory: several threads, file systems without features, and failures."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import open_descriptors, tmpfs
from tests.copying.extracting import write
from zarrfs.copying import destination_directory as filling
from zarrfs.copying.destination_directory import DestinationDirectory, Folder
from zarrfs.errors import SourceError
from zarrfs.store.api import Info, Kind
from zarrfs.store.directory import FileSystemStore


def test_unfinished_files_of_this_run_are_not_removed_as_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread looks for leftovers on an inner file system while another thread creates its first file there."""
    with tmpfs(tmp_path / "d", "size=1m") as inner:
        fill = DestinationDirectory(str(tmp_path), "overwrite")
        root = fill.root(Info("", Kind.DIRECTORY, None, None, None, None))
        folder = Folder("d", Info("d", Kind.DIRECTORY, None, None, None, None), root)
        listed, begun = threading.Event(), threading.Event()
        real = os.listdir

        def slow(path: str) -> list[str]:
            if threading.current_thread() is not threading.main_thread():
                listed.set()
                begun.wait(1)
            return real(path)

        monkeypatch.setattr(filling.os, "listdir", slow)
        opened: list[int] = []
        other = threading.Thread(target=lambda: opened.append(fill.open(folder)))
        try:
            other.start()
            assert listed.wait(60)
            opened.append(fill.open(folder))
            staged = fill.create(folder, opened[-1], None)
            begun.set()
            other.join()
            found = real(inner)
            fill.discard(staged)
            assert found == [os.fsdecode(staged.name)]
        finally:
            begun.set()
            other.join()
            for descriptor in opened:
                os.close(descriptor)
            fill.abandon()


@pytest.mark.parametrize("code", [0, errno.EPERM, errno.ENOSYS, errno.EXDEV])
def test_a_copy_works_without_rename_flags_and_hard_links(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hard link replaces renameat2(2) with RENAME_NOREPLACE; without hard links, a plain rename does."""
    (tmp_path / "source/d").mkdir(parents=True)
    (tmp_path / "source/d/f").write_bytes(b"x")

    def rename(*_arguments: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def link(*_arguments: Any, **_more: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(filling, "rename", rename)
    if code:
        monkeypatch.setattr(filling.os, "link", link)
    write(FileSystemStore(str(tmp_path / "source")), tmp_path / "out")
    assert (tmp_path / "out/d/f").read_bytes() == b"x"
    assert os.listdir(tmp_path / "out") == ["d"]


def test_a_failed_run_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """Not even of files that were opened in advance and never copied."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for index in range(400):
        (source / f"{index:03}").write_bytes(b"x" * 100)
        (out / f"{index:03}").touch()
    before = open_descriptors()
    for _ in range(5):
        with pytest.raises(SourceError, match="is there already"):
            write(FileSystemStore(str(source)), out)
    assert open_descriptors() <= before
