"""README.md and docs/tutorial.md: every command prints the output shown below it. scripts/demo runs to its end."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import DATA
from tests.pages import DOCS, ROOT, check_transcripts


def test_the_readme(tmp_path: Path) -> None:
    shutil.copytree(DATA / "references/data", tmp_path / "references/data")
    document = (DATA / "references/combined_v1.json").read_text()
    (tmp_path / "combined.json").write_text(document.replace("@DATA@", f"{tmp_path}/references/data"))
    shutil.copy(DATA / "archives/flux-list.json", tmp_path / "job.json")
    shutil.copytree(DATA / "archives/blobs", tmp_path / "blobs")
    check = "$ zarrfs check combined.json\n"  # the page omits the table of arrays, which comes before the last line
    page = (ROOT / "README.md").read_text().replace(check, f"{check}...\n")
    check_transcripts(page, tmp_path, {"/srv/references": f"{tmp_path}/references"})


@pytest.mark.timeout(600)
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "data"
    directory.mkdir()
    masks = (r"\d+ reads, \d+ files", r"zarrfs\[\d+\]", r"(?m)^total \d+")
    page = re.sub(r"(?m)^\$ pip install .*\n", "", (DOCS / "tutorial.md").read_text())  # the packages are here
    check_transcripts(page, directory, {"/data": str(directory)}, masks)
    assert not list(directory.iterdir())


@pytest.mark.nightly  # the tutorial runs the same commands
@pytest.mark.timeout(600)
def test_the_demo() -> None:
    done = subprocess.run([ROOT / "scripts/demo"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("demo: done\n")
