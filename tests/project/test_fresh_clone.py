"""Every script works on a fresh clone: it first runs scripts/setup, which installs what the script needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and os.access(path, os.X_OK))
SETUP = """#!/bin/sh
echo "setup $*" >>"$(dirname "$0")/asked"
exit 77
"""


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "setup"])
def test_a_script_runs_setup_first_and_fails_if_it_fails(name: str, tmp_path: Path) -> None:
    if name == "install-helper" and os.geteuid() != 0:
        pytest.skip("install-helper is run as root")
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "zarrfs", clone / "zarrfs", ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "scripts/setup").write_text(SETUP)
    # only the system's interpreter, which has none of our packages
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [clone / "scripts" / name], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (clone / "scripts/asked").exists(), done.stdout + done.stderr
    assert done.returncode != 0
