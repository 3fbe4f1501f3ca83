"""Output files and directories that users name: which may be replaced, and their atomic replacement."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROGRAM, run
from tests.references.refsets import done, entries, refs
from zarrfs import sources
from zarrfs.errors import SourceError, UsageError
from zarrfs.references.parquet_writer import ParquetWriter
from zarrfs.sources.prepare import prepare
from zarrfs.store import destination
from zarrfs.store.destination import placed

ARRAY = {"x/.zarray": '{"shape":[3],"chunks":[1]}'} | {f"x/{n}": ["/t", n, 1] for n in range(3)}


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_plan_in_child", lambda source, given, *_more: prepare(source, given))


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "set.json"
    path.write_text(json.dumps(ARRAY))
    return path


# -- indexes


def test_an_index_replaces_only_an_index_and_only_with_force(document: Path, tmp_path: Path) -> None:
    before = document.read_bytes()
    for force in [], ["--force"]:
        for command in ["index", document, "-O", document], ["refs", "convert", document, document, "--to", "index"]:
            result = run(*command, *force)
            assert (result.returncode, result.stdout) == (2, "")
            assert result.stderr == f"zarrfs: {document}: exists and is not an index: not replaced\n"
    assert document.read_bytes() == before
    index = tmp_path / "set.index"
    assert run("index", document, "-O", index).returncode == 0
    document.write_text('{"a": "b"}')
    result = run("index", document, "-O", index)
    assert (result.returncode, result.stderr) == (2, f"zarrfs: {index}: already exists; --force replaces it\n")
    assert set(entries(index)) == set(ARRAY)
    assert run("index", document, "-O", index, "--force").returncode == 0
    assert entries(index) == {"a": b"b"}
    assert sorted(os.listdir(tmp_path)) == ["set.index", "set.json"]


@pytest.mark.parametrize("spelled", ["{}", "file://{}", "local://{}"])
def test_an_index_never_replaces_its_source(spelled: str, document: Path, tmp_path: Path) -> None:
    index, link = tmp_path / "set.index", tmp_path / "link.index"
    assert run("index", document, "-O", index).returncode == 0
    os.link(index, link)
    before = index.read_bytes()
    for output in index, link:
        result = run("index", spelled.format(index), "-O", output, "--force")
        assert (result.returncode, result.stderr) == (2, f"zarrfs: {output}: is the source itself\n")
    assert index.read_bytes() == before
    assert index.samefile(link)


@pytest.mark.parametrize("name", ["out.json", "out.json.gz", "out.index", "made.index", "out.parq"])
def test_an_output_has_the_mode_of_the_umask(name: str, document: Path, tmp_path: Path) -> None:
    command = ["index", document, "-O"] if name == "made.index" else ["refs", "convert", document]
    for umask, mode in (0o077, 0o600), (0o002, 0o664):
        (tmp_path / f"{mode:o}").mkdir()
        made = tmp_path / f"{mode:o}" / name
        assert run(*command, made, preexec_fn=lambda umask=umask: os.umask(umask)).returncode == 0
        for path in made.rglob("*.parq") if made.is_dir() else [made]:
            assert path.stat().st_mode & 0o777 == mode


# -- directories


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


FOREIGN: list[tuple[str, Any]] = [
    ("data.nc", lambda path: path.write_bytes(b"data")),
    ("x/data.nc", lambda path: path.write_bytes(b"data")),
    ("x/refs.0.parq.old", lambda path: path.write_bytes(b"data")),
    ("y/refs.0.parq", lambda path: path.write_bytes(b"of no array")),
    ("refs.0.parq", lambda path: path.write_bytes(b"of no array")),
    ("y/.zmetadata", lambda path: path.write_bytes(b"of another set")),
    ("x/refs.0.parq", _link),
    ("a/link", lambda path: path.symlink_to(path.parent)),
    ("a/b/pipe", os.mkfifo),
]


@pytest.mark.parametrize(("name", "make"), FOREIGN, ids=[f"{n}-{name}" for n, (name, _) in enumerate(FOREIGN)])
def test_a_set_with_another_file_in_it_is_not_replaced(name: str, make: Any, document: Path, tmp_path: Path) -> None:
    out = tmp_path / "set.parq"
    done("convert", document, out)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    make(out / name)
    before = sorted(out.rglob("*"))
    result = refs("convert", document, out, "--force")
    assert result.exit_code == 2
    assert result.stderr == f"zarrfs: {out}: holds {name}, which is no part of the reference set: not replaced\n"
    assert sorted(out.rglob("*")) == before
    assert sorted(os.listdir(tmp_path)) == ["set.json", "set.parq"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_set_is_replaced_with_all_its_files(
    can_exchange: bool, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:  # some file systems cannot
        monkeypatch.setattr(destination, "_exchange", lambda one, other: False)
    out = tmp_path / "set.parq"
    done("convert", document, out, "--record-size", 1)
    (out / "empty" / "too").mkdir(parents=True)
    done("convert", document, out, "--record-size", 2, "--force")
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*")) == [
        ".zmetadata", "x", "x/refs.0.parq", "x/refs.1.parq",
    ]  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["set.json", "set.parq"]


def test_files_added_to_a_set_during_its_replacement_are_kept(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "set.parq"
    done("convert", document, out)
    rename = destination._rename

    def late(new: str, path: str, old: str) -> None:
        (out / "late").write_text("late")
        rename(new, path, old)

    monkeypatch.setattr(destination, "_rename", late)
    result = refs("convert", document, out, "--force")
    assert result.exit_code == 1
    (kept,) = tmp_path.glob(".set.parq.*.tmp/old")
    assert str(kept) in result.stderr
    assert [path.name for path in kept.rglob("*")] == ["late"]
    assert set(entries(out)) == {*ARRAY, ".zmetadata"}


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_kill_at_any_rename_leaves_the_old_set_or_the_new_one(document: Path, tmp_path: Path) -> None:
    out = tmp_path / "set.parq"
    done("convert", document, out)
    count = 0
    for count in range(1, 20):
        inject = f"inject=rename,renameat,renameat2:signal=KILL:when={count}"
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", inject, PROGRAM, "refs", "convert", document, out]
        ended = subprocess.run([*command, "--force"], capture_output=True)
        assert set(entries(out)) == {*ARRAY, ".zmetadata"}
        if ended.returncode == 0:
            break
    assert 2 < count < 19


def test_two_names_are_exchanged_atomically(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert destination._exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [os.listdir(tmp_path / name) for name in "ab"] == [["b"], ["a"]]
    assert not destination._exchange(str(tmp_path / "a"), str(tmp_path / "none"))


def test_an_output_name_may_have_255_bytes(document: Path, tmp_path: Path) -> None:
    done("convert", document, tmp_path / ("é" * 125 + ".json"))
    assert os.listdir(tmp_path) != []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")

    def write() -> None:
        with placed(str(tmp_path / "a.json"), "json", True) as place:
            Path(place.new).write_text("new")
            raise OSError(28, os.strerror(28))

    with pytest.raises(SourceError, match=r"a\.json: cannot be written: No space"):
        write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


@pytest.mark.parametrize("function", ["os.mkdir", "zarrfs.store.destination.lock"])
def test_ctrl_c_while_the_temporary_directory_is_made_leaves_nothing(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = function.rpartition(".")
    before = getattr(sys.modules[module], name)

    def interrupted(*arguments: Any) -> None:
        before(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(function, interrupted)
    with pytest.raises(KeyboardInterrupt), placed(str(tmp_path / "out.json"), "json", replace=False):
        raise AssertionError("not reached")
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_command_are_removed_by_the_next(tmp_path: Path) -> None:
    """Kept are the output of a running command, directories of others, and old files kept aside by an exchange."""
    shown = str(tmp_path / "a[1].json")

    def write(text: str) -> None:
        with placed(shown, "archive", True) as place:
            Path(place.new).write_text(text)

    with placed(shown, "archive", True) as place:
        Path(place.new).write_text("living")
        living = set(os.listdir(tmp_path))
        abandoned, put_away = (tmp_path / f".a[1].json.{index * 16}.tmp" for index in "ab")
        others = [tmp_path / f".b.json.{'a' * 16}.tmp", tmp_path / f".a1.json.{'a' * 16}.tmp"]
        others += [tmp_path / f".a[1].json.{index * 16}.tmp" for index in "de"]  # not as zarrfs makes them
        for path in (abandoned, put_away, *others):
            path.mkdir(0o700)
            (path / "new").write_text("half")
        (others[-2] / "thesis").mkdir()
        others[-1].chmod(0o755)
        (put_away / "old").mkdir()
        (tmp_path / f".a[1].json.{'c' * 16}.tmp").symlink_to(others[0])
        write("other")
        left = {path.name for path in (put_away, *others)} | {f".a[1].json.{'c' * 16}.tmp", "a[1].json"}
        assert set(os.listdir(tmp_path)) == left | living
        assert Path(shown).read_text() == "other"
    assert Path(shown).read_text() == "living"
    assert set(os.listdir(tmp_path)) == left


def test_leftovers_of_a_killed_command_that_wrote_parquet_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "set.parq"
    child = os.fork()
    if not child:
        with placed(str(out), "parquet", False) as place, ParquetWriter(place.new):
            os._exit(0)  # as after SIGKILL, nothing is cleaned up
    assert os.waitpid(child, 0)[1] == 0
    assert len(os.listdir(tmp_path)) == 1
    with placed(str(out), "parquet", False) as place, ParquetWriter(place.new) as writer:
        writer.commit()
    assert os.listdir(tmp_path) == ["set.parq"]


@pytest.mark.skipif(os.geteuid() != 0, reason="names another user")
def test_leftovers_of_another_user_are_kept(tmp_path: Path) -> None:
    left = tmp_path / f".a.json.{'a' * 16}.tmp"
    left.mkdir()
    os.chown(left, 65534, 65534)
    with placed(str(tmp_path / "a.json"), "archive", True) as place:
        Path(place.new).write_text("text")
    assert left.exists()


def test_a_file_created_while_a_command_writes_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write() -> None:
        with placed(str(out), "archive", False) as place:
            Path(place.new).write_text("of the command")
            out.write_text("of another program")

    with pytest.raises(UsageError, match=f"^{out}: "):
        write()
    assert out.read_text() == "of another program"
    assert os.listdir(tmp_path) == ["out"]
