"""The commands that need no mount: their output, their exit statuses and their imports."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.conftest import DATA, PROGRAM
from tests.copying.test_check import Targets
from zarrfs import sources
from zarrfs.cli import main
from zarrfs.config import options
from zarrfs.errors import NotFound, SourceError, UsageError
from zarrfs.store.index import IndexStore
from zarrfs.store.indexfile import IndexWriter, Region

MTIME = 1_700_000_000 * 10**9


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[options.Options]:
    """Make every source open as the same small tree; return a list of the options it is opened with."""
    path, seen = str(tmp_path / "index"), []
    with IndexWriter(path) as writer:
        writer.inline("a/hello", b"hello\n", 0o4755, MTIME)
        writer.range("a/range", "data", 100, 5_000_000)
        writer.range("a/zgone", "missing", 0, 5)
        writer.symlink("link", "a/hello", MTIME)
        writer.symlink("out", "/etc")
        writer.whole("whole", "data")
        writer.regions("sparse", 20, [Region(10, 5, "data", 7)])
        writer.inline("tab\tname", b"")
        writer.commit()

    def open_plan(plan: sources.Plan, given: options.Options) -> IndexStore:
        seen.append(given)
        return IndexStore(path, Targets())

    plan = sources.Plan("refs.json", "references", index=path, base="/d/", warnings=("odd: left out",))
    monkeypatch.setattr(sources, "plan_source", lambda *given, **more: plan)
    monkeypatch.setattr(sources, "open_plan", open_plan)
    return seen


def zarrfs(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


# -- ls


def test_ls_shows_names(opened: list[Any]) -> None:
    result = zarrfs("ls", "refs.json")
    assert (result.exit_code, result.stdout.splitlines()) == (0, ["a", "link", "out", "sparse", r"tab\tname", "whole"])
    assert result.stderr == "zarrfs: warning: odd: left out\n"
    assert zarrfs("ls", "-q", "refs.json").stderr == ""


def test_ls_of_a_directory_of_a_file_and_recursively(opened: list[Any]) -> None:
    assert zarrfs("ls", "refs.json", "/a/").stdout == "hello\nrange\nzgone\n"
    assert zarrfs("ls", "refs.json", "a/hello").stdout == "a/hello\n"
    assert zarrfs("ls", "-R", "refs.json").stdout.splitlines()[:3] == ["a", "a/hello", "a/range"]


def test_ls_long_shows_modes_sizes_times_and_targets(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    import time

    time.tzset()
    lines = zarrfs("ls", "-lR", "refs.json").stdout.splitlines()
    assert lines[0] == "dr-xr-xr-x            0 -                   a"
    assert lines[1] == "-rwsr-xr-x            6 2023-11-14 22:13:20 a/hello"
    assert lines[4] == "lrwxrwxrwx            7 2023-11-14 22:13:20 link -> a/hello"
    assert lines[-1] == "-r--r--r--           10 -                   whole"


def test_ls_json_writes_an_object_for_each_entry(opened: list[Any]) -> None:
    entries = [json.loads(line) for line in zarrfs("ls", "-R", "--json", "refs.json").stdout.splitlines()]
    assert entries[1] == {
        "key": "a/hello", "kind": "file", "size": 6, "mode": "4755", "mtime_ns": MTIME, "target": None,
    }  # fmt: skip
    assert entries[-1]["size"] is None
    entries = [json.loads(line) for line in zarrfs("ls", "-l", "--json", "refs.json").stdout.splitlines()]
    assert entries[-1]["size"] == 10


def test_ls_names_a_file_whose_size_cannot_be_determined(tmp_path: Path, opened: list[Any]) -> None:
    os.unlink(tmp_path / "index")
    with IndexWriter(str(tmp_path / "index")) as writer:
        writer.whole("gone", "missing")
        writer.commit()
    result = zarrfs("ls", "-l", "refs.json")
    assert result.exit_code == 1
    assert result.stdout.split()[1] == "?"
    assert "missing: as its name says" in result.stderr


@pytest.mark.parametrize("command", ["ls", "info", "check"])
def test_a_missing_or_broken_source_is_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    for source in (tmp_path / "nothing", tmp_path / "x.json"):
        result = zarrfs(command, str(source))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert result.stderr.startswith(f"zarrfs: {source}: ")


@pytest.mark.parametrize(
    ("key", "says"), [("nope", "nope: no such key"), ("a/../b", "not a key: a part '..'")]
)
def test_a_bad_key_is_one_line_and_status_1(key: str, says: str, opened: list[Any]) -> None:
    for command in ("ls", "info", "check", "cat"):
        result = zarrfs("-q", command, "refs.json", key)
        assert (result.exit_code, result.stdout) == (1, ""), command
        assert says in result.stderr
        assert result.stderr.count("\n") == 1


# -- cat, info, check


def test_cat_writes_whole_values_and_ranges(opened: list[Any]) -> None:
    assert zarrfs("cat", "refs.json", "a/hello", "link").stdout_bytes == b"hello\nhello\n"
    assert zarrfs("cat", "refs.json", "a/range").stdout_bytes == bytes(5_000_000)
    assert zarrfs("cat", "--range", "1:3", "refs.json", "a/hello").stdout_bytes == b"ell"
    assert zarrfs("cat", "--range", "4:", "refs.json", "a/hello").stdout_bytes == b"o\n"


@pytest.mark.parametrize(
    ("key", "says"),
    [("a", "a: is a directory"), ("out", "leads out of the source"), ("a/zgone", "missing: as its name says"),
     ("a/hello/x", "a/hello: is not a directory")],
)  # fmt: skip
def test_cat_of_an_unreadable_key_is_an_error(key: str, says: str, opened: list[Any]) -> None:
    result = zarrfs("cat", "refs.json", key)
    assert result.exit_code == 1
    assert says in result.stderr


@pytest.mark.parametrize("extent", ["5", ":5", "a:b", "-1:2", "1:2:3"])
def test_cat_of_a_bad_range_is_a_usage_error(extent: str) -> None:
    result = zarrfs("cat", "--range", extent, "refs.json", "a")
    assert result.exit_code == 2
    assert "START:LENGTH" in result.stderr


def test_info_of_a_source_counts_files_and_bytes(opened: list[Any], tmp_path: Path) -> None:
    about = json.loads(zarrfs("info", "--json", "refs.json").stdout)
    del about["unversioned"]  # servers that other tests of this process have used
    assert about == {
        "source": "refs.json", "kind": "references", "where": None, "base": "/d/",
        "index": str(tmp_path / "index"), "warnings": ["odd: left out"], "files": 6, "bytes": 5_000_016,
        "broken": 0, "problems": [],
    }  # fmt: skip
    text = zarrfs("info", "refs.json").stdout
    assert "kind:      references\n" in text
    assert "bytes:     5,000,016 (4.8 MiB)\n" in text
    assert "warnings:  1\n  odd: left out\n" in text
    assert "problems" not in text


def test_info_of_an_entry_shows_where_its_bytes_are(opened: list[Any]) -> None:
    about = json.loads(zarrfs("info", "--json", "refs.json", "a/range").stdout)
    assert about["kind"] == "file"
    assert (about["url"], about["offset"], about["length"]) == ("file:///data", 100, 5_000_000)
    assert "inline:    6 (6 B)\n" in zarrfs("info", "refs.json", "a/hello").stdout
    assert json.loads(zarrfs("info", "--json", "refs.json", "").stdout)["kind"] == "directory"
    assert "regions:   1\n  5 bytes at 10: file:///data from 7\n" in zarrfs("info", "refs.json", "sparse").stdout


def test_check_counts_and_lists_bad_entries(opened: list[Any]) -> None:
    result = zarrfs("check", "refs.json")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "ok                       5  4.8 MiB read",
        "missing                  1",
        "links                    2  0 lead nowhere",
        "missing: a/zgone: missing: as its name says",
    ]
    assert zarrfs("check", "refs.json", "a/hello").exit_code == 0
    about = json.loads(zarrfs("check", "--json", "refs.json").stdout)
    assert (about["clean"], about["ok"], about["missing"], about["wrong_hash"]) == (False, 5, 1, 0)
    assert about["bad"] == [
        {"key": "a/zgone", "kind": "missing", "url": "missing", "reason": "as its name says"}
    ]
    assert "and 1 more" in zarrfs("check", "-n", "0", "refs.json").stdout


# -- options and errors


def test_options_reach_the_source(opened: list[Any]) -> None:
    said = ["-o", r"guard,base=/x\,y", "-o", "retries=7", "-o", "blobs=/a", "--blobs", "/b,c"]
    assert zarrfs("ls", "refs.json", *said).exit_code == 0
    (given,) = opened
    assert (given.guard, given.base, given.retries, given.blobs) == (True, "/x,y", 7, ("/a", "/b,c"))
    assert given.log_level == "warning"


def test_a_long_option_wins_over_the_same_in_o(opened: list[Any]) -> None:
    zarrfs("ls", "--upperdir", "/a", "refs.json", "-o", "upperdir=/b")
    assert opened[0].upperdir == "/a"


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("ls refs.json -o worker=4", "'worker'"), ("ls refs.json -o metadata_tl=4", "metadata_ttl"),
        ("info refs.json --metadata-ttl 5s", "-o metadata_ttl=TIME"), ("mount a b --allow-other", "-o allow_other"),
    ],
)  # fmt: skip
def test_an_unknown_option_gets_one_line_of_advice(arguments: str, advice: str) -> None:
    result = zarrfs(*arguments.split())
    assert (result.exit_code, advice in result.stderr.splitlines()[-1]) == (2, True), result.stderr


@pytest.mark.parametrize("arguments", [("-d", "ls"), ("ls", "-d"), ("ls", "-o", "log_level=debug")])
def test_verbosity_options_work_before_and_after_the_command(arguments: tuple[str, ...], opened: list[Any]) -> None:
    assert zarrfs(*arguments, "refs.json").exit_code == 0
    assert opened[0].log_level == "debug"


def wrapped(exc: BaseException) -> RuntimeError:
    """Return the error that type() raises if an attribute's __set_name__ raises `exc`."""
    error = RuntimeError("in __set_name__")
    error.__cause__ = exc
    return error


