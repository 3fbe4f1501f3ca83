"""zarrfs index, zarrfs cache and indexes as sources: a damaged index is never trusted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import PROGRAM, run
from tests.references.referencesets import compiled
from tests.servers import Nginx
from zarrfs import sources
from zarrfs.cli import main
from zarrfs.config.options import Options
from zarrfs.documents.document import Document
from zarrfs.errors import SourceError
from zarrfs.sources import open_source
from zarrfs.sources.prepare import prepare
from zarrfs.store.indexfile import IndexWriter, first_fault
from zarrfs.system import beneath

PAGE = 4096
COUNT = 3000
COPIED = "kind, size, mode, mtime_ns, place, 2, start, held"  # the columns of a second entry for the directory v


def a_set(path: Path, count: int = COUNT) -> Path:
    refs = {f"v/{number % 7}.{number}": ["data.bin", number, 1] for number in range(count)}
    path.write_text(json.dumps({"version": 1, "refs": {".zgroup": '{"zarr_format":2}', **refs, "long": "x" * 20_000}}))
    (path.parent / "data.bin").write_bytes(bytes(number % 251 for number in range(count)))
    return path


Age = Callable[[Path], None]


@pytest.fixture
def age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Age:
    """Return a function that waits until stat(2) would show a change: one clock tick of the file system suffices."""
    monkeypatch.setattr("zarrfs.documents.document._SETTLED_NS", 0)
    tick = tmp_path / "tick"

    def aged(path: Path) -> None:
        tick.touch()
        while tick.stat().st_ctime_ns <= path.stat().st_ctime_ns:
            time.sleep(0.001)
            tick.touch()

    return aged


def content(source: object, **options: object) -> dict[str, bytes]:
    """Return every key with its bytes."""

    async def read() -> dict[str, bytes]:
        try:
            return {key: bytes(await store.get(key)) async for key in store.list_prefix("")}
        finally:
            await store.aclose()

    store = open_source(str(source), Options(**options), child=False)  # type: ignore[arg-type]
    return trio.run(read)


def test_targets_are_found_in_directories_of_unusual_names(tmp_path: Path) -> None:
    for name in "profile:1", "a::b", "x#?%20":
        (tmp_path / name).mkdir()
        expected = content(a_set(tmp_path / name / "refs.json"))
        os.replace(tmp_path / name / "refs.json", tmp_path / "refs.json")
        assert content(tmp_path / "refs.json", base=f"{tmp_path}/{name}") == expected
    assert content(tmp_path / "refs.json", base=f"file:{tmp_path}/profile:1") == expected


# -- an index as a source


def test_an_index_is_a_source(tmp_path: Path) -> None:
    document = a_set(tmp_path / "refs.json")
    expected = content(document, index_dir=str(tmp_path / "kept"))
    done = run("index", document, "-O", tmp_path / "refs.index", "--index-dir", tmp_path / "kept")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/refs.index\n"), done.stderr
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    shutil.move(tmp_path / "refs.index", elsewhere / "moved")  # neither its name nor its directory identifies an index
    document.unlink()
    assert content(elsewhere / "moved") == expected
    shutil.copy(tmp_path / "data.bin", elsewhere)
    (tmp_path / "data.bin").unlink()
    assert content(elsewhere / "moved", base=str(elsewhere)) == expected
    info = json.loads(run("info", "--json", elsewhere / "moved").stdout)
    assert (info["kind"], info["base"], info["files"]) == ("references", f"{tmp_path}/", COUNT + 2)


def test_an_index_does_not_include_changes(tmp_path: Path) -> None:
    """With -O, --upperdir is refused; an upper directory that zarrfs.toml sets for mounts is ignored."""
    document, new = a_set(tmp_path / "refs.json", 20), tmp_path / "new.index"
    (tmp_path / "changes").mkdir()
    config = tmp_path / "zarrfs.toml"
    config.write_text(f'[source.rain]\nsource = "{document}"\nupperdir = "{tmp_path}/changes"\n')
    for option in ["--upperdir", f"{tmp_path}/changes"], ["-o", f"retries=1,upperdir={tmp_path}/changes"]:
        refused = CliRunner().invoke(main, ["index", str(document), *option, "-O", str(new)])
        assert (refused.exit_code, new.exists()) == (2, False)
        assert "--upperdir: an index is of SOURCE alone; zarrfs commit -O NEW.index" in refused.stderr
        cached = CliRunner().invoke(main, ["index", str(document), *option])
        assert cached.exit_code == 0, cached.stderr
    made = CliRunner().invoke(main, ["index", "rain", "--config", str(config), "-O", str(new)])
    assert (made.exit_code, made.stdout) == (0, f"{new}\n"), made.stderr


def test_an_index_behind_a_url(nginx: Nginx, tmp_path: Path) -> None:
    a_set(nginx.plain.root / "far.json", 20)
    done = run("index", f"{nginx.plain.url}/far.json", "-O", nginx.plain.root / "far.index")
    assert done.returncode == 0, done.stderr
    (nginx.plain.root / "sub").mkdir()
    shutil.copy(nginx.plain.root / "far.index", nginx.plain.root / "sub" / "far")
    expected = content(f"{nginx.plain.url}/far.json", index_dir=str(tmp_path))
    assert content(f"{nginx.plain.url}/sub/far", index_dir=str(tmp_path)) == expected
    assert content(nginx.plain.root / "far.index") == expected


def test_a_copied_index_from_the_network_keeps_its_limits(nginx: Nginx, tmp_path: Path) -> None:
    """A local copy of the index of a set from the network may reach no more than the set itself."""
    (nginx.plain.root / "reach.json").write_text(json.dumps({"version": 1, "refs": {"k": [f"file://{__file__}"]}}))
    run("index", f"{nginx.plain.url}/reach.json", "-O", tmp_path / "reach.index")
    done = run("cat", tmp_path / "reach.index", "k")
    assert done.returncode == 1
    assert "allow" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("base", ["file://{directory}/", "{directory}/", "memory://x/", "http://127.0.0.2:9/"])
def test_the_base_in_an_index_from_the_network_is_not_trusted(base: str, nginx: Nginx, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (nginx.plain.root / "secret").write_text("public")
    (nginx.plain.root / "evil.json").write_text(json.dumps({"version": 1, "refs": {"k": ["secret", 0, 6]}}))
    index = nginx.plain.root / "evil.index"
    index.unlink(missing_ok=True)
    assert run("index", f"{nginx.plain.url}/evil.json", "-O", index).returncode == 0
    with sqlite3.connect(index) as db:
        db.execute("UPDATE meta SET value=? WHERE name='base'", (base.format(directory=tmp_path),))
        db.execute("UPDATE meta SET value='' WHERE name='origin'")
    db.close()
    done = run("cat", f"{nginx.plain.url}/evil.index", "k", "-o", "retries=0")
    assert done.stdout == "public", done.stderr


@pytest.mark.parametrize("where", ["file", "kept"])
def test_an_index_cut_at_every_page(where: str, tmp_path: Path, age: Age) -> None:
    document, kept = a_set(tmp_path / "refs.json"), tmp_path / "kept"
    age(document)
    expected = content(document, index_dir=str(kept))
    content(document, index_dir=str(kept))
    assert len(list(kept.glob("*.known"))) == 1
    (whole,) = kept.glob("*.index")
    data = whole.read_bytes()
    assert len(data) > 20 * PAGE
    for size in range(0, len(data), PAGE):
        if where == "file":
            (tmp_path / "cut.index").write_bytes(data[:size])
            with pytest.raises(SourceError, match=r"cut\.index: (not|neither)"):
                prepare(str(tmp_path / "cut.index"), Options(index_dir=str(kept)))
        else:
            (path,) = kept.glob("*.index")
            path.write_bytes(data[:size])
            made = prepare(str(document), Options(index_dir=str(kept)))
            assert made.index is not None
            assert Path(made.index).read_bytes() == data
    if where == "kept":
        assert content(document, index_dir=str(kept)) == expected


def test_a_cached_index_with_a_damaged_page_is_replaced(tmp_path: Path, age: Age) -> None:
    document, kept = a_set(tmp_path / "refs.json"), tmp_path / "kept"
    age(document)
    made = prepare(str(document), Options(index_dir=str(kept)))
    assert made.index is not None
    data = Path(made.index).read_bytes()
    for at in range(PAGE // 2, len(data), PAGE):
        with open(made.index, "r+b") as file:
            file.seek(at)
            file.write(bytes(byte ^ 0xFF for byte in data[at : at + 64]))
        assert prepare(str(document), Options(index_dir=str(kept))) == made
        assert Path(made.index).read_bytes() == data


def test_files_that_only_look_like_an_index_are_refused(tmp_path: Path) -> None:
    index = tmp_path / "refs.index"
    assert run("index", a_set(tmp_path / "refs.json", 5), "-O", index).returncode == 0
    for number, statement in enumerate(
        (
            "PRAGMA user_version=99",
            "PRAGMA application_id=7",
            "CREATE VIEW more AS SELECT * FROM entry",
            "CREATE TRIGGER t AFTER INSERT ON meta BEGIN SELECT 1; END",
            "DROP TABLE problem",
            "DELETE FROM meta",
            "UPDATE meta SET value='zarr' WHERE name='kind'",
            "UPDATE meta SET value='{' WHERE name='warnings'",
        )
    ):
        bad = tmp_path / f"bad{number}"
        shutil.copy(index, bad)
        with sqlite3.connect(bad) as db:
            db.execute(statement)
        db.close()
        done = run("ls", bad)
        assert (done.returncode, done.stdout) == (1, ""), statement
        assert done.stderr.startswith(f"zarrfs: {bad}: not a"), done.stderr
        assert done.stderr.count("\n") == 1


def test_an_index_whose_directory_contains_itself(tmp_path: Path) -> None:
    index = tmp_path / "refs.index"
    assert run("index", a_set(tmp_path / "refs.json", 5), "-O", index).returncode == 0
    with sqlite3.connect(index) as db:
        db.execute("INSERT INTO entry SELECT 2, 'again', kind, size, mode, mtime_ns, place, 2, start, held FROM entry "
                   "WHERE name='v'")  # fmt: skip
    db.close()
    for command in ["ls", "-R", index], ["ls", index, "v/again"], ["refs", "expand", index]:
        done = run(*command)
        assert done.returncode == 1
        assert "contains itself" in done.stderr


def test_a_source_read_in_place_has_no_index(tmp_path: Path) -> None:
    (tmp_path / ".zgroup").write_text("{}")
    done = run("index", tmp_path)
    assert done.returncode == 1
    assert "read in place" in done.stderr


# -- the cache directory


def test_a_document_that_changes_is_read_again(tmp_path: Path, age: Age) -> None:
    document, kept = tmp_path / "refs.json", str(tmp_path / "kept")
    document.write_text('{"a": "old"}')
    age(document)
    for _ in range(2):
        assert content(document, index_dir=kept) == {"a": b"old"}
    times = document.stat()
    document.write_text('{"a": "new"}')  # the same size,
    os.utime(document, ns=(times.st_atime_ns, times.st_mtime_ns))  # and the same modification time
    assert content(document, index_dir=kept) == {"a": b"new"}


def test_a_document_on_a_file_system_without_ctime_is_read_again(
    tmp_path: Path, age: Age, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an image that is mounted in place of another may have the same inode and times
    document, kept = tmp_path / "refs.json", str(tmp_path / "kept")
    document.write_text('{"a": "old"}')
    age(document)
    monkeypatch.setattr(Document, "stamp", lambda _: "the same")
    monkeypatch.setattr(beneath, "_file_system", lambda _: 0x73717368)  # squashfs
    assert content(document, index_dir=kept) == {"a": b"old"}
    document.write_text('{"a": "new"}')
    age(document)
    assert content(document, index_dir=kept) == {"a": b"new"}


def test_a_document_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, options = tmp_path / "refs.json", Options(index_dir=str(tmp_path / "kept"))
    document.write_text('{"a": "old"}')
    write = sources.prepare._write

    def change(*arguments: object) -> dict[str, str]:
        document.write_text('{"a": "new"}')
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sources.prepare, "_write", change)
    with pytest.raises(SourceError, match="changes while it is read"):
        prepare(str(document), options)
    monkeypatch.undo()
    document.write_text('{"a": "old"}')
    assert content(document, index_dir=str(tmp_path / "kept")) == {"a": b"old"}


def test_a_killed_writer_does_not_disturb_another_one(tmp_path: Path) -> None:
    document, kept = a_set(tmp_path / "refs.json", 200_000), tmp_path / "kept"
    command = [PROGRAM, "index", str(document), "--index-dir", str(kept)]
    with subprocess.Popen(command, start_new_session=True) as killed, subprocess.Popen(command) as other:
        while not list(kept.glob(".zarrfs-*.tmp")):
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
        assert other.wait(100) == 0
    assert killed.returncode == -signal.SIGKILL
    assert len(list(kept.glob("*.index"))) == 1
    assert run("cat", document, "v/0.7", "-o", f"index_dir={kept}").stdout == chr(7)
    assert run("cache", "ls", "--index-dir", kept).stdout.count("\n") == 1 + len(list(kept.glob(".zarrfs-*.tmp")))
    for left in kept.glob(".zarrfs-*.tmp"):
        os.utime(left, (0, 0))
    assert run("cache", "prune", "--index-dir", kept).returncode == 0
    assert [path.suffix for path in kept.iterdir()] in ([".index"], [".index", ".known"], [".known", ".index"])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("size", ["0k", "100k", "1m", "3m"])
def test_a_full_disk_is_an_error_and_leaves_no_files(size: str, tmp_path: Path) -> None:
    document, small = a_set(tmp_path / "refs.json", 200_000), tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size.replace('0k', '4k', 1)}", "tmpfs", small], check=True)
    try:
        for arguments in (["index", document, "--index-dir", small], ["index", document, "-O", small / "x.index"]):
            done = run(*arguments)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.count("\n") == 1
            assert str(small) in done.stderr
            assert "full" in done.stderr or "no space" in done.stderr.lower(), done.stderr
            assert os.listdir(small) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_prune_removes_old_damaged_and_excess_indexes(tmp_path: Path) -> None:
    kept, documents = tmp_path / "kept", [a_set(tmp_path / f"{name}.json", 10 + ord(name)) for name in "abc"]
    for number, document in enumerate(documents):
        made = run("index", document, "--index-dir", kept).stdout.strip()
        os.utime(made, (1e9 + number, 1e9 + number))
    listed = [json.loads(line) for line in run("cache", "ls", "--json", "--index-dir", kept).stdout.splitlines()]
    assert [one["source"] for one in listed] == [str(document) for document in reversed(documents)]
    total = listed[0]["size"] + listed[1]["size"]
    most = ["--older-than", "100000d", "--max-size", f"{total}B"]
    for dry_run in ["--dry-run"], []:
        done = run("cache", "prune", *most, "--index-dir", kept, *dry_run)
        assert done.stdout.endswith(f"{documents[0]}\n")
        assert done.stdout.count("\n") == 1
        assert len(list(kept.glob("*.index"))) == (3 if dry_run else 2)
    damaged = Path(listed[0]["path"])
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = run("cache", "prune", "--older-than", "100000d", "--index-dir", kept)
    assert "damaged" in done.stdout
    assert done.stdout.count("\n") == 1
    done = run("cache", "prune", "--index-dir", kept)
    assert done.stdout.count("\n") == 1
    assert list(kept.iterdir()) == []
    assert run("cache", "prune", "--older-than", "soon").returncode == 2


# -- an index compared with a dict

KEYS = st.lists(st.sampled_from(["a", "b", "0", "0.0", ".z", "é", "n" * 60]), min_size=1, max_size=3).map("/".join)
VALUES = st.one_of(
    st.text("xyz{\\n é", max_size=5),
    st.tuples(st.sampled_from(["s3://b/1", "s3://b/é", "http://h/x?y"])).map(list),
    st.tuples(st.sampled_from(["s3://b/1", "s3://b/2"]), st.integers(0, 2**61), st.integers(0, 2**61)).map(list),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=30))
def test_an_index_holds_the_items_of_a_dict(pairs: list[tuple[str, object]]) -> None:
    text = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in pairs) + "}"
    model = dict(pairs)
    directories = {key[:at] for key in model for at in range(len(key)) if key[at] == "/"}
    expected = {key: value.encode() if isinstance(value, str) else value for key, value in model.items()}
    with compiled(text.encode()) as made:
        assert made.tree() == {key: value for key, value in expected.items() if key not in directories}
        assert sorted(entry for entry, _rule in made.problems) == sorted(directories & model.keys())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entry SET name='../../evil' WHERE name='.zgroup'",
        f"INSERT INTO entry SELECT 2, 'again', {COPIED} FROM entry WHERE name='v'",
        f"INSERT INTO entry SELECT 1, 'twin', {COPIED} FROM entry WHERE name='v'",
        "UPDATE entry SET size=-1 WHERE name='0.0'",
        "UPDATE entry SET kind=2, size=2147483647 WHERE name='.zgroup'",
    ],
)
def test_an_index_from_the_network_is_checked(statement: str, nginx: Nginx, tmp_path: Path) -> None:
    index = nginx.plain.root / "checked.index"
    index.unlink(missing_ok=True)
    assert run("index", a_set(tmp_path / "refs.json", 5), "-O", index).returncode == 0
    url, kept = f"{nginx.plain.url}/checked.index", tmp_path / "kept"
    assert run("ls", url, "-o", f"index_dir={kept}").returncode == 0
    with sqlite3.connect(index) as db:
        assert db.execute(statement).rowcount == 1
    db.close()
    done = run("ls", url, "-o", f"index_dir={kept}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "not a usable index" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("depth", "refused"), [(2047, False), (2048, True), (5000, True)])
def test_the_depth_of_an_index_is_bounded(depth: int, refused: bool, tmp_path: Path) -> None:
    # the paths of all directories of a chain take memory quadratic in its length
    with IndexWriter(str(tmp_path / "deep.index")) as index:
        index.inline("d/" * depth + "x", b"")
        index.commit()
    found = first_fault(str(tmp_path / "deep.index"))
    assert (found is not None) == refused
    if found is not None:
        assert found[1] == "a key over 4095 bytes"
        assert len(found[0]) < 4100


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meta SET value='[5]' WHERE name='warnings'",
        "UPDATE meta SET value='[null, {}]' WHERE name='warnings'",
        "UPDATE meta SET value='5' WHERE name='warnings'",
        "UPDATE meta SET value=x'5b5d' WHERE name='base'",
    ],
)
def test_notes_of_unexpected_types_are_refused(statement: str, tmp_path: Path) -> None:
    index = tmp_path / "refs.index"
    assert run("index", a_set(tmp_path / "refs.json", 5), "-O", index).returncode == 0
    with sqlite3.connect(index) as db:
        assert db.execute(statement).rowcount == 1
    db.close()
    with pytest.raises(SourceError, match="not a usable index"):
        content(index)


@pytest.mark.parametrize("when", ["²", "9" * 40, "9" * 5000, "-1", str(2**63)])
def test_an_invalid_time_is_replaced_by_that_of_the_file(when: str, tmp_path: Path) -> None:
    index = tmp_path / "refs.index"
    assert run("index", a_set(tmp_path / "refs.json", 5), "-O", index).returncode == 0
    with sqlite3.connect(index) as db:
        db.execute("UPDATE meta SET value=? WHERE name='mtime_ns'", (when,))
    db.close()
    assert prepare(str(index), Options()).mtime_ns == index.stat().st_mtime_ns


def test_an_index_with_pages_in_a_circle_is_an_error(tmp_path: Path) -> None:
    index = tmp_path / "refs.index"
    assert run("index", a_set(tmp_path / "refs.json"), "-O", index).returncode == 0
    data = bytearray(index.read_bytes())
    with sqlite3.connect(index) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name='entry'").fetchone()
    db.close()
    page = (root - 1) * PAGE
    assert data[page] == 2  # an interior page of an index b-tree
    cells = int.from_bytes(data[page + 3 : page + 5], "big")
    first = int.from_bytes(data[page + 12 : page + 14], "big")
    child = data[page + first : page + first + 4]
    for cell in range(cells):
        at = int.from_bytes(data[page + 12 + 2 * cell : page + 14 + 2 * cell], "big")
        data[page + at : page + at + 4] = child
    data[page + 8 : page + 12] = child
    index.write_bytes(data)
    done = run("ls", "-R", index)
    assert done.returncode == 1  # and it does not loop forever
