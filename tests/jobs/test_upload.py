"""Checksums of uploaded files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarrfs.config.options import Options
from zarrfs.copying.destination_directory import DestinationDirectory, Staged
from zarrfs.jobs import upload
from zarrfs.jobs.stageout import StageOutReport, Tree
from zarrfs.store.api import Info


def test_md5_of_info() -> None:
    known = "900150983cd24fb0d6963f7d28e17f72"
    assert upload.md5_of_info({"ETag": f'"{known}"'}) == known
    assert upload.md5_of_info({"ETag": f'"{known}-2"'}) == ""
    assert upload.md5_of_info({"md5Hash": "kAFQmDzST7DWlj99KOF/cg=="}) == known
    assert upload.md5_of_info({"content_settings": {"content_md5": bytearray.fromhex(known)}}) == known
    assert upload.md5_of_info({"size": 1}) == ""


def test_a_file_that_vanishes_while_it_is_copied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keep_going, the others are copied."""
    (tmp_path / "upper").mkdir()
    for name in "abc":
        (tmp_path / "upper" / name).write_text(name)
    finish = DestinationDirectory.place

    def place(self: DestinationDirectory, staged: Staged, directory: int, info: Info, new: bool) -> None:
        finish(self, staged, directory, info, new)
        if info.name == "b":
            (tmp_path / "upper/b").unlink()

    monkeypatch.setattr(DestinationDirectory, "place", place)
    tree, report = Tree(str(tmp_path / "upper"), str(tmp_path / "upper")), StageOutReport()
    upload.send(tree, upload.UploadOptions(str(tmp_path / "to"), jobs=1, keep_going=True), Options(), report)
    assert report.failed == [{"key": "b", "reason": "has changed or was removed while it was copied"}]
    assert sorted(os.listdir(tmp_path / "to")) == ["a", "b", "c"]
