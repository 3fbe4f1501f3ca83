"""scripts/soak, run briefly: it performs every kind of operation and finds no violation; its options and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.nightly, pytest.mark.skipif(os.geteuid() != 0, reason="only root may drop caches"),
]  # fmt: skip
ROOT = Path(__file__).parents[2]


def soak(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.soak", "--directory", str(directory), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.timeout(300)
def test_a_short_soak_finds_no_violation(tmp_path: Path) -> None:
    done = soak(tmp_path / "not" / "there", "--minutes", "0.06", "--seed", "8", "--report", str(tmp_path / "report"))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    report = (tmp_path / "report").read_text()
    for what in ("random read", "sequential read", "mmap read", "interrupted read", "listing", "stat storm", "write"):
        assert f"\n{what} " in report, what
    assert "violations: 0" in report
    assert sorted(map(str, tmp_path.rglob("*"))) == [f"{tmp_path}/{name}" for name in ("not", "not/there", "report")]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = soak(tmp_path / "file" / "x", "--minutes", "0.01")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"soak: --directory {tmp_path}/file/x: not a directory\n"
