"""The transcript in docs/install.md: a wheel is built, installed, used and removed as it says.

The packages that zarrfs needs are those of this environment, so nothing is fetched. What the page says of the Debian
package is done in test_debian_package.py, of the helper in test_helper.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT, check_transcript


@pytest.mark.timeout(600)
def test_the_transcript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
