"""zarrfs copy: what it writes, what it leaves alone, what it says of bad input, and what is left if it is killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.archives.compiled import D, L, blobref, file, put
from tests.conftest import PROGRAM, run, tmpfs
from tests.copying.trees import FileState, archive_of, snapshot
from tests.mounts.mounting import daemon_pid, mounted, until
from tests.servers import Nginx
from zarrfs.copying.target_directory import Folder, TargetDirectory
from zarrfs.store.api import Info, Kind
from zarrfs.store.directory import FIFO

KILLS = int(os.environ.get("ZARRFS_KILLS", "2"))  # ZARRFS_KILLS=100 tries harder than CI
BIG = 20 << 20  # bytes: more than is written in one piece


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def copy(*words: object, status: int = 0, **more: Any) -> list[str]:
    """Run `zarrfs copy`, check its status, and return the lines on standard error."""
    done = run("copy", *words, **more)
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    return done.stderr.splitlines()


def below(root: Path) -> dict[str, FileState]:
    """Return snapshot() without the root itself."""
    return {key: state for key, state in snapshot(root).items() if key}


# -- content


def test_a_directory_is_copied_as_by_cp(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b/c").mkdir(parents=True)
    (source / "a/f").write_bytes(b"1")
    (source / "a/l").symlink_to("f")
    (source / "dangling").symlink_to("/no/where")
    (source / os.fsdecode(b"no utf-8 \xff")).write_bytes(b"2")
    (source / "big").write_bytes(os.urandom(BIG))
    (source / "empty").mkdir(mode=0o2700)
    (source / "closed").mkdir()
    (source / "closed/f").write_bytes(b"3")
    os.mkfifo(source / "fifo", 0o640)
    with open(source / "sparse", "wb") as sparse:
        sparse.truncate(1 << 40)
        os.pwrite(sparse.fileno(), b"x", 1 << 30)
    (source / "id").write_bytes(b"4")
    (source / "closed").chmod(0o500)
    for at, names, files in os.walk(source, topdown=False):
        for name in (*names, *files):
            path = os.path.join(at, name)
            if not os.path.islink(path):
                os.utime(path, ns=(0, 1_600_000_000_123_456_789))
    os.utime(source / "a/l", ns=(0, 7), follow_symlinks=False)
    source.chmod(0o711)
    os.utime(source, ns=(5, 5))
    subprocess.run(["cp", "-a", source, tmp_path / "expected"], check=True)
    (source / "id").chmod(0o6755)
    (tmp_path / "expected/id").chmod(0o755)  # a copy never has set-ID bits
    os.utime(source / "id", ns=(9, 9))
    os.utime(tmp_path / "expected/id", ns=(9, 9))
    assert copy(source, tmp_path / "out") == []
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "expected")
    assert os.stat(tmp_path / "out/sparse").st_blocks == os.stat(source / "sparse").st_blocks
    assert stat.S_ISFIFO(os.lstat(tmp_path / "out/fifo").st_mode)
    before = {path: path.lstat().st_ino for path in (tmp_path / "out").rglob("*")}
    assert copy(source, tmp_path / "out") == []
    assert {path: path.lstat().st_ino for path in (tmp_path / "out").rglob("*")} == before


def test_an_archive_is_written_as_it_is_stored(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    one, two = put(blobs, b"1" * 5000), put(blobs, b"2" * 3000, "sha256")
    vec = [[1 << 30, 5000, one], [2 << 30, 3000, two]]
    pieces, at = [], 0
    for data in (parts := [os.urandom(3 << 20), os.urandom(5 << 20), os.urandom(BIG)]):
        pieces.append([at, len(data), put(blobs, data)])
        at += len(data) + (1 << 20)
    entries = [
        {"path": ".", "mode": 0o41777, "mtime": 5},
        {"path": "d/blobs", "mode": 0o106751, "mtime": -7, "size": 8000, "encoding": "blobvec",
         "data": [[0, 5000, one], [5000, 3000, two]]},
        {"path": "d", "mode": 0o42500, "mtime": 3},
        {"path": "d/text", **file("x", mode=0o100000, mtime=2**33)},
        {"path": "empty", "mode": 0o40711, "mtime": 9},
        {"path": "l", "mode": L, "data": "/etc/passwd", "mtime": 11},
        {"path": "implicit/dangling", "mode": L, "data": "../../nowhere"},
        {"path": "sparse", **file(vec, encoding="blobvec", size=2**40)}, {"path": "hole", **file(size=2**40)},
        {"path": "large", **file(pieces, encoding="blobvec", size=at, mtime=7)},
    ]  # fmt: skip
    out = tmp_path / "out"
    assert copy(written(tmp_path / "a.json", entries), out, "--blobs", blobs) == []
    found = snapshot(out)
    assert found.pop("implicit").kind is Kind.DIRECTORY
    assert found.pop("implicit/dangling").data == "../../nowhere"
    assert found.pop("large").data == b"".join(part + bytes(1 << 20) for part in parts)
    for name, held in (("sparse", 12288), ("hole", 0)):
        assert found.pop(name).kind is Kind.FILE
        assert os.stat(out / name).st_size == 2**40
        assert os.stat(out / name).st_blocks * 512 <= held
    with open(out / "sparse", "rb") as sparse:
        sparse.seek(2 << 30)
        assert sparse.read(3001) == b"2" * 3000 + b"\0"
    assert found == {
        "": FileState(Kind.DIRECTORY, 0o1777, 5 * 10**9),
        "d": FileState(Kind.DIRECTORY, 0o2500, 3 * 10**9),
        "d/blobs": FileState(Kind.FILE, 0o751, -7 * 10**9, b"1" * 5000 + b"2" * 3000),
        "d/text": FileState(Kind.FILE, 0, 2**33 * 10**9, b"x"),
        "empty": FileState(Kind.DIRECTORY, 0o711, 9 * 10**9),
        "l": FileState(Kind.SYMLINK, 0o777, 11 * 10**9, "/etc/passwd"),
    }  # fmt: skip


def test_a_store_on_a_server_is_copied(nginx: Nginx, tmp_path: Path) -> None:
    source, out = nginx.listing.root / "copied", tmp_path / "out"
    source.mkdir()
    for index in range(300):
        (source / f"{index % 7}").mkdir(exist_ok=True)
        (source / f"{index % 7}/{index}").write_bytes(b"%d" % index * index)
    (source / ".zgroup").write_text('{"zarr_format": 2}')
    (source / "big").write_bytes(os.urandom(BIG))
    (source / "empty").write_bytes(b"")
    assert copy(f"{nginx.listing.url}/copied", out) == []
    assert {key: one.data for key, one in below(out).items()} == {
        key: one.data for key, one in below(source).items()
    }  # fmt: skip
    before = {path: path.stat().st_ino for path in out.rglob("*")}
    (out / "3/3").unlink()
    assert copy(f"{nginx.listing.url}/copied", out) == []
    assert (out / "3/3").read_bytes() == b"333"
    del before[out / "3/3"]
    assert {path: path.stat().st_ino for path in before} == before


def test_a_tree_deeper_than_the_longest_path_is_copied(tmp_path: Path) -> None:
    document = written(tmp_path / "a.json", {f"{'d' * 200}/" * 20 + "f": file("deep")})
    try:
        assert copy(document, tmp_path / "out") == []
        found = subprocess.run(["find", tmp_path / "out", "-type", "f"], capture_output=True, check=True).stdout
        assert found.endswith(b"/f\n")
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "out"], check=True)  # too long for pytest to remove


# -- existing entries


def old(path: Path) -> None:
    path.mkdir()
    for name, data in (("same", "old"), ("size", "other"), ("time", "old"), ("mine", "mine")):
        (path / name).write_text(data)
        (path / name).chmod(0o644)
        os.utime(path / name, (7 if name == "time" else 100, 7 if name == "time" else 100))
    (path / "link").symlink_to("old")
    (path / "file").mkdir()
    (path / "dir").write_text("a file")


NEW = {
    "same": file("new", mtime=100), "size": file("new", mtime=100), "time": file("new", mtime=100),
    "link": {"mode": L, "data": "new", "mtime": 100}, "file": file("new", mtime=100),
    "dir/f": file("new", mtime=100), "more": file("new", mtime=100),
}  # fmt: skip


def test_what_is_there_and_differs_is_an_error(tmp_path: Path) -> None:
    document, out = written(tmp_path / "a.json", NEW), tmp_path / "out"
    old(out)
    before = below(out)
    lines = copy(document, out, status=1)
    assert sorted(line.split(": ")[1] for line in lines) == ["dir", "file", "link", "size", "time"]
    after = below(out)
    assert after.pop("more").data == b"new"
    assert after == before


def test_overwrite_replaces_what_differs_and_removes_nothing(tmp_path: Path) -> None:
    document, out = written(tmp_path / "a.json", NEW), tmp_path / "out"
    old(out)
    assert [line.split(": ")[1] for line in copy(document, out, "--overwrite", status=1)] == ["file"]
    found = {key: state.data for key, state in below(out).items()}
    # `same` has the kind, the size and the time of its entry
    assert found == {
        "same": b"old", "size": b"new", "time": b"new", "mine": b"mine", "link": "new", "file": None, "dir": None,
        "dir/f": b"new", "more": b"new",
    }  # fmt: skip


def test_entries_without_a_time_are_compared(tmp_path: Path) -> None:
    """Standard input has no time: a file of the same size is done if it has the same bytes, and else in the way."""
    document = json.dumps({"a": file("aaa"), "b": file("bbb"), "c": file("ccc")}).encode()
    out = tmp_path / "out"
    command = [PROGRAM, "copy", "-", out]
    assert subprocess.run(command, input=document, check=False).returncode == 0
    before = (out / "a").stat().st_ino
    (out / "b").write_text("old")
    (out / "c").unlink()
    done = subprocess.run(command, input=document, capture_output=True, text=False, check=False)
    assert (done.returncode, done.stderr.count(b"\n"), b": b: " in done.stderr) == (1, 1, True)
    assert [(out / name).read_text() for name in "abc"] == ["aaa", "old", "ccc"]
    assert (out / "a").stat().st_ino == before
    assert subprocess.run([*command, "--overwrite"], input=document, check=False).returncode == 0
    assert [(out / name).read_text() for name in "abc"] == ["aaa", "bbb", "ccc"]


def test_a_destination_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    """Copying a private directory into a shared one does not make that private, and a new one is private at once."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(mode=0o700)
    (source / "f").touch()
    out.mkdir()
    out.chmod(0o2775)
    assert copy(source, out) == []
    assert stat.S_IMODE(out.stat().st_mode) == 0o2775
    assert copy(source, tmp_path / "new") == []
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["file", "dangling link", "no parent", "in the source", "share", "url", "not json"])
def test_bad_arguments_are_one_line_and_change_nothing(what: str, tmp_path: Path) -> None:
    source, out, more = tmp_path / "source", tmp_path / "out", ["--shard", "3/3"] if what == "share" else []
    source.mkdir()
    (source / "f").write_text("f")
    if what == "file":
        out.write_text("precious")
    elif what == "dangling link":
        out.symlink_to("nowhere")
    elif what == "no parent":
        out = tmp_path / "nothing/out"
    elif what == "in the source":
        out = source / "sub/copy"
    elif what == "not json":
        source = written(tmp_path / "a.json", "text")
    before = below(tmp_path)
    to = "s3://bucket/out" if what == "url" else out
    [line] = copy(source, to, *more, status=1 if what == "not json" else 2)[-1:]
    assert {"share": "--shard 3/3", "url": "s3://bucket/out", "not json": "a.json"}.get(what, str(out)) in line
    assert below(tmp_path) == before


