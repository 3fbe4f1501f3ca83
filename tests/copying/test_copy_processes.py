"""copy_store() in several processes: the same result as in one, also if a process is killed or cannot start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.archives.compiled import file, opened, put
from tests.conftest import PROGRAM, open_descriptors, run
from tests.copying.extracting import FileState, extract, snapshot, write
from tests.copying.test_copy import no_processes
from tests.mounts.mounting import alive
from zarrfs.archives import blob_sources
from zarrfs.archives.blob_reader import BlobReader
from zarrfs.copying import copy, copy_processes
from zarrfs.copying.copy import _Copy, copy_store
from zarrfs.copying.copy_processes import CopyProcesses
from zarrfs.copying.copy_report import CopiedEntry, CopyOptions, CopyReport
from zarrfs.copying.destination_directory import DestinationDirectory
from zarrfs.errors import AccessDenied, ReadError, SourceError
from zarrfs.store.api import Info, Kind, Store
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.indexfile import open_database
from zarrfs.store.keyglobs import Picking


def archive_of(blobs: Path, files: int) -> dict[str, Any]:
    """Return an archive of files of all encodings, setuid modes, links, empty directories, and one large file."""
    chance = random.Random(4)
    entries: dict[str, Any] = {"empty": {"mode": 0o40755, "mtime": 1}, "empty/of": {"mode": 0o40755, "mtime": 2}}
    entries |= {"empty/of/all": {"mode": 0o40700, "mtime": 3}}
    entries |= {f"d{index}": {"mode": 0o40555, "mtime": 9} for index in range(3)}
    entries |= {f"d{index % 3}/e{index % 5}": {"mode": 0o40755, "mtime": 8} for index in range(15)}
    for index in range(files):
        data = chance.randbytes(chance.choice((0, 1, 300, 5000)))
        parts = [[at, len(data[at : at + 999]), put(blobs, data[at : at + 999])] for at in range(0, len(data), 999)]
        kinds = [
            file(parts, encoding="blobvec", size=len(data) + 17, mode=0o104755, mtime=index),
            file("text", mode=0o100600, mtime=2), file(None, size=1 << 20, mtime=1),
            {"mode": 0o120777, "data": f"to {index}", "mtime": 4},
        ]  # fmt: skip
        entries[f"d{index % 3}/e{index % 5}/f{index}"] = kinds[index % 4]
    large = [[at << 20, 1 << 20, put(blobs, chance.randbytes(1 << 20))] for at in range(9)]
    return {**entries, "d1/large": file(large, encoding="blobvec", size=9 << 20, mode=0o100640, mtime=7)}


def tree(root: Path) -> dict[str, FileState]:
    """Return {relative path: state} of all entries below a directory."""
    return {key: one for key, one in snapshot(root).items() if key}


def test_several_processes_write_the_same_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document, forks, fork = archive_of(tmp_path, 900), [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or fork())
    reports = [extract(document, tmp_path / str(jobs), tmp_path, jobs=jobs) for jobs in (1, 3)]
    assert len(forks) == 3
    assert reports[0] == reports[1]
    expected = tree(tmp_path / "1")
    assert tree(tmp_path / "3") == expected
    assert len([one for one in expected.values() if one.kind is Kind.FILE]) == 225 * 3 + 1
    assert {one.mode for one in expected.values() if one.kind is Kind.FILE} == {0o755, 0o600, 0o640, 0o644}
    assert (expected["d1"].mode, expected["d1"].mtime_ns) == (0o555, 9 * 10**9)
    assert (expected["empty/of/all"].mode, expected["empty/of/all"].mtime_ns) == (0o700, 3 * 10**9)


@pytest.mark.parametrize("sums", [False, True])
def test_every_entry_is_reported_with_its_attributes(sums: bool, tmp_path: Path) -> None:
    told: list[CopiedEntry] = []
    with opened(archive_of(tmp_path, 400), type="archive", blobs=(str(tmp_path),)) as (store, _plan):
        write(store, tmp_path / "out", told.append, jobs=2, sums=sums)
    found = tree(tmp_path / "out")
    assert {done.key: done.kind for done in told} == {key: one.kind for key, one in found.items()}
    for done in told:
        data = found[done.key].data
        wanted = hashlib.sha256(data).hexdigest() if sums and isinstance(data, bytes) else None
        assert (done.sha256, done.how) == (wanted, "copied"), done.key
        if done.kind is not Kind.DIRECTORY:
            assert done.size == len(data or b"")


def test_unreadable_blobs_are_reported_as_without_processes(tmp_path: Path) -> None:
    document = archive_of(tmp_path, 900)
    lost = document["d0/e0/f420"]["data"][0][2]
    (tmp_path / lost).write_bytes(b"another")
    wrong = {key for key, one in document.items() if lost in str(one.get("data"))}
    report = extract(document, tmp_path / "out", tmp_path, jobs=2, keep_going=True)
    assert {bad.key for bad in report.failed} == wrong
    assert report.bad == len(wrong) < 20
    assert {key for key in document if not os.path.lexists(tmp_path / "out" / key)} == wrong
    with pytest.raises(SourceError, match=r"/not: d0/e0/f420: .*: a blob of 7 bytes, where the archive says"):
        extract(document, tmp_path / "not", tmp_path, jobs=2)


def test_a_killed_process_is_an_error_and_the_next_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, write_ = archive_of(tmp_path, 900), CopyProcesses._write

    def deadly(self: CopyProcesses, task: Any, memory: memoryview) -> Any:
        if any(entry[0] == "f500" for _key, _fresh, entries in task for entry in entries):
            os.kill(os.getpid(), signal.SIGKILL)
        return write_(self, task, memory)

    monkeypatch.setattr(CopyProcesses, "_write", deadly)
    with pytest.raises(SourceError, match="/out: a process that reads or writes files was killed"):
        extract(document, tmp_path / "out", tmp_path, jobs=2, mark="m")
    monkeypatch.undo()
    assert os.listdir(tmp_path / "out/.zarrfs-staging") == ["note"]
    assert extract(document, tmp_path / "out", tmp_path, jobs=2, mark="m").resumed > 100
    extract(document, tmp_path / "expected", tmp_path, jobs=1)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_files_of_a_removed_directory_are_not_written_elsewhere(tmp_path: Path) -> None:
    """They would otherwise be written into the root. Entries of a directory that was made again are written."""
    with opened({"d/f": file("x")}, type="archive") as (store, _plan):
        filling = DestinationDirectory(str(tmp_path / "out"))
        forked = CopyProcesses(
            store, store.blocking(), filling, Picking((), ()), 1, sums=False, set_ids=False, fail=lambda key, exc: None
        )
        entry = ("f", 0, 1, 0o644, 5, None, None, [(0, 1, b"x", "", 0)])
        assert forked._write([("d", True, [entry])], memoryview(b"")) == [(b"\0", None)]
        assert os.listdir(tmp_path / "out") == [".zarrfs-staging"]
        os.mkdir(tmp_path / "out/d")
        assert forked._write([("d", True, [entry])], memoryview(b"")) == [(b"\1", None)]
        filling.finish(Info("", Kind.DIRECTORY))
    assert snapshot(tmp_path / "out").keys() == {"", "d", "d/f"}


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """When the parent is killed, they exit immediately, so the next run finds no other writer."""
    (tmp_path / "a.json").write_text(json.dumps(archive_of(tmp_path, 4000)))
    command = ["archive", "extract", str(tmp_path / "a.json"), "-C", str(tmp_path / "out"), "--blobs", str(tmp_path)]
    process = subprocess.Popen([PROGRAM, *command, "--jobs", "2"])
    children: list[str] = []
    while len(children) < 2:
        assert process.poll() is None
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    began = time.monotonic()
    while any(alive(int(child)) for child in children):
        assert time.monotonic() - began < 60
    done = run(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert ".zarrfs-staging" not in os.listdir(tmp_path / "out")


def disturb(out: Path, chance: random.Random) -> None:
    """Replace some entries by an older or newer file, a link or a directory, and remove some."""
    for key, one in sorted(tree(out).items()):
        path, what = out / key, chance.randrange(8)
        if one.kind is Kind.DIRECTORY:
            path.chmod(0o700)
        elif what < 6 and path.exists():
            path.unlink()
            if what == 0:
                path.mkdir()
            elif what == 1:
                path.symlink_to("/nowhere")
            elif what < 4:
                path.write_bytes(b"another")
                os.utime(path, (what - 2, what - 2) if what == 2 else (1 << 31, 1 << 31))
    (out / "other").mkdir()
    (out / "other/file").touch()


def timeless(one: FileState) -> FileState:
    """Return a state with time 0 if its time is that of the test run."""
    return one._replace(mtime_ns=0) if abs(one.mtime_ns / 1e9 - time.time()) < 3600 else one


CHOICES: dict[str, dict[str, Any]] = {
    "include": {"include": ("d1", "f1*", "none")},
    "exclude": {"exclude": ("e3", "f?5*")},
    "both": {"include": ("d0/e0/*", "f77*"), "exclude": ("*7",), "sums": True},
    **{existing: {"existing": existing} for existing in ("refuse", "overwrite", "keep", "update", "differs")},
    "keep, some": {"existing": "keep", "include": ("*2", "d2"), "sums": True},
    "update, some": {"existing": "update", "exclude": ("d1/e1",), "sums": True},
}


OF_DIRECTORIES = ("both", "refuse", "update", "differs")  # choices for which the kind of the source matters


@contextlib.contextmanager
def source_of(kind: str, document: Any, tmp_path: Path) -> Iterator[Store]:
    """Open `document` as an archive, or a directory with its entries, a FIFO, sparse files and an odd name."""
    if kind == "archive":
        with opened(document, type="archive", blobs=(str(tmp_path),)) as (store, _plan):
            yield store
        return
    source = tmp_path / "source"
    if not source.exists():
        extract(document, source, tmp_path)
        os.mkfifo(source / "d0/fifo")
        for name, size in (("a", 3 << 20), ("b", 9 << 20)):
            with open(source / name, "wb") as file:
                file.seek(1 << 20)
                file.write(b"data" * 5000)
                file.truncate(size)
        Path(os.fsdecode(bytes(source) + b"/d1/\xff")).write_bytes(b"no UTF-8")
    yield FileSystemStore(str(source))


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "archive") for name in CHOICES), *((name, "directory") for name in OF_DIRECTORIES)],
)
def test_processes_and_threads_copy_the_same(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With filters, and with an existing destination. The ordinary way writes in threads of this process."""
    document, forks, fork, choice = archive_of(tmp_path, 240), [], os.fork, CHOICES[name]
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or fork())
    for module in copy, copy_processes:
        monkeypatch.setattr(module, "ENTRIES", 50)  # few enough that 240 files are worth three processes
    found = []
    for ordinary in (True, False):
        out, told = tmp_path / f"out{ordinary}", list[CopiedEntry]()
        if "existing" in choice:
            with source_of(kind, document, tmp_path) as store:
                write(store, out, keep_going=True)
            disturb(out, random.Random(5))
        with monkeypatch.context() as patch, source_of(kind, document, tmp_path) as store:
            if ordinary:
                patch.setattr(_Copy, "_in_processes", no_processes)
            forks.clear()
            report = write(store, out, told.append, jobs=3, keep_going=True, **choice)
        assert len(forks) == (0 if ordinary else 3)
        report.failed.sort()
        report.expected_files = report.expected_bytes = None  # only the ordinary way counts what it has yet to write
        found.append((report, {key: timeless(one) for key, one in tree(out).items()}, sorted(told)))
    for one, other in zip(*found, strict=True):
        assert one == other
    assert len(found[0][2]) > 10
    assert {"refuse": found[0][0].bad, "keep": found[0][0].kept}.get(name, 1) > 0


