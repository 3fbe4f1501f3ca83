"""zarrfs diff: list the changes of an upper directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.copying.mergedtrees import changed_source
from zarrfs.cli import main


def diff(place: Path, *more: str) -> Result:
    arguments = ["diff", place / "source", "--upperdir", place / "upper", *more]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    changed_source(tmp_path, "archive")
    return tmp_path


def test_diff_prints_a_letter_and_a_key_in_key_order(place: Path) -> None:
    result = diff(place)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "M a/b", "M a/c", "D d", "A empty", "D f", "A f", "A f/new", "M g", "A link\\x1b", "A n", "A n/日 b",
    ]  # fmt: skip
    assert result.stderr == ""


def test_json_output_is_one_document(place: Path) -> None:
    found = json.loads(diff(place, "--json").stdout)
    assert [(entry["kind"], entry["key"], entry["type"]) for entry in found] == [
        ("changed", "a/b", "file"), ("changed", "a/c", "file"), ("deleted", "d", None),
        ("added", "empty", "directory"), ("deleted", "f", None), ("added", "f", "directory"),
        ("added", "f/new", "file"), ("changed", "g", "directory"), ("added", "link\x1b", "symlink"),
        ("added", "n", "directory"), ("added", "n/日 b", "file"),
    ]  # fmt: skip
    status = (place / "upper/a/b").stat()
    assert found[0] | {"mode": "0640"} == {
        "kind": "changed", "key": "a/b", "type": "file", "size": 7, "mode": "0640", "mtime_ns": status.st_mtime_ns
    }  # fmt: skip
    assert found[0]["mode"] == f"{status.st_mode & 0o7777:04o}"
    assert found[2] == {"kind": "deleted", "key": "d", "type": None, "size": None, "mode": None, "mtime_ns": None}


def test_exit_code_sets_the_status_if_there_are_differences(place: Path) -> None:
    assert diff(place, "--exit-code").exit_code == 1
    shutil.rmtree(place / "upper")
    (place / "upper").mkdir()
    for more in ([], ["--exit-code"]):
        result = diff(place, *more)
        assert (result.exit_code, result.output) == (0, "")
    assert json.loads(diff(place, "--json").stdout) == []
    (place / "source").rename(place / "other")
    assert (diff(place).exit_code, diff(place, "--exit-code").exit_code) == (1, 2)


def test_a_missing_upper_directory_is_an_error(place: Path) -> None:
    for command in (["diff", "x"], ["commit", "x", "-O", "y.zip"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 2
        assert result.stderr.startswith("zarrfs: --upperdir: ")
    result = CliRunner().invoke(main, ["diff", str(place / "source"), "--upperdir", str(place / "none")])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "no such file or directory" in result.stderr
