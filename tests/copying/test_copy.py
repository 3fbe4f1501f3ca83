"""copy_store(): content and attributes, existing entries, filters, untrusted stores, and shares."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archives.compiled import D, F, L, file, opened, put, tree
from tests.copying.extracting import FileState, extract, look, snapshot, write
from tests.servers import Nginx
from zarrfs.config.options import Options
from zarrfs.config.shares import Share
from zarrfs.copying import copy, destination_directory
from zarrfs.copying.copy import copy_store
from zarrfs.copying.copy_report import CopiedEntry, CopyOptions, CopyReport
from zarrfs.copying.destination_directory import DestinationDirectory
from zarrfs.errors import SourceError, UsageError
from zarrfs.store.api import Info, Kind
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.remote import FsspecStore

BIG = 20 << 20  # bytes: more than is written in one piece


def test_modes_times_data_and_links_are_written_as_they_are_stored(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    one, two = put(blobs, b"1" * 5000), put(blobs, b"2" * 3000, "sha256")
    out = tmp_path / "a" / "out"
    out.parent.mkdir()
    umask = os.umask(0o077)
    try:
        report = extract(
            [
                {"path": ".", "mode": 0o41777, "mtime": 5},
                {"path": "d/blobs", "mode": 0o104751, "mtime": -7, "size": 8000, "encoding": "blobvec",
                 "data": [[0, 5000, one], [5000, 3000, two]]},
                {"path": "d", "mode": 0o42500, "mtime": 3},
                {"path": "d/text", **file("x", mode=0o100000, mtime=2**33)},
                {"path": "empty", "mode": 0o40711, "mtime": 9},
                {"path": "l", "mode": L, "data": "/etc/passwd", "mtime": 11},
                {"path": "implicit/dangling", "mode": L, "data": "../../nowhere"},
            ],
            out, blobs,
        )  # fmt: skip
    finally:
        os.umask(umask)
    found = snapshot(out)
    assert found.pop("implicit")[:2] == (Kind.DIRECTORY, 0o700)  # it has no mode of its own, so the umask decides
    assert found.pop("implicit/dangling").data == "../../nowhere"
    assert found == {
        "": FileState(Kind.DIRECTORY, 0o1777, 5 * 10**9),
        "d": FileState(Kind.DIRECTORY, 0o2500, 3 * 10**9),
        "d/blobs": FileState(Kind.FILE, 0o751, -7 * 10**9, b"1" * 5000 + b"2" * 3000),
        "d/text": FileState(Kind.FILE, 0, 2**33 * 10**9, b"x"),
        "empty": FileState(Kind.DIRECTORY, 0o711, 9 * 10**9),
        "l": FileState(Kind.SYMLINK, 0o777, 11 * 10**9, "/etc/passwd"),
    }
    assert (report.files, report.directories, report.links, report.bytes) == (2, 3, 2, 8001)
    assert (report.expected_files, report.expected_bytes) == (2, 8001)


def test_holes_stay_holes(tmp_path: Path) -> None:
    ref = put(tmp_path, b"x" * 4096)
    vec = [[1 << 30, 4096, ref], [2 << 30, 4096, ref]]
    document = {"sparse": file(vec, encoding="blobvec", size=2**40), "hole": file(size=2**40), "empty": file(size=0)}
    extract(document, tmp_path / "out", tmp_path)
    for name, size, held in (("sparse", 2**40, 8192), ("hole", 2**40, 0), ("empty", 0, 0)):
        status = os.stat(tmp_path / "out" / name)
        assert (status.st_size, status.st_blocks * 512) == (size, held)
    # also in a copy of a directory
    store = FileSystemStore(str(tmp_path / "out"))
    write(store, tmp_path / "again")
    assert os.stat(tmp_path / "again/sparse").st_blocks * 512 == 8192
    with open(tmp_path / "again/sparse", "rb") as copied:
        copied.seek(2 << 30)
        assert copied.read(4097) == b"x" * 4096 + b"\0"


def test_large_files_are_copied_whole_and_hashed(tmp_path: Path) -> None:
    """Pieces end inside regions, regions end inside pieces, and there are holes."""
    parts = [os.urandom(3 << 20), os.urandom(5 << 20), os.urandom(6 << 20), os.urandom(BIG)]
    vec, at = [], 0
    for part in parts:
        vec.append([at, len(part), put(tmp_path, part)])
        at += len(part) + (1 << 20)
    expected = b"".join(part + bytes(1 << 20) for part in parts)
    document = {"f": file(vec, encoding="blobvec", size=at, mtime=7), "inline": file("y" * BIG)}
    done: list[CopiedEntry] = []
    extract(document, tmp_path / "out", tmp_path, sums=True, done=done.append)
    assert (tmp_path / "out/f").read_bytes() == expected
    assert {one.key: one.sha256 for one in done if one.kind is Kind.FILE} == {
        "f": hashlib.sha256(expected).hexdigest(), "inline": hashlib.sha256(b"y" * BIG).hexdigest(),
    }  # fmt: skip
    write(FileSystemStore(str(tmp_path / "out")), tmp_path / "copy")
    assert snapshot(tmp_path / "copy")["f"] == look(tmp_path / "out/f")


def test_a_directory_is_copied_with_times_in_nanoseconds(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b/c").mkdir(parents=True)
    (source / "a/f").write_bytes(b"1")
    (source / "a/l").symlink_to("f")
    (source / os.fsdecode(b"no utf-8 \xff")).write_bytes(b"2")
    for name in ("a/l", "a/f", "a/b/c", "a/b", "a", "."):
        os.utime(source / name, ns=(0, 1_600_000_000_123_456_789), follow_symlinks=False)
    write(FileSystemStore(str(source)), tmp_path / "out")
    found, expected = snapshot(tmp_path / "out"), snapshot(source)
    found.pop(""), expected.pop("")  # a store's root has no time
    assert found == expected


def test_a_remote_store_is_copied(nginx: Nginx, tmp_path: Path) -> None:
    source = nginx.listing.root / "copy_store"
    source.mkdir()
    for index in range(300):
        (source / f"{index % 7}").mkdir(exist_ok=True)
        (source / f"{index % 7}/{index}").write_bytes(b"%d" % index * index)
    (source / "big").write_bytes(os.urandom(BIG))
    (source / "empty").write_bytes(b"")
    store = FsspecStore(f"{nginx.listing.url}/copy_store", Options())
    report = write(store, tmp_path / "out")
    assert report.files == 302
    data = {key: found.data for key, found in snapshot(tmp_path / "out").items()}
    assert data == {key: found.data for key, found in snapshot(source).items()}


NAMES = st.sampled_from(["a", "b", "c", "é", "x y", ".h", "-n"])
KEYS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
TIMES = st.one_of(st.none(), st.integers(-(2**31), 2**33))


def entry(data: bytes, at: int, hole: int, mode: int, mtime: int | None, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"mode": F & ~0o7777 | mode} | ({} if mtime is None else {"mtime": mtime})
    if kind == "directory":
        return found | {"mode": D & ~0o7777 | mode}
    if kind == "symlink":
        return found | {"mode": L, "data": data.hex() or "."}
    if kind == "blobs":
        return found | {"encoding": "blobvec", "size": at + len(data) + hole, "data": [[at, len(data), data]]}
    return found | {"encoding": "utf-8", "data": data.hex()}


ENTRIES = st.builds(
    entry, st.binary(max_size=5000), st.integers(0, 9000), st.integers(0, 9000), st.integers(0, 0o7777), TIMES,
    st.sampled_from(["file", "directory", "symlink", "blobs"]),
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(KEYS, ENTRIES), max_size=12))
def test_random_archives_are_extracted_as_the_store_shows_them(listed: list[tuple[str, dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        for _path, one in listed:
            if one.get("encoding") == "blobvec" and isinstance(one["data"][0][2], bytes):
                one["data"] = [[*one["data"][0][:2], put(base, one["data"][0][2])]]
        document = [{"path": path, **one} for path, one in listed]
        try:
            expected = tree(document, type="archive", blobs=(directory,)).nodes
        except SourceError:  # a file with something below it
            return
        extract(document, base / "out", base)
        found = snapshot(base / "out")
        assert found.keys() == expected.keys()
        for key, node in expected.items():
            assert (found[key].kind, found[key].data) == (node.kind, node.data), key
            assert node.mtime_ns is None or found[key].mtime_ns == node.mtime_ns, key
            if node.mode is not None and node.kind is not Kind.SYMLINK:
                assert found[key].mode == node.mode & (~0o6000 if node.kind is Kind.FILE else -1), key


# -- existing entries


NEW = {"f": file("new", mtime=100), "d/f": file("new", mtime=100), "l": {"mode": L, "data": "new", "mtime": 100}}


def prepared(out: Path, mtime: int) -> None:
    (out / "d").mkdir(parents=True)
    (out / "f").write_bytes(b"old")
    (out / "d/f").write_bytes(b"old")
    (out / "l").symlink_to("old")
    for name in ("f", "d/f", "l"):
        os.utime(out / name, (mtime, mtime), follow_symlinks=False)


@pytest.mark.parametrize(
    ("existing", "mtime", "replaced"),
    [
        ("overwrite", 200, True), ("keep", 50, False), ("update", 50, True), ("update", 100, False),
        ("update", 200, False),
    ],
)
def test_existing_files_are_kept_or_replaced(existing: str, mtime: int, replaced: bool, tmp_path: Path) -> None:
    prepared(tmp_path / "out", mtime)
    report = extract(NEW, tmp_path / "out", existing=existing)
    found = [snapshot(tmp_path / "out")[key].data for key in ("f", "d/f", "l")]
    assert found == ([b"new", b"new", "new"] if replaced else [b"old", b"old", "old"])
    assert (report.files, report.links, report.kept) == ((2, 1, 0) if replaced else (0, 0, 3))


def test_an_existing_file_is_an_error(tmp_path: Path) -> None:
    prepared(tmp_path / "out", 1)
    before = snapshot(tmp_path / "out")
    with pytest.raises(SourceError, match="d/f: is there already"):
        extract(NEW, tmp_path / "out")
    report = extract({**NEW, "g": file("g")}, tmp_path / "out", keep_going=True)
    assert (report.bad, sorted(bad.key for bad in report.failed)) == (3, ["d/f", "f", "l"])
    assert (tmp_path / "out/g").read_bytes() == b"g"
    (tmp_path / "out/g").unlink()
    after = snapshot(tmp_path / "out")
    assert {key: after[key] for key in after if key} == {key: before[key] for key in before if key}


@pytest.mark.parametrize("size", [100, BIG])
def test_an_input_output_error_of_one_file_does_not_stop_the_others(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a-bad", "good", "z-good"):
        (source / name).write_bytes(b"x" * size)
    bad = (source / "a-bad").stat().st_ino

    def failing(real: Any) -> Any:
        def call(descriptor: int, *arguments: Any) -> Any:
            if os.fstat(descriptor).st_ino == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, *arguments)

        return call

    for name in ("copy_file_range", "pread"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    report = write(FileSystemStore(str(source)), tmp_path / "out", keep_going=True)
    assert [one[:2] for one in report.failed] == [("a-bad", "unreadable")]
    assert report.failed[0].reason == "input/output error"
    assert sorted(os.listdir(tmp_path / "out")) == ["good", "z-good"]
    with pytest.raises(SourceError, match="a-bad: input/output error"):
        write(FileSystemStore(str(source)), tmp_path / "again")


def test_an_existing_entry_of_another_kind_is_an_error_or_replaced(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (out / "f/x").mkdir(parents=True)
    (out / "d").symlink_to(outside)
    for existing in ("refuse", "keep", "update"):
        with pytest.raises(SourceError, match="d: is there already, and is no directory"):
            extract({"d/f": file("")}, out, existing=existing)
    with pytest.raises(SourceError, match="f: a directory is there already: directory not empty"):
        extract({"f": file("")}, out, existing="overwrite")
    extract({"d/f": file("1"), "f/x": file("2")}, out, existing="overwrite")
    assert not list(outside.iterdir())
    assert (look(out / "d").kind, look(out / "d/f").data, look(out / "f/x").data) == (Kind.DIRECTORY, b"1", b"2")


@pytest.mark.parametrize("what", ["file", "dangling link", "no parent"])
def test_bad_destinations_are_refused(what: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_bytes(b"")
    elif what == "dangling link":
        out.symlink_to("nowhere")
    else:
        out = tmp_path / "nothing/out"
    with pytest.raises(UsageError, match=f"^{out}: "):
        extract(NEW, out)


def test_a_run_that_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"f: .*no such blob"):
        extract({"f": file([[0, 1, "sha1-" + "0" * 40]], encoding="blobvec", size=1)}, tmp_path / "out", mark="m")
    assert not (tmp_path / "out").exists()


# -- filters and links


DOCUMENT = {"a/x.nc": file("1"), "a/y.txt": file("2"), "b/a/z.nc": file("3"), "x.nc": file("4"), "e": {"mode": D}}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), {"a/x.nc", "a/y.txt", "b/a/z.nc", "x.nc", "e"}),
        (("*.nc",), (), {"a/x.nc", "b/a/z.nc", "x.nc"}),
        (("a/*.nc",), (), {"a/x.nc"}),
        (("./*.nc",), (), {"a/x.nc", "b/a/z.nc", "x.nc"}),
        (("a",), (), {"a/x.nc", "a/y.txt", "b/a/z.nc"}),
        (("./a/",), (), {"a/x.nc", "a/y.txt"}),
        ((), ("a",), {"x.nc", "b", "e"}),
        (("a",), ("*.txt", "b"), {"a/x.nc"}),
        ((".",), ("e",), {"a/x.nc", "a/y.txt", "b/a/z.nc", "x.nc"}),
    ],
)
def test_globs_select_entries_and_their_parents(
    include: tuple[str, ...], exclude: tuple[str, ...], expected: set[str], tmp_path: Path
) -> None:
    report = extract(DOCUMENT, tmp_path / "out", include=include, exclude=exclude)
    found = set(snapshot(tmp_path / "out")) - {""}
    parents = {key[:at] for key in expected for at in range(len(key)) if key[at] == "/"}
    assert found == expected | parents
    assert report.unmatched == []


# -- untrusted stores


class Hostile(FileSystemStore):
    """A store that lists any given entries, whose files all have the bytes of `f`."""

    def __init__(self, path: Path, listed: list[Info]) -> None:
        super().__init__(str(path))
        self.listed = listed

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        for info in self.listed if not prefix else [Info("f", Kind.FILE, 1)]:
            yield info

    def open_file(self, key: str) -> int:
        return super().open_file("f")


NO_NAMES = ["..", ".", "", "/tmp/x", "a/../../x", "a\0b", "a/b", "\ud800", "n" * 256, ".zarrfs-staging"]


@pytest.mark.parametrize("kind", [Kind.FILE, Kind.DIRECTORY, Kind.SYMLINK])
def test_invalid_names_are_failures(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/f").write_bytes(b"x")
    listed = [Info(name, kind, 1, target="t") for name in NO_NAMES]
    store = Hostile(tmp_path / "source", [*listed, Info("g", Kind.FILE, 1)])
    report = write(store, tmp_path / "out", keep_going=True)
    assert [bad.key for bad in report.failed] == NO_NAMES
    assert set(snapshot(tmp_path / "out")) == {"", "g"}
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_a_link_and_a_directory_of_one_name_do_not_redirect_writes(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "source/f").write_bytes(b"x")
    link = Info("a", Kind.SYMLINK, 1, target=str(tmp_path / "outside"))
    for listed in itertools.permutations([link, Info("a", Kind.DIRECTORY), Info("a", Kind.FILE, 1)]):
        for existing in ("refuse", "overwrite"):
            out = Path(tempfile.mkdtemp(dir=tmp_path))
            write(Hostile(tmp_path / "source", list(listed)), out, keep_going=True, existing=existing)
    assert os.listdir(tmp_path / "outside") == []


def test_a_tree_deeper_than_the_longest_path_is_copied(tmp_path: Path) -> None:
    path = "d/" * 2000 + "f"
    try:
        with opened({path: file("deep")}) as (store, _plan):
            report = write(store, tmp_path / "out")
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "out"], check=True)  # too deep for pytest to remove
    assert (report.files, report.directories) == (1, 2000)


def test_concurrent_shares_make_the_whole_copy(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    for index in range(200):
        (source / f"d{index % 5}/e{index % 3}").mkdir(parents=True, exist_ok=True)
        (source / f"d{index % 5}/e{index % 3}/{index}").write_bytes(b"x" * (index % 7 * 1000))
    (source / "empty").mkdir()
    (source / "link").symlink_to("d1")
    (source / "left-out").write_bytes(b"y")
    for at, _, _ in os.walk(source):
        os.utime(at, ns=(0, 7 * 10**9))
    (source / "d1/e1").chmod(0o500)
    reports = [CopyReport() for _ in range(4)]

    async def one(index: int) -> None:
        store = FileSystemStore(str(source))
        choice = CopyOptions(exclude=("left-*",), mark="m", share=Share(index, 4), jobs=1)
        await copy_store(store, str(out), choice, reports[index])
        await store.aclose()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(one, index)

    trio.run(main)
    found, expected = snapshot(out), snapshot(source)
    notes = sorted(key.rpartition("/")[2] for key in found if key.startswith(".zarrfs-staging/"))
    assert notes == [f"note-{index}-of-4" for index in range(4)]
    for state in (found, expected):
        for key in ("", "left-out", *(key for key in state if key.startswith(".zarrfs"))):
            state.pop(key, None)
    expected["d1/e1"] = expected["d1/e1"]._replace(mode=0o700)  # other shares may still write there
    assert found == expected
    assert sum(report.files for report in reports) == 200
    assert all(report.files > 20 for report in reports)

    (out / "d3/e0/3").unlink()  # run again, the shares copy only the missing file
    reports[:] = [CopyReport() for _ in range(4)]
    trio.run(main)
    assert sum(report.files for report in reports) == 1
    assert sum(report.resumed for report in reports) == 200


@pytest.mark.parametrize("share", [Share(0, 1), None])
def test_after_a_failed_sync_every_file_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: Share | None
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "x").write_bytes(b"x")
    failing = [OSError(errno.EIO, os.strerror(errno.EIO))]  # only once: syncfs(2) reports an error once

    def sync(path: str) -> None:
        if failing:
            raise failing.pop()

    monkeypatch.setattr(copy, "sync_file_system", sync)
    monkeypatch.setattr(destination_directory, "sync_file_system", sync)
    choice: dict[str, Any] = {"mark": "m", "share": share, "sync": share is None}
    with pytest.raises(SourceError, match="out: cannot be written: input/output error"):
        write(FileSystemStore(str(source)), out, **choice)
    report = write(FileSystemStore(str(source)), out, **choice)
    assert (report.files, report.resumed) == (1, 0)


def test_a_share_is_copied_by_one_run_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    filling = DestinationDirectory(str(tmp_path / "out"), mark="m", share=Share(0, 2))
    with pytest.raises(UsageError, match="another run of the share 0/2 is writing to it"):
        write(FileSystemStore(str(tmp_path / "source")), tmp_path / "out", mark="m", share=Share(0, 2))
    write(FileSystemStore(str(tmp_path / "source")), tmp_path / "out", mark="m", share=Share(1, 2))
    filling.abandon()