@pytest.mark.parametrize("ordinary", [True, False])
def test_files_that_vanish_or_cannot_be_opened_are_named(
    ordinary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fail after the source was listed, and no other file does."""
    if ordinary:
        monkeypatch.setattr(_Copy, "_in_processes", no_processes)
    (tmp_path / "source").mkdir()
    for number in range(600):
        (tmp_path / f"source/{number}").write_text(str(number))
    open_file = FileSystemStore.open_file

    def opened(self: FileSystemStore, key: str) -> int:
        if key == "5":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(tmp_path / "source/5")
        if key == "555":
            raise AccessDenied(key, "permission denied")
        return open_file(self, key)

    monkeypatch.setattr(FileSystemStore, "open_file", opened)
    report = write(FileSystemStore(str(tmp_path / "source")), tmp_path / "out", jobs=2, keep_going=True)
    assert sorted(bad.key for bad in report.failed) == ["5", "555"]
    assert report.files == 598
    assert set(os.listdir(tmp_path / "out")) == {str(number) for number in range(600)} - {"5", "555"}


def test_a_refused_run_leaves_no_staging_directory(tmp_path: Path) -> None:
    """Even with a mark, and after child processes have started."""
    document = small(1000)
    extract(document, tmp_path / "out", jobs=2)
    with pytest.raises(SourceError, match=r"d0/f\d+: is there already"):
        extract(document, tmp_path / "out", jobs=2, mark="m")
    assert sorted(os.listdir(tmp_path / "out")) == ["d0", "d1"]


def small(count: int) -> dict[str, Any]:
    """Return an archive of `count` small files."""
    return {f"d{index // 500}/f{index:05}": file(str(index), mtime=5) for index in range(count)}


def test_a_run_that_is_cancelled_ends_soon(tmp_path: Path) -> None:
    report = CopyReport()

    async def body(store: Any) -> None:
        with trio.move_on_after(0.15) as scope:
            await copy_store(store, str(tmp_path / "out"), CopyOptions(jobs=2), report)
        assert scope.cancelled_caught

    with opened(small(30_000), type="archive") as (store, _plan):
        trio.run(body, store)
    assert report.files < 20_000


def test_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    lost = file([[0, 3, put(tmp_path, b"xyz")]], encoding="blobvec", size=3)
    os.unlink(tmp_path / lost["data"][0][2])
    with pytest.raises(SourceError, match=r"a: .*no such blob"):
        extract({"a": lost, **small(20_000)}, tmp_path / "out", tmp_path, jobs=2)
    assert len(snapshot(tmp_path / "out")) < 10_000


def test_threads_write_if_fork_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(11, "resource temporarily unavailable")

    before = len(open_descriptors())
    monkeypatch.setattr(os, "fork", full)
    assert extract(small(700), tmp_path / "out", jobs=2).files == 700
    assert len(open_descriptors()) <= before + 1


def test_an_unreadable_tar_fails_only_files_with_blobs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> bytes:
        raise ReadError("x.tar", "input/output error")

    with tarfile.open(tmp_path / "x.tar", "w") as made:
        made.add(__file__, "archive/x_blobs/0")
    monkeypatch.setattr(blob_sources.DumpSource, "_pread", broken)
    (tmp_path / "b").mkdir()
    document = archive_of(tmp_path / "b", 300)
    blobs = (str(tmp_path / "b"), str(tmp_path / "x.tar"))
    with opened(document, type="archive") as (store, _plan):
        wholes = BlobReader(blobs)
        store._targets = store._wholes = wholes
        assert write(store, tmp_path / "out", jobs=2).bad == 0


def test_a_bad_blob_with_a_good_copy_elsewhere_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    bad = put(second, b"right")
    (first / bad).write_bytes(b"wrong")
    document = {f"f{index}": file([[0, 5, bad]], encoding="blobvec", size=5) for index in range(1000)}
    with opened(document, type="archive", blobs=(str(first), str(second))) as (store, _plan):
        assert write(store, tmp_path / "out", jobs=3).files == 1000
    assert len([record for record in caplog.records if "instead" in record.getMessage()]) == 1
    assert "instead" not in capfd.readouterr().err


def test_a_closed_pipe_of_names_ends_the_run_quietly(tmp_path: Path) -> None:
    """With -v, names are printed as files appear. A closed pipe is not reported as an error of the destination."""
    (tmp_path / "a.json").write_text(json.dumps(small(12_000)))
    command = f"{PROGRAM} archive extract -v {tmp_path}/a.json -C {tmp_path}/out --jobs 2 | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_directory_that_contains_itself_fails_alone(tmp_path: Path) -> None:
    """As in a forged index. With keep_going, other entries are copied."""
    for keep_going in (True, False):
        with opened(small(1200), type="archive") as (store, _plan):
            path = next(iter(store._db.execute("PRAGMA database_list")))[2]
            with contextlib.closing(sqlite3.connect(path)) as changed:
                changed.execute("UPDATE entry SET ref=1 WHERE name='d1'")
                changed.execute("UPDATE entry SET kind=7 WHERE name='f00001'")
                changed.commit()
            store._db.close()
            store._db = open_database(path)
            out = tmp_path / str(keep_going)
            if keep_going:
                report = write(store, out, jobs=2, keep_going=True)
                assert "d1" in {bad.key for bad in report.failed}
                assert report.files >= 699
            else:
                with pytest.raises(SourceError, match=r"d1: .*contains itself"):
                    write(store, out, jobs=2)