# -- selection


DOCUMENT = {"a/x.nc": file("1"), "a/y.txt": file("2"), "b/a/z.nc": file("3"), "x.nc": file("4"), "e": {"mode": D}}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"a/x.nc", "a/y.txt", "b/a/z.nc", "x.nc", "e"}),
        ("--include *.nc", {"a/x.nc", "b/a/z.nc", "x.nc"}),
        ("--include a/*.nc", {"a/x.nc"}),
        ("--include ./a/", {"a/x.nc", "a/y.txt"}),
        ("--include a", {"a/x.nc", "a/y.txt", "b/a/z.nc"}),
        ("--exclude a", {"x.nc", "b", "e"}),
        ("--include a --exclude *.txt --exclude b", {"a/x.nc"}),
        ("--include a/x.nc --include none", {"a/x.nc"}),
    ],
)
def test_globs_select_entries_and_their_parents(words: str, expected: set[str], tmp_path: Path) -> None:
    document = written(tmp_path / "a.json", DOCUMENT)
    unmatched = "none" in words
    lines = copy(document, tmp_path / "out", *words.split(), status=int(unmatched))
    assert ["none" in line for line in lines] == [True] * unmatched
    parents = {key[:at] for key in expected for at in range(len(key)) if key[at] == "/"}
    assert below(tmp_path / "out").keys() == expected | parents


