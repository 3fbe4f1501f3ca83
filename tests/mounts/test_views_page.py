"""The transcript in docs/zarr-views.md: each command prints the output shown below it."""

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
    objects = about | {"dtype": "|O", "fill_value": None, "filters": [{"id": "json2"}]}
    (tmp_path / "store/table/.zarray").write_text(json.dumps(objects))
    shutil.copytree(ROOT / "v0_int32_01", tmp_path / "store/rain")
    shutil.copytree(ROOT / "v0_pickled_snappy", tmp_path / "store/snow")
    check_transcript(tmp_path, PAGE, least=9)
