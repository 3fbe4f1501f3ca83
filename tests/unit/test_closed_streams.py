"""Commands whose standard streams are closed: they end in order, and nothing is written where it does not belong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROGRAM


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of the file `in/a`."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_text("text")
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"path": "a", "mode": 0o100644, "data": "text", "encoding": "utf-8"}]))
    return path


def closed(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run zarrfs as a shell does with `redirection`."""
    words = ["sh", "-c", f'exec "$@" {redirection}', "sh", PROGRAM, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_output_that_nobody_can_read_ends_it_as_a_broken_pipe_does(archive: Path) -> None:
    into = ["archive", "create", "--inline", "-C", archive.parent / "in", "."]
    for command in (["archive", "list", archive], ["ls", archive], ["cat", archive, "a"], into, ["info", archive]):
        done = closed(">&-", *command)
        assert (done.returncode, done.stdout, done.stderr) == (141, "", ""), command


def test_what_writes_nothing_works(archive: Path) -> None:
    out = archive.parent / "out"
    done = closed("<&- >&-", "archive", "extract", archive, "-C", out)
    assert (done.returncode, done.stderr, (out / "a").read_text()) == (0, "", "text")
    assert closed(">&-", "archive", "diff", "--exit-code", archive, out).returncode == 0
    done = closed("<&- 2>&-", "archive", "list", archive)
    assert (done.returncode, done.stdout) == (0, "a\n")
    assert closed("<&- >&- 2>&-", "archive", "list", archive.parent / "none.json").returncode == 1


def test_input_that_is_closed_is_named(archive: Path) -> None:
    done = closed("<&-", "archive", "list", "-")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "standard input: cannot be kept" in done.stderr
    assert "bad file descriptor" in done.stderr
    done = closed("<&-", "archive", "create", "--inline", "-C", archive.parent / "in", "--files-from", "-")
    assert (done.returncode, done.stderr) == (2, "zarrfs: --files-from -: bad file descriptor\n")