@pytest.mark.parametrize(
    ("exc", "status", "says"),
    [
        (SourceError("s.json", "not JSON", "x"), 1, "zarrfs: s.json: x: not JSON\n"),
        (NotFound("k"), 1, "zarrfs: k: no such key\n"),
        (UsageError("no"), 2, "zarrfs: no\n"),
        (KeyboardInterrupt(), 130, ""),
        (ExceptionGroup("g", [ExceptionGroup("g", [NotFound("k")])]), 1, "zarrfs: k: no such key\n"),
        (BaseExceptionGroup("g", [NotFound("k"), KeyboardInterrupt()]), 130, ""),
        (KeyError("x"), 1, "zarrfs: internal error: KeyError: 'x' (-d shows where)\n"),
        (wrapped(KeyboardInterrupt()), 130, ""),
        (wrapped(KeyError("x")), 1, "zarrfs: internal error: RuntimeError: in __set_name__ (-d shows where)\n"),
    ],
)
def test_an_error_is_one_line_with_its_status(
    exc: BaseException, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **more: object) -> None:
        raise exc

    monkeypatch.setattr(sources, "plan_source", fail)
    result = zarrfs("ls", "s.json")
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", says)
    debug = zarrfs("-d", "ls", "s.json")
    assert debug.exit_code == status
    assert ("Traceback" in debug.stderr) == (status != 130)


