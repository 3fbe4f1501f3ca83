"""scripts/soak, run briefly: it performs every kind of operation and finds no violation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may drop caches")
def test_a_short_soak_finds_no_violation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--directory", tmp_path, "--minutes", "0.2", "--seed", "8"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    for what in ("read", "interrupted read", "listing", "stat storm", "write"):
        assert f"\n{what:20} right " in done.stdout, what
    assert "violations: 0" in done.stdout
    assert list(tmp_path.iterdir()) == []
