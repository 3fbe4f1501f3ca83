"""Fixtures of the tests of zarrfs.jobs: a state directory for each test, and a child process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from zarrfs.jobs import records


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "state"))
    for variable in ("SLURM_TMPDIR", "FLUX_JOB_TMPDIR", "TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    yield
    assert not list(tmp_path.glob("state/staged/*.new"))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a child of this process that zarrfs did not start, as a shell that ran `exec zarrfs` may have one."""
    child = subprocess.Popen(["sleep", "100"])
    yield child
    child.kill()
    child.wait()
