"""zarrfs stage --copy and --link: content, manifests, resuming and removal, and which files are linked."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.staging import Node, eventually, one_line
from tests.mounts.staging import node as node
from tests.servers import faulty as faulty

SOURCE = DATA / "zarr/v2_hier"


def equal(one: Path, other: Path) -> bool:
    """Return whether two trees have the same content."""
    return subprocess.run(["diff", "-r", one, other], check=False).returncode == 0


def files(path: Path) -> dict[str, Path]:
    """Return {key: path} of every file below a directory."""
    return {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}


def test_a_copy_has_a_manifest_and_unstage_keeps_its_files(node: Node) -> None:
    dest = node.path / "input"
    done = run("stage", "--copy", SOURCE, dest, "--report", "-")
    assert done.returncode == 0, done.stderr
    assert equal(SOURCE, dest)
    manifest = node.path / "input.manifest.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    assert {line["key"]: (line["size"], line["sha256"]) for line in lines} == {
        key: (file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()) for key, file in files(dest).items()
    }
    report = json.loads(done.stdout)
    assert (report["files"], report["manifest"]) == (len(lines), str(manifest))
    assert run("stage", "--copy", DATA, dest).returncode == 1  # another source is staged there
    assert run("unstage", dest).returncode == 0
    assert equal(SOURCE, dest)
    assert not node.records()
    assert "is there already" in one_line(run("stage", "--copy", SOURCE, dest).stderr)
    assert equal(SOURCE, dest)


@pytest.mark.parametrize("extra", [(), ("--no-manifest", "--link")])
def test_unstage_removes_only_files_of_the_copy(node: Node, extra: tuple[str, ...]) -> None:
    dest, other = node.path / "input", node.path / "other"
    (dest / "empty").mkdir(parents=True)
    (dest / "mine").write_text("mine")
    time.sleep(0.02)  # a tick of the file system's clock
    assert run("stage", "--copy", SOURCE, dest, *extra).returncode == 0
    time.sleep(0.02)
    (dest / "gzip/result").write_text("of the job")
    (dest / ".zgroup").unlink()
    (dest / ".zgroup").write_text("changed")
    (dest / "blosc").rename(other)
    (dest / "blosc").symlink_to(other)
    before = files(other)
    assert before
    done = run("unstage", dest, "--remove-copies")
    assert done.returncode == 0
    text = f"{dest}: 4 files that the copy has not written, or that have changed since, stay"
    assert one_line(done.stderr) == f"zarrfs: {text}"
    assert node.clean()
    assert sorted(files(dest)) == [".zgroup", "gzip/result", "mine"]
    assert (dest / "blosc").is_symlink()
    assert (dest / "empty").is_dir()
    assert files(other) == before


def entries(directory: Path) -> list[str]:
    """Return the names in a directory; none if it does not exist."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def test_unstage_removes_the_files_of_killed_copies_and_no_others(node: Node) -> None:
    source, dest = node.path / "source", node.path / "input"
    dest.mkdir()
    (dest / "mine").write_text("mine")
    source.mkdir()
    for index in range(4000):
        (source / f"{index}").write_bytes(bytes(100))
    child = subprocess.Popen([PROGRAM, "stage", "--copy", source, dest])
    assert eventually(lambda: len(os.listdir(dest)) > 100)
    child.kill()
    child.wait()
    assert eventually(lambda: not node.processes())  # the child processes exit a moment later
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert sorted(os.listdir(dest)) == ["mine"]
    child = subprocess.Popen([PROGRAM, "stage", "--copy", source, dest])
    assert eventually(lambda: len(os.listdir(dest)) > 100)
    child.kill()
    child.wait()
    assert eventually(lambda: not node.processes())
    time.sleep(0.3)
    (dest / "between").write_text("mine, too")
    time.sleep(0.02)
    child = subprocess.Popen([PROGRAM, "stage", "--copy", source, dest])
    assert eventually(lambda: child.poll() is not None or len(entries(dest / ".zarrfs-staging")) > 1)
    child.send_signal(signal.SIGINT)
    child.wait()
    (dest / "and between").write_text("mine, too")
    time.sleep(0.02)
    assert run("stage", "--copy", source, dest).returncode == 0
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert sorted(os.listdir(dest)) == ["and between", "between", "mine"]


def test_a_copy_with_a_mount_in_it_is_not_removed(node: Node) -> None:
    dest, inner = node.path / "input", node.path / "input/inner"
    assert run("stage", "--copy", SOURCE, dest).returncode == 0
    inner.mkdir()
    assert run("stage", SOURCE, inner).returncode == 0
    done = run("unstage", dest, "--remove-copies")
    assert (done.returncode, "is mounted in it" in one_line(done.stderr)) == (1, True)
    assert (inner / ".zgroup").exists()


def test_staging_again_does_not_replace_a_file_that_a_job_has_changed(node: Node) -> None:
    dest = node.path / "input"
    assert run("stage", "--copy", SOURCE, dest).returncode == 0
    changed = next(key for key, file in files(dest).items() if not file.is_symlink())
    (dest / changed).write_text("changed")
    done = run("stage", "--copy", SOURCE, dest)
    assert (done.returncode, f"{changed}: is there already" in one_line(done.stderr)) == (1, True)
    assert (dest / changed).read_text() == "changed"
    assert ".zarrfs-staging" not in os.listdir(dest)
    assert [one["state"] for one in node.records()] == ["ready"]
    (dest / changed).unlink()
    assert run("stage", "--copy", SOURCE, dest).returncode == 0
    (dest / changed).write_text("changed")
    assert run("stage", "--copy", SOURCE, dest).returncode == 1
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert files(dest) == {changed: dest / changed}
    assert not (node.path / "input.manifest.jsonl").exists()


def test_a_copy_is_not_made_in_its_source(node: Node) -> None:
    source = node.path / "source"
    source.mkdir()
    (source / "f").write_text("1")
    done = run("stage", "--copy", source, source / "sub/copy")
    assert (done.returncode, "sub/copy: lies in " in one_line(done.stderr)) == (2, True)
    done = run("stage", "--copy", source, node.path / "copy", "--manifest", source / "manifest")
    assert (done.returncode, "manifest: lies in " in one_line(done.stderr)) == (2, True)
    assert os.listdir(source) == ["f"]
