"""Which file systems keep a ctime of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarrfs.system import beneath


def test_an_image_beneath_overlayfs_has_no_ctime_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath, "_file_system", lambda _: 0x794C7630)
    (tmp_path / "file").write_text("x")  # which has one time as mtime and ctime, as all files of a squashfs do
    with open(tmp_path / "file") as file:
        assert not beneath.keeps_ctime(file.fileno())
        os.utime(tmp_path / "file", (0, 0))  # as a file that was unpacked on a disk
        assert beneath.keeps_ctime(file.fileno())
