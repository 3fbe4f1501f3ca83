"""Every script runs on a fresh clone: it has scripts/setup install what it needs, before anything else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# what each asks of scripts/setup, and what it is started with so that it does no more where setup fails
SCRIPTS = {
    "audit": "", "bench": "--test", "build": "--test", "build-deb": "--test", "build-docs": "--test",
    "coverage": "--test", "demo": "", "draw-map": "--test", "draw-profile": "--test",
    "install-helper": "", "licences": "", "soak": "--test", "test": "--test", "write-docs": "",
}  # fmt: skip
SETUP = """#!/bin/sh
echo "setup $*" >>"$(dirname "$0")/asked"
exit 77
"""


def test_all_scripts_are_known_here() -> None:
    found = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and os.access(path, os.X_OK)}
    assert found == {*SCRIPTS, "setup", "messages"}  # the last one needs nothing but Python


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_setup_install_what_it_needs(name: str, tmp_path: Path) -> None:
    if name == "install-helper" and os.geteuid() != 0:
        pytest.skip("install-helper is run as root")
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "zarrfs", clone / "zarrfs", ignore=shutil.ignore_patterns("__pycache__"))
    (clone / "scripts/setup").write_text(SETUP)
    command = [str(clone / "scripts" / name)]
    # no interpreter but the system's, which has none of our packages
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    asked = clone / "scripts/asked"
    assert asked.exists(), done.stdout + done.stderr
    assert asked.read_text().split("\n")[0].strip() == f"setup {SCRIPTS[name]}".strip()
    assert done.returncode != 0