def test_help_imports_no_large_module() -> None:
    code = (
        "import sys\nfrom zarrfs.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('trio', 'pyfuse3', 'fsspec', 'jinja2', 'aiohttp', 'numpy', 'sqlite3', 'orjson')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")
    assert "mount " in done.stdout


@pytest.mark.parametrize(("command", "near"), [("mout", " (did you mean mount?)"), ("xyzzy", "")])
def test_a_mistyped_command_is_answered_with_the_nearest(command: str, near: str) -> None:
    result = zarrfs(command)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"Error: No such command '{command}'{near}")
    assert zarrfs("-V").stdout.startswith("zarrfs 0.")


def test_ls_ends_with_status_141_when_its_pipe_is_closed(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for number in range(1000):
        (tmp_path / "s" / f"{number:0200}").touch()
    command = f"set -o pipefail; {PROGRAM} ls {tmp_path}/s | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (141, f"{0:0200}\n", "")


# -- sample data


def test_reference_sets_check_clean_and_cat_as_recorded(references: Path) -> None:
    name = "templated_v1"
    expected = json.loads((DATA / "references/expected.json").read_text())[name]
    document = str(references / f"{name}.json")
    about = json.loads(zarrfs("check", "--json", document).stdout)
    assert (about["clean"], about["ok"]) == (True, len(expected))
    assert about["bytes_read"] == sum(entry["size"] for entry in expected.values())
    entries = [json.loads(line) for line in zarrfs("ls", "-R", "-l", "--json", document).stdout.splitlines()]
    assert {e["key"]: e["size"] for e in entries if e["kind"] == "file"} == {
        key: entry["size"] for key, entry in expected.items()
    }
    done = subprocess.run([PROGRAM, "cat", document, *expected], capture_output=True, check=True)
    at = 0
    for key, entry in expected.items():
        piece, at = done.stdout[at : at + entry["size"]], at + entry["size"]
        assert hashlib.sha256(piece).hexdigest() == entry["sha256"], key
    assert at == len(done.stdout)