def test_shares_at_the_same_time_make_the_whole_copy(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    for index in range(200):
        (source / f"d{index % 5}/e{index % 3}").mkdir(parents=True, exist_ok=True)
        (source / f"d{index % 5}/e{index % 3}/{index}").write_bytes(b"x" * (index % 7 * 1000))
    (source / "empty").mkdir()
    (source / "link").symlink_to("d1")
    for at, _, _ in os.walk(source, topdown=False):
        os.utime(at, ns=(0, 7 * 10**9))
    (source / "d1/e1").chmod(0o500)
    for _ in range(2):
        shares = [subprocess.Popen([PROGRAM, "copy", "--shard", f"{index}/2", source, out]) for index in range(2)]
        assert [one.wait() for one in shares] == [0, 0]
        found, expected = below(out), below(source)
        assert found == expected
        files = [path for path in out.rglob("*") if path.is_file()]
        files[5].unlink()  # the same again makes what is missing


def test_shares_and_parts_of_a_read_only_directory(tmp_path: Path) -> None:
    """The first one gives the destination its mode, which must not keep the others from writing to it."""
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    for name in ("a", "b", "c", "d/e"):
        (source / name).write_text(name)
    for path in (source / "d", source):
        path.chmod(0o555)
    plain = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []  # as an ordinary user
    for out, runs in ("shared", [["--shard", f"{index}/3"] for index in range(3)]), ("parts", [["--include=d"], []]):
        for words in runs:
            subprocess.run([*plain, PROGRAM, "copy", source, tmp_path / out, *words], check=True)
        assert snapshot(tmp_path / out) == snapshot(source)


def test_a_copy_with_directories_closed_to_their_owner_is_completed(tmp_path: Path) -> None:
    entries = [
        {"path": "d", "mode": 0o40000, "mtime": 3}, {"path": "d/e", "mode": 0o40000, "mtime": 3},
        {"path": "d/e/f", **file("f", mtime=3)}, {"path": "g", "mode": 0o40100, "mtime": 3},
        {"path": "g/f", **file("g", mtime=3)},
    ]  # fmt: skip
    document, out = written(tmp_path / "a.json", entries), tmp_path / "out"
    plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    for _ in range(2):
        done = subprocess.run([*plain, PROGRAM, "copy", document, out], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert [stat.S_IMODE((out / name).stat().st_mode) for name in ("d", "d/e", "g")] == [0, 0, 0o100]
        assert ((out / "d/e/f").read_text(), (out / "g/f").read_text()) == ("f", "g")


# -- bad sources


def test_entries_that_cannot_be_read_are_named_and_the_rest_is_copied(tmp_path: Path) -> None:
    blobs, out = tmp_path / "blobs", tmp_path / "out"
    blobs.mkdir()
    entries, wrong = [{"path": "../x", **file("")}], ["../x", "bad"]
    for index in range(80):
        data = b"%d" % index * 1000
        entries.append({"path": f"good/{index}", **file([[0, len(data), put(blobs, data)]], encoding="blobvec",
                                                        size=len(data))})  # fmt: skip
    entries.append({"path": "bad", **file("!", encoding="base64")})
    for name in ("lying", "short", "lost", "fifo", "large"):
        data = name.encode() * (5_000_000 if name == "large" else 1000)
        path = blobs / put(blobs, data)
        vec = [[0, 5000, put(blobs, b"g" * 5000)], [5000, len(data), path.name]]  # after a good one
        entries.append({"path": f"bad-{name}", **file(vec, encoding="blobvec", size=5000 + len(data))})
        wrong.append(f"bad-{name}")
        path.unlink()
        if name == "lying":
            path.write_bytes(b"-" * len(data))
        elif name == "short":
            path.write_bytes(b"-")
        elif name == "fifo":
            os.mkfifo(path)
    document = written(tmp_path / "a.json", entries)
    report = json.loads(run("check", document, "--blobs", blobs, "--json").stdout)
    assert (report["ok"], report["clean"]) == (80, False)
    assert {bad["key"].removeprefix("bad-"): bad["kind"] for bad in report["bad"]} == {
        "bad": "unreadable", "lying": "wrong hash", "short": "out of range", "lost": "missing", "large": "missing",
        "fifo": "unreadable",
    }  # fmt: skip
    lines = [line for line in copy(document, out, "--blobs", blobs, status=1) if "warning" not in line]
    assert sorted(line.split(": ")[1] for line in lines) == sorted(wrong)
    assert all("sha1-" in line for line in lines if ": bad-" in line)
    assert below(out).keys() == {"good", *(f"good/{index}" for index in range(80))}
    lost = blobref(b"lost" * 1000)
    (blobs / lost).write_bytes(b"lost" * 1000)
    copy(document, out, "--blobs", blobs, status=1)
    assert (out / "bad-lost").read_bytes() == b"g" * 5000 + b"lost" * 1000


@pytest.mark.parametrize("more", [["-o", "upperdir=upper"], ["-o", "view=v3"]])
def test_what_a_document_or_a_view_leaves_out_is_no_success(more: list[str], tmp_path: Path) -> None:
    array = {"shape": [1], "chunks": [1], "dtype": "|u1", "compressor": {"id": "nosuch"}, "filters": None,
             "fill_value": 0, "order": "C", "zarr_format": 2}  # fmt: skip
    refs = {".zgroup": '{"zarr_format": 2}', "odd/.zarray": json.dumps(array), "odd/0": "x", "bad/../entry": "x"}
    written(tmp_path / "refs.json", {"version": 1, "refs": refs})
    (tmp_path / "upper").mkdir()
    lines = copy("refs.json", "out", *more, status=1, cwd=tmp_path)
    assert any("bad/../entry: " in line for line in lines)
    assert more[1] == "upperdir=upper" or any("odd: " in line for line in lines)
    lines = copy("refs.json", "out2", *more, "--exclude", "nothing", "--include", "[ob]*", status=1, cwd=tmp_path)
    assert any(line.endswith("bad/../entry: not a key: a part '..'") for line in lines)
    copy("refs.json", "out3", *more, "--exclude", "odd", "--exclude", "bad", cwd=tmp_path)


def test_an_entry_that_cannot_be_examined_is_named_and_the_rest_is_copied(tmp_path: Path) -> None:
    with folding(tmp_path / "mnt") as source:
        for name in ("a", "z"):
            (source / name).write_text(name)
        [line] = copy(source, tmp_path / "out", status=1)
    assert line.startswith("zarrfs: damaged: ")
    assert {at.name: at.read_text() for at in (tmp_path / "out").iterdir()} == {"a": "a", "z": "z"}


def test_a_file_of_a_user_at_a_reserved_name_is_kept(tmp_path: Path) -> None:
    document, out = written(tmp_path / "a.json", {".zarrfs-staging": file("x"), "f": file("f")}), tmp_path / "out"
    (out / ".zarrfs-staging").mkdir(parents=True)
    (out / ".zarrfs-staging/mine").write_text("precious")
    [line] = copy(document, out, status=1)
    assert ".zarrfs-staging" in line
    assert (out / ".zarrfs-staging/mine").read_text() == "precious"
    assert (out / "f").read_text() == "f"


# -- interrupted


def test_a_copy_killed_at_any_time_is_completed_by_the_same_command(tmp_path: Path) -> None:
    blobs, out = tmp_path / "blobs", tmp_path / "out"
    blobs.mkdir()
    root = {"path": ".", "mode": 0o40750, "mtime": 3}
    document = written(tmp_path / "a.json", [root, *archive_of(blobs, 400)])
    command = [PROGRAM, "copy", str(document), str(out), "--blobs", str(blobs)]
    began = time.monotonic()
    assert subprocess.run(command, check=False).returncode == 0
    whole = time.monotonic() - began
    expected, chance = snapshot(out), random.Random(os.urandom(8))
    subprocess.run(["rm", "-rf", out], check=True)
    killed = 0
    while killed < KILLS:
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.3, 1.0) * whole)
        process.kill()
        _, err = process.communicate()
        killed += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL), err
        if out.exists():
            found = snapshot(out)
            assert found.keys() <= expected.keys()
            for key, state in found.items():
                if state.kind is Kind.FILE:  # a link gets its time after its name
                    assert state == expected[key], key
            if process.returncode == 0 or chance.random() < 0.4:
                assert subprocess.run(command, check=False).returncode == 0
                assert snapshot(out) == expected
                subprocess.run(["rm", "-rf", out], check=True)


