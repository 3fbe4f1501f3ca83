"""Progress lines: which commands show one, and on which terminals."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import DATA
from zarrfs.cli import main, meter
from zarrfs.cli.refs import running

SET = DATA / "references/day0_v1.json"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "term", "quiet", "shown"),
    [
        (Terminal, "xterm", False, True), (Terminal, "dumb", False, False), (Terminal, "xterm", True, False),
        (io.StringIO, "xterm", False, False),
    ],
)  # fmt: skip
def test_a_progress_line_is_shown_only_on_a_terminal_that_can_erase_it(
    stderr: type[io.StringIO], term: str, quiet: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(meter, "_QUIET_FOR", 0.0)
    counted = threading.Event()

    def counts() -> meter.Counts:
        counted.set()
        return meter.Counts(3, 5)

    with meter.displayed(counts, quiet):
        assert counted.wait(60.0 if shown else 0.0) == shown
    said = sys.stderr.getvalue()
    assert said.endswith("\r\x1b[K") == bool(said) == shown  # the line was erased
    assert ("3 files, 5 B" in said) == shown


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the progress lines of commands, as on a terminal; the working directory has small inputs for them."""
    seen: list[str] = []

    def show(counts: Callable[[], meter.Counts], ended: threading.Event) -> None:
        ended.wait()
        seen.append(meter.line(counts(), 1.0))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meter, "_show", show)
    for module in meter, running:
        monkeypatch.setattr(module, "shows_progress", lambda: True)
    monkeypatch.setattr("zarrfs.system.terminal.shows_progress", lambda: True)
    monkeypatch.setattr(running, "_QUIET_FOR", -1.0)
    monkeypatch.setattr(running, "_LOOK", 1)
    for name in ("tree", "blocks", "changes"):
        (tmp_path / name).mkdir()
    for number in range(3):
        (tmp_path / f"tree/{number}").write_bytes(bytes(50_000))
    (tmp_path / "record").write_text('{"zarrfs": "record", "version": 1}\n["0", 0, 50000]\n["1", 0, 5]\n')
    return seen


@pytest.mark.parametrize(
    "line",
    [
        "check tree -o type=zarr", "stage --copy tree copy -o type=zarr --no-manifest",
        "archive create -C tree -O new.json --inline .", "warm tree record -o type=zarr,cache_dir=blocks",
        "commit tree -o type=zarr --upperdir changes -O new/", "cache verify --cache-dir blocks",
        "info tree -o type=zarr",
    ],
)  # fmt: skip
def test_a_command_shows_its_progress(line: str, lines: list[str]) -> None:
    ended = CliRunner().invoke(main, line.split())
    assert ended.exit_code == 0, ended.output
    assert len(lines) == 1
    assert "files" in lines[0]


@pytest.mark.parametrize("line", [f"convert {SET} new.parq", f"merge {SET} -O new.json", f"stats {SET}"])
def test_a_command_on_references_shows_its_progress(line: str, lines: list[str]) -> None:
    ended = CliRunner().invoke(main, ["refs", *line.split()])
    assert ended.exit_code == 0, ended.output
    assert " references, " in ended.stderr
