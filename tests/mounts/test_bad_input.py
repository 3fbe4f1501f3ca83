"""Bad input: one line that names the file, the entry and the rule, a non-zero exit status, and nothing mounted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.mounting import daemon_pid, mount_lines, mounted

ARCHIVE_FILE = {"path": "a", "mode": 0o100644, "size": 1, "encoding": "utf-8", "data": "x"}

REFUSED: dict[str, tuple[str, list[str], list[str]]] = {
    # name: (document, options, words of the error)
    "truncated": ('{"version": 1, "refs": {"a": "b"', [], ["not JSON"]),
    "neither": ('"text"', [], ["neither"]),
    "template-raises": (
        '{"version": 1, "templates": {"u": "x"}, "refs": {"k": ["{{1 // 0}}", 0, 1]}}', [], ["k", "zero"],
    ),
    "archive-conflict": (json.dumps([ARCHIVE_FILE, {**ARCHIVE_FILE, "path": "a/b"}]), [], ["a"]),
    "blobs-missing": (json.dumps([ARCHIVE_FILE]), ["blobs=/nonexistent/blobs"], ["/nonexistent/blobs"]),
    "unknown-option": (json.dumps([ARCHIVE_FILE]), ["blob=/x"], ["blob", "blobs"]),
    "bad-log": (json.dumps([ARCHIVE_FILE]), ["log_file=/nonexistent/x"], ["/nonexistent/x", "no such file"]),
    "bad-user": (json.dumps([ARCHIVE_FILE]), ["uid=99999999999"], ["uid=99999999999"]),
    "both-allowed": (json.dumps([ARCHIVE_FILE]), ["allow_other,allow_root"], ["allow_other", "allow_root"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    text, options, words = REFUSED[name]
    document, mountpoint = tmp_path / "doc.json", tmp_path / "mnt"
    document.write_text(text)
    mountpoint.mkdir()
    done = run("mount", document, mountpoint, *(part for option in options for part in ("-o", option)))
    assert done.returncode not in (0, None)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    if not (options and "=" in options[0]) and name != "both-allowed":
        assert str(document) in lines[0]
    assert not mount_lines(mountpoint)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/nonexistent/refs.json", ["/nonexistent/refs.json", "no such file"]),
        ("/dev/zero", ["/dev/zero", "regular"]),
        ("http://127.0.0.1:9/refs.json", ["http://127.0.0.1:9/refs.json"]),
        ("nosuch://bucket/refs.json", ["nosuch"]),
    ],
)
def test_a_source_that_cannot_be_opened_is_refused(source: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    done = run("mount", source, tmp_path / "mnt", "-o", "retries=0")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr.lower() for word in words), done.stderr
    assert not mount_lines(tmp_path / "mnt")


@pytest.mark.parametrize(
    ("source", "mountpoint", "more", "says"),
    [
        (DATA / "zarr/v2_hier", "nothing", (), "no such file or directory; make the directory: mkdir "),
        (DATA / "zarr/v2_hier", "file", (), "not a directory"),
        (".", "mnt", (), "inside the source"),
        (DATA / "zarr/v2_hier", "mnt", ("-o", "log_file=mnt/file"), "lies beneath the mount point, which would"),
    ],
)
def test_a_mount_point_that_cannot_be_used_is_refused(
    source: object, mountpoint: str, more: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "file").touch()
    done = run("mount", source, mountpoint, *more, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2 if more else 1, 1)
    assert says in done.stderr
    assert os.listdir(tmp_path / "mnt") == []


def test_a_mount_over_its_source_refuses_a_refresh_and_still_serves(tmp_path: Path) -> None:
    source = tmp_path / "store"
    shutil.copytree(DATA / "zarr/v2_hier", source)
    with mounted(source, source, "attr_timeout=0") as root:
        hung = threading.Timer(60, os.kill, (daemon_pid(root), signal.SIGKILL))
        hung.start()
        done = run("refresh", root)
        found = (root / ".zgroup").read_bytes()
        hung.cancel()
        assert done.returncode == 1
        assert "is hidden by this mount, which lies over it" in done.stderr
        assert found == (DATA / "zarr/v2_hier/.zgroup").read_bytes()


def test_interrupted_compilation_leaves_nothing(tmp_path: Path) -> None:
    document, index, mnt = tmp_path / "refs.json", tmp_path / "zarrfs/index", tmp_path / "mnt"
    mnt.mkdir()
    gen = {"key": "{{i}}", "url": "u", "dimensions": {"i": {"stop": 2_000_000}}}
    document.write_text(json.dumps({"version": 1, "gen": [gen]}))
    own = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    mount = subprocess.Popen([PROGRAM, "mount", document, mnt], stderr=subprocess.PIPE, env=own)
    while not index.exists() or not list(index.iterdir()):
        assert mount.poll() is None
    mount.send_signal(signal.SIGINT)
    assert mount.wait(60) == 130
    assert [one for one in index.iterdir() if one.suffix != ".lock"] == []  # its lock may just have been made
    assert not mount_lines(mnt)