def test_the_number_of_many_failures_is_the_last_line(tmp_path: Path) -> None:
    document = written(tmp_path / "refs.json", {f"a/{number}": ["/nonexistent", 0, 1] for number in range(1200)})
    *lines, last = copy(document, tmp_path / "out", status=1)
    assert {line.split(": ")[1] for line in lines} == {f"a/{number}" for number in range(1200)}
    assert "1,200 entries" in last


def test_the_rest_is_copied_when_failures_cannot_be_printed(tmp_path: Path) -> None:
    document = written(tmp_path / "refs.json", {"a/b": ["/nonexistent", 0, 1], **{f"z/{i}": "x" for i in range(3000)}})
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "copy", document, tmp_path / "out"], stderr=full, check=False)
    assert done.returncode == 1
    assert len(os.listdir(tmp_path / "out/z")) == 3000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_copy_that_is_interrupted_leaves_no_part_of_a_file(number: int, nginx: Nginx, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (nginx.listing.root / "interrupted").mkdir(exist_ok=True)
    (nginx.listing.root / "interrupted/.zgroup").write_text('{"zarr_format": 2}')
    big = nginx.listing.root / "interrupted/big"
    (nginx.listing.root / "interrupted/other").write_text("new")
    out.mkdir()
    (out / "other").write_text("the user's own")
    with open(big, "wb") as file:
        file.truncate(4 << 30)
    command = [PROGRAM, "copy", f"{nginx.listing.url}/interrupted", out]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("zarrfs: other: is there already")  # before the end
    until((out / ".zgroup").exists)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-number, "")
    assert sorted(os.listdir(out)) == [".zgroup", "other"]


