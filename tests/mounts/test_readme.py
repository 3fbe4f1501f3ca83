"""The transcript in README.md: every command prints the output shown below it."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.conftest import DATA
from tests.pages import ROOT, check_transcript


def test_the_transcript(tmp_path: Path) -> None:
    for name in ("refs", "job"):
        (tmp_path / name).mkdir()
    shutil.copytree(DATA / "references/data", tmp_path / "references/data")
    document = (DATA / "references/combined_v1.json").read_text()
    (tmp_path / "combined.json").write_text(document.replace("@DATA@", f"{tmp_path}/references/data"))
    shutil.copy(DATA / "archives/flux-list.json", tmp_path / "job.json")
    shutil.copytree(DATA / "archives/blobs", tmp_path / "blobs")
    page = tmp_path / "README.md"
    said = (ROOT / "README.md").read_text()
    # README.md omits the table of arrays, which the command prints before its last line
    page.write_text(said.replace("$ zarrfs check combined.json\nok", "$ zarrfs check combined.json\n...\nok"))
    check_transcript(tmp_path, page, names={"/srv/references": f"{tmp_path}/references"}, least=8)
