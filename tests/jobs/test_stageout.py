"""Staging out: deletions in an upper directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarrfs.errors import SourceError
from zarrfs.jobs import (
    stageout,
)


def test_deleted_fails_if_a_directory_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whiteouts in it would be missed."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/.wh.x").write_text("")
    assert stageout.deleted(str(tmp_path)) == ["a/x"]
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path.endswith("b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(SourceError, match="a/b: permission denied"):
        stageout.deleted(str(tmp_path))


def test_whiteouts_in_the_staging_directory_are_not_deletions(tmp_path: Path) -> None:
    """A killed mount leaves a directory there that it was removing, with the whiteouts in it."""
    for path in (".wh.a", "d/.wh.b", ".zarrfs-staging/0123456789abcdef/sub/.wh.c"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert stageout.deleted(str(tmp_path)) == ["a", "d/b"]


def test_a_directory_that_was_removed_and_created_again_is_a_deletion(tmp_path: Path) -> None:
    """So is a file that a directory replaces. A file that was written again is a change, not a deletion."""
    for path in (".wh.air", "air/0", ".wh.f", "f/new", ".wh.g", "g", "sub/.wh.d", "sub/d/x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert stageout.deleted(str(tmp_path)) == ["air/", "f/", "sub/d/"]


def test_a_link_in_the_place_of_a_file_is_no_deletion(tmp_path: Path) -> None:
    """Not even a link that points to a directory."""
    (tmp_path / "d").mkdir()
    for name, target in ("a", "d"), ("b", "nowhere"):
        (tmp_path / f".wh.{name}").touch()
        (tmp_path / name).symlink_to(target)
    assert stageout.deleted(str(tmp_path)) == []