def test_commands_that_wait_for_a_dead_file_system_can_be_interrupted(tmp_path: Path) -> None:
    """They wait in a system call, in which no handler of Python runs."""
    with mounted(written(tmp_path / "refs.json", {"version": 1, "refs": {"a": "a"}}), tmp_path / "mnt") as root:
        daemon = daemon_pid(root)
        # a request that it has read would keep a process that is killed, too
        os.kill(daemon, signal.SIGSTOP)
        try:
            commit = ["commit", root, "--upperdir", tmp_path / "upper", "-O", tmp_path / "new.json"]
            for words in ["copy", root, tmp_path / "out"], ["check", root], commit:
                process = subprocess.Popen([PROGRAM, *words], stderr=subprocess.PIPE)
                until(lambda at=Path(f"/proc/{process.pid}/wchan"): at.read_text() == "request_wait_answer")
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=60)
                assert (process.returncode, err) == (-signal.SIGINT, b"")
        finally:
            os.kill(daemon, signal.SIGCONT)


def test_a_full_disk_ends_the_copy_and_it_can_be_completed(tmp_path: Path) -> None:
    document = written(tmp_path / "a.json", archive_of(tmp_path, 300))
    assert copy(document, tmp_path / "expected", "--blobs", tmp_path) == []
    expected = below(tmp_path / "expected")
    with tmpfs(tmp_path / "small", "size=1m") as small:
        [line] = copy(document, small / "out", "--blobs", tmp_path, status=1)
        assert "no space left" in line
        found = {key: state for key, state in below(small / "out").items() if state.data is not None}
        assert found
        assert all(state == expected[key] for key, state in found.items())
        subprocess.run(["mount", "-o", "remount,size=100m", small], check=True)
        assert copy(document, small / "out", "--blobs", tmp_path) == []
        assert below(small / "out") == expected


