"""Reports of commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zarrfs.errors import UsageError
from zarrfs.jobs import reports


def test_a_report_is_written_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "report"
    reports.write(str(path), {"a": 1})
    assert json.loads(path.read_text()) == {"node": os.uname().nodename, "a": 1}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="--report"):
        reports.write(str(tmp_path / "nowhere/report"), {})
    with pytest.raises(UsageError, match=r"--report /.*: is a directory"):
        reports.write(str(tmp_path), {})
    reports.write(None, {})


def test_a_report_is_written_through_a_link_and_to_a_pipe(tmp_path: Path) -> None:
    """The pipe is not replaced. A link of another user, or at a guessed temporary name, is not followed."""
    real, link, fifo = tmp_path / "real", tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(real)
    reports.write(str(link), {"a": 1})
    assert (link.is_symlink(), json.loads(real.read_text())["a"]) == (True, 1)
    guess = tmp_path / f"new.{os.getpid()}.tmp"
    guess.symlink_to(real)
    reports.write(str(tmp_path / "new"), {"a": 2})
    assert json.loads(real.read_text())["a"] == 1
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        reports.write(str(fifo), {"a": 3})
        assert json.loads(os.read(reader, 1 << 16))["a"] == 3
    finally:
        os.close(reader)
    assert fifo.is_fifo()
    if os.geteuid() == 0:
        os.chown(link, 12345, 12345, follow_symlinks=False)
        with pytest.raises(UsageError, match="a link that another user has made"):
            reports.write(str(link), {})
