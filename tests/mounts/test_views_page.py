"""The transcript in docs/zarr-views.md: every command does what is written below it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.pages import DOCS, check_transcript
from tests.zarrsamples import ROOT

PAGE = DOCS / "zarr-views.md"


def test_the_transcript(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "store/table").mkdir(parents=True)
    about = json.loads((ROOT / "v2_hier/struct/.zarray").read_text())
    mixed = about | {"dtype": [["x", ">i4"], ["y", "<f8"]]}
    (tmp_path / "store/table/.zarray").write_text(json.dumps(mixed))
    shutil.copytree(ROOT / "v0_int32_01", tmp_path / "store/rain")
    check_transcript(tmp_path, PAGE, least=9)
