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
    "version": ('{"version": 2, "refs": {}}', [], ["version"]),
    "unknown-variable": (
        '{"version": 1, "templates": {"u": "x"}, "refs": {"k": ["{{nope}}", 0, 1]}}', [], ["k", "nope"],
    ),
    "template-raises": (
        '{"version": 1, "templates": {"u": "x"}, "refs": {"k": ["{{1 // 0}}", 0, 1]}}', [], ["k", "zero"],
    ),
    "gen-bound": (
        json.dumps({"version": 1, "gen": [{
            "key": "{{i}}.{{j}}", "url": "u", "dimensions": {"i": {"stop": 10**6}, "j": {"stop": 10**6}}}]}),
        [], ["gen"],
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


def test_a_mount_point_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    done = run("mount", DATA / "zarr/v2_hier", tmp_path / "nothing")
    assert done.returncode == 1
    assert f"{tmp_path}/nothing: no such file or directory; make the directory: mkdir {tmp_path}/no" in done.stderr
    (tmp_path / "file").write_text("")
    done = run("mount", DATA / "zarr/v2_hier", tmp_path / "file")
    assert done.returncode == 1
    assert "not a directory" in done.stderr


def test_a_mount_point_in_use_is_refused(tmp_path: Path) -> None:
    with mounted(DATA / "zarr/v2_hier", tmp_path / "mnt") as root:
        done = run("mount", DATA / "zarr/v3_hier", root)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "already a mount point" in done.stderr
        assert f"unmount it (zarrfs umount {root}), or take another directory" in done.stderr


def test_a_mount_point_inside_the_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    done = run("mount", tmp_path, tmp_path / "mnt")
    assert done.returncode == 1
    assert "inside the source" in done.stderr
    assert not mount_lines(tmp_path / "mnt")


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


def test_the_log_file_may_not_be_beneath_the_mount_point(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    done = run("mount", DATA / "zarr/v2_hier", tmp_path / "mnt", "-o", f"log_file={tmp_path}/mnt/file")
    said = f"option log_file={tmp_path}/mnt/file: lies beneath the mount point, which would hide it"
    assert (done.returncode, said in done.stderr) == (2, True)
    assert os.listdir(tmp_path / "mnt") == []


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
