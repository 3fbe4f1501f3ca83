"""Detection of file systems whose ctime is independent of the mtime."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarrfs.system import beneath


def test_an_image_beneath_overlayfs_has_no_ctime_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath, "_file_system", lambda _: 0x794C7630)
    (tmp_path / "file").write_text("x")  # its mtime and ctime are equal, as for all files of a squashfs
    with open(tmp_path / "file") as file:
        assert not beneath.keeps_ctime(file.fileno())
        os.utime(tmp_path / "file", (0, 0))  # as after unpacking a file to a disk
        assert beneath.keeps_ctime(file.fileno())
