"""docs/extending.md: its patches apply to the program, and the patched program does what the page says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.conftest import DATA
from tests.pages import DOCS, ROOT, blocks, check_transcript


def test_each_change_of_extending_md_applies_and_works(tmp_path: Path) -> None:
    page = DOCS / "extending.md"
    changed, case = tmp_path / "changed", tmp_path / "case"
    shutil.copytree(ROOT / "zarrfs", changed / "zarrfs")
    changes = [block for block in blocks(page) if block.language == "diff"]
    assert len(changes) == 5
    for change in changes:
        done = subprocess.run(
            ["patch", "-p1", "--fuzz=0"], cwd=changed, input=change.text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"extending.md:{change.line}: {done.stdout}{done.stderr}"
    case.mkdir()
    shutil.copytree(DATA / "archives/blobs", case / "blobs")
    shutil.copy(DATA / "archives/flux-list.json", case / "job.json")
    check_transcript(case, page, env={"PYTHONPATH": str(changed)}, least=12)