@contextlib.contextmanager
def folding(path: Path) -> Iterator[Path]:
    """Mount a file system that folds names on the new directory `path`."""
    path.mkdir()
    with subprocess.Popen([sys.executable, "-m", "tests.foldingfs", path]) as daemon:
        until(lambda: os.path.ismount(path))
        try:
            yield path
        finally:
            subprocess.run(["umount", path], check=True)
            daemon.wait(60)


def test_names_that_a_destination_folds_are_named_and_replace_nothing(tmp_path: Path) -> None:
    paths = {"FILE", "file", "Group/a", "group/b", "Both", "both/c"}
    document = written(tmp_path / "a.json", [{"path": path, **file(path, mtime=3)} for path in paths])
    with folding(tmp_path / "mnt") as mnt:
        for more in ((), ("--overwrite",), ()):
            lines = copy(document, mnt / "out", *more, status=1)
            found = {os.path.relpath(os.path.join(at, name), mnt / "out") for at, _, files in os.walk(mnt / "out")
                     for name in files}  # fmt: skip
            assert len(found) == 3  # one of each pair
            assert all((mnt / "out" / path).read_text() == path for path in found)
            lost = {path.split("/")[0] for path in paths - found}
            assert sorted(line.split(": ")[1] for line in lines) == sorted(lost)


