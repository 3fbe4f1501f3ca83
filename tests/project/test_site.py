"""The documentation site: it builds without a warning, and its navigation has every page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.pages import DOCS, ROOT


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts/build-docs", tmp_path / "site"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/index.html").stat().st_size > 1000
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(DOCS).with_suffix(".html")).exists()


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "scripts/mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
