"""The transcript in docs/info-and-check.md: every command prints the output shown below it."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.conftest import DATA
from tests.pages import DOCS, check_transcript


def test_the_transcript_shows_the_real_output(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zarr/v3_hier", tmp_path / "hier.zarr")
    check_transcript(tmp_path, DOCS / "info-and-check.md", least=6)