def test_a_read_only_destination(tmp_path: Path) -> None:
    document = written(tmp_path / "a.json", {"f": file("x"), "g": file("y")})
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for out, status in ((disk, 1), (disk / "out", 2)):
            [line] = copy(document, out, status=status)
            assert "read-only file system" in line


# -- other processes


def swap(out: str, outside: str, names: list[str], stop: Any) -> None:
    """Replace the directories `names` by links to `outside`, again and again until `stop` is set."""
    turn = 0
    while not stop.is_set():
        for name in names:
            path, aside = os.path.join(out, name), os.path.join(out, f"aside{turn}")
            turn += 1
            with contextlib.suppress(OSError):
                os.rename(path, aside)
            with contextlib.suppress(OSError):
                os.symlink(outside, path)
            time.sleep(0.0005)  # without a pause, the copy would write nothing at all


def test_directories_that_turn_into_links_meanwhile(tmp_path: Path) -> None:
    document = written(tmp_path / "a.json", archive_of(tmp_path, 1000, seed=2))
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    names = [f"d{index}" for index in range(13)] + [f"d{index}/e{index % 3}" for index in range(13)]
    stop = multiprocessing.Event()
    attacker = multiprocessing.get_context("fork").Process(target=swap, args=(str(out), str(outside), names, stop))
    attacker.start()
    try:
        run("copy", document, out, "--blobs", tmp_path, "--overwrite")
    finally:
        stop.set()
        attacker.join()
    # the attacker's own links are created there, too
    assert [name for name in os.listdir(outside) if not os.path.islink(outside / name)] == []


def test_a_fifo_that_turns_into_a_link_meanwhile(tmp_path: Path) -> None:
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.write_text("private")
    outside.chmod(0o600)
    target = TargetDirectory(str(out), Info("", Kind.DIRECTORY), False)
    directory = target.enter(Folder("", Info("", Kind.DIRECTORY), None, own=True))
    (out / "fifo").symlink_to(outside)
    with contextlib.suppress(OSError):
        target.dress_special(directory, Info("fifo", Kind.FILE, 1, 0o666, unreadable=FIFO))
    os.close(directory)
    target.close()
    assert outside.stat().st_mode & 0o777 == 0o600
