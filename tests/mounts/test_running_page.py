"""The transcript in docs/running-changes.md: every command prints the output shown below it."""

from __future__ import annotations

from pathlib import Path

from tests.pages import DOCS, check_transcript

SECONDS = (r"(?<= in )[\d.]+ s", r"(?<= after )[\d.]+ s", r"(?<=serve\.py:)\d+")


def test_the_transcript(tmp_path: Path) -> None:
    check_transcript(tmp_path, DOCS / "running-changes.md", masks=SECONDS, least=18)
