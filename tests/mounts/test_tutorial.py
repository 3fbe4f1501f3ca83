"""The transcript in docs/tutorial.md: each command prints the output shown below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import DOCS, check_transcript


@pytest.mark.timeout(600)
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # the tutorial clears it
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    directory = tmp_path / "data"
    directory.mkdir()
    masks = (r"\d+ reads, \d+ files", r"zarrfs\[\d+\]", r" +\d+\.\d KiB", r"(?m)^total \d+")
    check_transcript(directory, DOCS / "tutorial.md", masks=masks, least=40)
    assert not list(directory.iterdir())
