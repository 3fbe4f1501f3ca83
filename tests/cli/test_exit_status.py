"""Exit statuses: each row of the table in zarrfs/cli/exit_status.py is tested, here or in another file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import run
from zarrfs.cli import main
from zarrfs.cli.exit_status import TABLE

GOOD, BAD, UPPER = "good.json", "bad.json", "changes"
DIFFS = ("diff --exit-code", "archive diff --exit-code")
# (status, commands, first word of the meaning): command lines, or the file that tests the row
ROWS: dict[tuple[str, tuple[str, ...], str], list[str] | str] = {
    ("0", (), "success"): [f"ls {GOOD}", f"cat {GOOD} a", f"archive list {GOOD}", f"archive diff {GOOD} tree"],
    ("1", (), "failure:"): ["ls missing.json", f"cat {GOOD} missing", "archive verify missing.json", "umount ."],
    ("1", ("check", "doctor", "warm", "cache verify", "archive verify", "refs validate"), "something"): [
        f"check {BAD}", f"archive verify {BAD}", "refs validate wrong.json",
    ],
    ("1", ("archive extract", "stage", "stage-out"), "with"): [f"archive extract --keep-going {BAD} -C out"],
    ("1", ("archive extract", "archive list", "stage"), "a"): [
        f"archive list {GOOD} nothing", f"archive extract {GOOD} nothing -C out",
    ],
    ("1", ("unstage",), "something"): "tests/jobs/test_unstage.py",
    ("1", ("refresh",), "nothing"): "tests/mounts/test_refresh.py",
    ("1", DIFFS, "there"): [f"archive diff --exit-code {GOOD} other.json"],
    ("2", (), "a"): [f"ls {GOOD} --view nothing", f"ls {GOOD} --nothing", "archive nothing", f"ls {GOOD} -o nothing"],
    ("2", DIFFS, "failure"): [f"archive diff --exit-code {GOOD} missing", f"diff --exit-code missing {UPPER}"],
    ("124", ("stage",), "not"): "tests/sources/test_child_endings.py",
    ("125", ("run",), "SOURCE"): ["run missing.json -- true"],
    ("126", ("run",), "COMMAND"): "tests/mounts/test_stage_run.py",
    ("127", ("run",), "there"): "tests/mounts/test_stage_run.py",
    ("other", ("run",), "that"): "tests/mounts/test_stage_run.py",
    ("130", (), "interrupted"): "tests/sources/test_child_endings.py",
    ("141", (), "the"): "tests/cli/test_streams.py",
}  # fmt: skip
ENTRY = '{"path": "%s", "mode": 33188, "mtime": 1, "encoding": "utf-8", "data": "%s"}'
HOLE = '{"path": "b", "mode": 33188, "mtime": 1, "size": 4, "encoding": "blobvec", "data": [[0, 4, "sha1-%s"]]}'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a good archive, one with other bytes, one that lacks a blob, and an invalid reference set."""
    monkeypatch.chdir(tmp_path)
    Path(GOOD).write_text(f"[{ENTRY % ('a', 'text')}]")
    Path("other.json").write_text(f"[{ENTRY % ('a', 'words')}]")
    Path(BAD).write_text(f"[{ENTRY % ('a', 'text')}, {HOLE % ('0' * 40)}]")
    Path("wrong.json").write_text('{"version": 1, "refs": {"a": ["u", -1, 5]}}')
    for name in ("tree", UPPER):
        Path(name).mkdir()
    run("archive", "extract", GOOD, "-C", "tree", cwd=tmp_path)


def test_each_row_of_the_table_is_covered() -> None:
    assert list(ROWS) == [(row.status, row.commands, row.meaning.split()[0]) for row in TABLE]
    for row in ROWS.values():
        assert not isinstance(row, str) or Path(__file__).parents[2].joinpath(row).exists()


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("line", "status"),
    [(line, int(row[0])) for row, lines in ROWS.items() if isinstance(lines, list) for line in lines],
)
def test_a_command_ends_with_its_status(line: str, status: int) -> None:
    ended = CliRunner().invoke(main, line.split())
    assert ended.exit_code == status, ended.output
    assert bool(ended.stderr) == (status != 0 and "refs validate" not in line and "good.json other" not in line)


ENDED = """import os, signal
from zarrfs.__main__ import program
from zarrfs.store import destination
destination._sync_all = lambda path: os.kill(os.getpid(), signal.SIGTERM)
program()"""


@pytest.mark.parametrize("line", ["index -O new/x", "info --html new/x", "check --report new/x"])
def test_a_command_that_writes_a_file_is_interrupted_by_sigterm_and_leaves_nothing(line: str, tmp_path: Path) -> None:
    """The signal arrives when the temporary file is complete and not yet renamed."""
    (tmp_path / "new").mkdir()
    (tmp_path / "set.json").write_text('{"version": 1, "refs": {".zgroup": "{\\"zarr_format\\": 2}"}}')
    command = [sys.executable, "-c", ENDED, *line.split(), "set.json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (130, b"")
    assert os.listdir(tmp_path / "new") == []
