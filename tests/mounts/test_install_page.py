"""The transcript in docs/install.md: a wheel is built, installed, used and removed as the page says.

The packages that zarrfs needs come from this environment, so nothing is downloaded. test_debian_package.py tests what
the page says about the Debian package, test_helper.py what it says about the mount helper.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT, check_transcript


@pytest.mark.timeout(600)
def test_the_transcript_shows_the_real_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, home, packages = tmp_path / "data", tmp_path / "home", tmp_path / "packages"
    for made in (data, home / ".cache/zarrfs/index", home / ".config/zarrfs", packages):
        made.mkdir(parents=True)
    for path in Path(pytest.__file__).parents[1].iterdir():
        if "zarrfs" not in path.name:
            (packages / path.name).symlink_to(path)
    subprocess.run([ROOT / "scripts/build", data / "dist"], check=True, stdout=subprocess.DEVNULL, timeout=500)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    environment = {"HOME": str(home), "PYTHONPATH": str(packages), "PIP_NO_INDEX": "1"}
    check_transcript(data, DOCS / "install.md", env=environment, least=6)
    assert not (data / "venv").exists()
    assert not (home / ".cache/zarrfs").exists()
    assert not (home / ".config/zarrfs").exists()
