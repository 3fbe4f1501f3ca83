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

from tests.conftest import DATA, PROGRAM, run, tmpfs
from tests.mounts.staging import Node, eventually, one_line
from tests.mounts.staging import node as node
from tests.servers import Faulty
from tests.servers import faulty as faulty
from zarrfs.config.options import Options
from zarrfs.sources import fingerprint, plan_source
from zarrfs.store.upper import Upper

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


def test_a_manifest_on_a_full_disk_is_an_error(node: Node) -> None:
    source = node.path / "source"
    source.mkdir()
    for index in range(2000):
        (source / f"{index}").touch()
    with tmpfs(node.path / "small", "size=16k") as small:
        done = run("stage", "--copy", source, node.path / "dest", "--manifest", small / "m.jsonl")
        assert one_line(done.stderr) == f"zarrfs: {small}/m.jsonl: cannot be written: no space left on device"
        assert list(small.iterdir()) == []
    assert node.clean()


def test_unstage_removes_a_copy_if_asked(node: Node) -> None:
    dest = node.path / "a/input"
    assert run("stage", "--copy", SOURCE, dest, "--manifest", node.path / "m.sha256").returncode == 0
    sums = ["sha256sum", "-c", "--quiet", node.path / "m.sha256"]
    assert subprocess.run(sums, cwd=dest, check=False).returncode == 0
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert node.clean()
    assert not (node.path / "a").exists()
    assert not (node.path / "m.sha256").exists()


def test_a_manifest_is_valid_json_for_any_file_name(node: Node) -> None:
    source, manifest = node.path / "source", node.path / "m.jsonl"
    source.mkdir()
    names = ["nämé", "not\udcffutf8", "line\nend", '"']
    for name in names:
        (source / name).touch()
    assert run("stage", "--copy", source, node.path / "in", "--manifest", manifest).returncode == 0
    lines = manifest.read_bytes().decode("utf-8").splitlines()
    assert sorted(json.loads(line)["key"] for line in lines) == sorted(names)
    assert any("nämé" in line for line in lines)


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


def test_unstage_removes_the_partial_manifest_of_a_killed_copy(node: Node) -> None:
    archive = node.path / "sparse.json"
    archive.write_text(json.dumps([{"path": "holes", "mode": 0o100644, "size": 15 << 30}]))  # hashing takes long
    child = subprocess.Popen([PROGRAM, "stage", "--copy", archive, node.path / "a"])
    assert eventually(lambda: list(node.path.glob("a.manifest.jsonl.*.tmp")) != [])
    child.kill()
    child.wait()
    assert run("unstage", "--stale").returncode == 0
    assert list(node.path.glob("*.manifest*")) == []
    assert node.clean()


def test_a_node_local_copy_is_removed_with_its_link(node: Node) -> None:
    dest = node.path / "input"
    assert run("stage", "--copy", "--no-manifest", SOURCE, dest, "--node-local").returncode == 0
    assert equal(SOURCE, dest)
    assert dest.resolve().parent == node.local
    assert list(node.path.glob("*.manifest*")) == []
    assert run("unstage", dest).returncode == 0
    assert node.clean()
    assert not dest.is_symlink()


def test_a_node_local_copy_starts_only_if_its_link_can_be_created(node: Node) -> None:
    dest = node.path / "input"
    dest.mkdir()
    (dest / "x").touch()
    done = run("stage", "--copy", "--no-manifest", SOURCE, dest, "--node-local")
    assert (done.returncode, one_line(done.stderr)) == (1, f"zarrfs: {dest}: is not empty")
    assert node.clean()


def test_a_copy_to_the_working_directory_has_its_manifest_beside_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node.path / "in").mkdir()
    monkeypatch.chdir(node.path / "in")
    done = run("stage", "--copy", SOURCE, ".")
    assert done.returncode == 0, done.stderr
    assert (node.path / "in.manifest.jsonl").exists()
    assert equal(SOURCE, node.path / "in")
    assert run("unstage", ".").returncode == 0


def test_a_copy_with_a_mount_in_it_is_not_removed(node: Node) -> None:
    dest, inner = node.path / "input", node.path / "input/inner"
    assert run("stage", "--copy", SOURCE, dest).returncode == 0
    inner.mkdir()
    assert run("stage", SOURCE, inner).returncode == 0
    done = run("unstage", dest, "--remove-copies")
    assert (done.returncode, "is mounted in it" in one_line(done.stderr)) == (1, True)
    assert (inner / ".zgroup").exists()


def test_globs_select_the_files_to_copy(node: Node) -> None:
    dest = node.path / "input"
    arguments = ["--include", "gzip", "--include", "*/.zattrs", "--exclude", "*.0"]
    assert run("stage", "--copy", SOURCE, dest, *arguments).returncode == 0
    found = files(dest)
    assert "gzip/.zarray" in found
    assert not [key for key in found if key.endswith(".0") or not (key.startswith("gzip/") or key.endswith(".zattrs"))]
    assert run("stage", SOURCE, node.path / "m", "--include", "gzip").returncode == 2


def test_only_whole_files_outside_job_directories_are_linked(node: Node) -> None:
    data = node.path / "data.bin"
    data.write_bytes(bytes(range(256)))
    short = node.local / "gone.bin"
    short.write_bytes(b"gone with the job")
    refs = node.path / "refs.json"
    refs.write_text(json.dumps({
        "whole": [str(data)], "part": [str(data), 16, 4], "inline": "text", "job's": [str(short)],
    }))  # fmt: skip
    dest = node.path / "input"
    done = run("stage", "--link", refs, dest, "--report", "-", env={**os.environ, "SLURM_TMPDIR": str(node.local)})
    assert done.returncode == 0, done.stderr
    assert os.readlink(dest / "whole") == str(data)
    assert [name for name in sorted(os.listdir(dest)) if not (dest / name).is_symlink()] == ["inline", "job's", "part"]
    assert (dest / "part").read_bytes() == bytes(range(16, 20))
    assert (dest / "job's").read_bytes() == b"gone with the job"
    assert (json.loads(done.stdout)["linked"], "1 files are links, 3 were copied" in done.stderr) == (1, True)
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert data.stat().st_size == 256  # the link is removed, not its target
    short.unlink()
    assert node.clean()


def test_a_directory_is_linked_file_by_file(node: Node) -> None:
    dest = node.path / "input"
    assert run("stage", "--link", SOURCE, dest).returncode == 0
    found = [file for file in dest.rglob("*") if not file.is_dir()]
    assert found
    assert all(file.is_symlink() and Path(os.readlink(file)).is_relative_to(SOURCE) for file in found)
    assert equal(SOURCE, dest)


@pytest.mark.parametrize("unstaged", [False, True])
def test_unreadable_entries_are_reported(unstaged: bool, node: Node) -> None:
    refs, dest = node.path / "refs.json", node.path / "input"
    refs.write_text(json.dumps({"good": "x", "bad": [str(node.path / "nothing"), 0, 4]}))
    done = run("stage", "--copy", refs, dest, "--report", "-")
    assert (done.returncode, "nothing" in one_line(done.stderr)) == (1, True)
    assert json.loads(done.stdout)["error"]
    assert not node.records()
    done = run("stage", "--copy", refs, dest, "--keep-going", "--report", "-")
    assert done.returncode == 1
    assert (dest / "good").read_text() == "x"
    assert [bad["key"] for bad in json.loads(done.stdout)["failed"]] == ["bad"]
    if unstaged:
        assert run("unstage", dest).returncode == 0
    (node.path / "nothing").write_text("found")
    done = run("stage", "--copy", refs, dest, "--report", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["resumed"] == 1
    assert sorted(os.listdir(dest)) == ["bad", "good"]


def test_staging_again_resumes_the_same_copy(node: Node) -> None:
    """As when a job is requeued: complete files are kept, and unstage still removes them."""
    dest = node.path / "made" / "input"
    assert run("stage", "--copy", SOURCE, dest).returncode == 0
    before = {key: file.lstat().st_ino for key, file in files(dest).items()}
    (dest / "of the job").write_text("mine")
    done = run("stage", "--copy", SOURCE, dest, "--report", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["resumed"] == len(before)
    (dest / "of the job").unlink()
    assert {key: file.lstat().st_ino for key, file in files(dest).items()} == before
    (dest / "of the job").write_text("mine")
    (dest / next(iter(before))).unlink()
    assert run("stage", "--copy", SOURCE, dest).returncode == 0
    assert set(files(dest)) == {*before, "of the job"}
    done = run("stage", "--copy", DATA, dest)
    assert (done.returncode, "is staged there already" in one_line(done.stderr)) == (1, True)
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert set(files(dest)) == {"of the job"}


@pytest.mark.parametrize("how", ["--copy", "--link"])
def test_a_source_staged_twice_is_removed_without_leftovers(how: str, node: Node) -> None:
    dest, said = node.path / "made" / "input", []
    for _ in range(2):
        done = run("stage", how, SOURCE, dest, "--report", "-")
        assert done.returncode == 0, done.stderr
        manifest = [json.loads(line) for line in (dest.parent / "input.manifest.jsonl").read_text().splitlines()]
        said.append((json.loads(done.stdout)["linked"], {line["key"]: line["sha256"] for line in manifest}))
    assert said[0] == said[1]
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert not dest.parent.exists()


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


def test_a_copy_belongs_to_one_job(node: Node) -> None:
    """Another job cannot stage at the same place while a process of the first one is running."""
    dest = node.path / "input"
    with subprocess.Popen(["sleep", "60"]) as process:
        assert run("stage", "--copy", SOURCE, dest, "--for", process.pid).returncode == 0
        done = run("stage", "--copy", SOURCE, dest, "--for", os.getpid())
        assert (done.returncode, "is staged there already" in one_line(done.stderr)) == (1, True)
        process.kill()


def test_a_killed_copy_resumes(node: Node, faulty: Faulty) -> None:
    """A second run does not fetch complete files again."""
    dest, refs = node.path / "input", node.path / "refs.json"
    urls = [faulty.put(f"/{number}", b"%d" % number * 100) for number in range(300)]
    faulty.put("/99", b"99" * 100, forever="slow")  # the last file of the listing
    refs.write_text(json.dumps({f"dir/{number}": [url] for number, url in enumerate(urls)}))
    arguments = [PROGRAM, "stage", "--copy", "-o", "cache=none", str(refs), str(dest)]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    assert eventually(lambda: dest.exists() and len(files(dest)) >= 100 and faulty.arrived.is_set())
    time.sleep(0.3)
    process.kill()
    process.wait()
    faulty.put("/99", b"99" * 100)
    there = {key for key in files(dest) if key.startswith("dir/")}
    done = run("stage", "--copy", refs, dest, "--report", "-", "-o", "cache=none")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed"] == len(there) > 0
    assert {path for method, path, _ in faulty.requests if method == "GET"}.isdisjoint(f"/{key[4:]}" for key in there)
    lines = [json.loads(line) for line in (node.path / "input.manifest.jsonl").read_text().splitlines()]
    sizes = {key: file.stat().st_size for key, file in files(dest).items()}
    assert {line["key"]: line["size"] for line in lines} == sizes
    assert {key: file.read_bytes() for key, file in files(dest).items()} == {
        f"dir/{number}": b"%d" % number * 100 for number in range(300)
    }


def test_a_copy_resumes_after_its_document_was_touched(node: Node) -> None:
    """Entries take the time of the document, so complete files are written again. This was once refused."""
    dest, refs = node.path / "input", node.path / "refs.json"
    refs.write_text(json.dumps({"a": "inline", "b": [str(node.path / "target")]}))
    assert "target" in one_line(run("stage", "--copy", refs, dest).stderr)
    assert sorted(files(dest)) == [".zarrfs-staging/note", "a"]
    os.utime(refs, (7, 7))
    (node.path / "target").write_text("there now")
    done = run("stage", "--copy", refs, dest)
    assert (done.returncode, done.stderr) == (0, "")
    assert {key: (file.read_text(), file.stat().st_mtime) for key, file in files(dest).items()} == {
        "a": ("inline", 7), "b": ("there now", 7),
    }  # fmt: skip


@pytest.mark.parametrize("option", ["base", "upperdir"])
def test_a_copy_is_not_resumed_with_another_base_or_upper(option: str, node: Node) -> None:
    """The second copy would keep files that were read with the first base or upper."""
    dest, refs = node.path / "input", node.path / "refs.json"
    refs.write_text(json.dumps({"a": ["x.bin", 0, 4], "b": ["y.bin", 0, 4]}))
    for name, values in {"one": {"a": "AAAA"}, "two": {"a": "BBBB", "b": "YYYY"}}.items():
        place = node.path / name
        place.mkdir()
        if option == "upperdir":
            plan = plan_source(str(refs), Options())
            upper = Upper(str(place), over={"source": plan.source, "fingerprint": fingerprint(plan), "view": None})
            upper.lock(True)
            upper.close()
        for key, value in values.items():
            (place / (key if option == "upperdir" else {"a": "x.bin", "b": "y.bin"}[key])).write_text(value)
    done = run("stage", "--copy", "--keep-going", refs, dest, "-o", f"{option}={node.path}/one")
    assert done.returncode == 1, done.stderr
    assert (dest / "a").read_text() == "AAAA"
    done = run("stage", "--copy", refs, dest, "-o", f"{option}={node.path}/two")
    assert (done.returncode, "a: is there already" in one_line(done.stderr)) == (1, True)
    assert (dest / "a").read_text() == "AAAA"


def test_a_copy_is_not_made_in_its_source(node: Node) -> None:
    source = node.path / "source"
    source.mkdir()
    (source / "f").write_text("1")
    done = run("stage", "--copy", source, source / "sub/copy")
    assert (done.returncode, "sub/copy: lies in " in one_line(done.stderr)) == (2, True)
    done = run("stage", "--copy", source, node.path / "copy", "--manifest", source / "manifest")
    assert (done.returncode, "manifest: lies in " in one_line(done.stderr)) == (2, True)
    assert os.listdir(source) == ["f"]


@pytest.mark.parametrize("words", ["unstage DEST", "unstage --job DEST", "stage-out DEST --to out",
                                   "stage-out --upperdir upper --to DEST"])  # fmt: skip
def test_an_empty_argument_is_not_the_working_directory(
    words: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script passes it if a variable is not set. It was once taken for the working directory."""
    monkeypatch.chdir(node.path)
    (node.path / "upper").mkdir()
    (node.path / "upper/new").write_text("new")
    assert run("stage", "--copy", "--no-manifest", SOURCE, "input").returncode == 0
    monkeypatch.chdir(node.path / "input")
    before = files(node.path)
    places = {"DEST": "", "upper": str(node.path / "upper")}
    done = run(*(places.get(word, word) for word in words.split()))
    assert (done.returncode, "expected" in done.stderr) == (2, True)
    assert (files(node.path), len(node.records())) == (before, 1)


def test_a_report_says_that_nothing_is_staged(node: Node) -> None:
    done, why = run("unstage", node.path / "input", "--report", "-"), f"{node.path}/input: nothing is staged there"
    assert (done.returncode, one_line(done.stderr)) == (1, f"zarrfs: {why}")
    assert [one["error"] for one in json.loads(done.stdout)["failed"]] == [why]


@pytest.mark.parametrize("wrong", ["in dest", "no directory"])
def test_a_manifest_that_cannot_be_written_is_an_error(wrong: str, node: Node) -> None:
    path = node.path / ("input/manifest" if wrong == "in dest" else "nowhere/manifest")
    done = run("stage", "--copy", SOURCE, node.path / "input", "--manifest", path)
    assert done.returncode in (1, 2)
    assert "manifest" in one_line(done.stderr)
    assert node.clean()


def test_a_hole_of_any_size_is_copied_and_not_hashed(node: Node) -> None:
    archive = node.path / "sparse.json"
    archive.write_text(json.dumps([{"path": "huge", "mode": 0o100644, "size": 1 << 40}]))
    done = run("stage", "--copy", archive, node.path / "a")
    assert done.returncode == 0, done.stderr
    assert "huge: is not hashed" in one_line(done.stderr)
    assert json.loads((node.path / "a.manifest.jsonl").read_text())["sha256"] is None


def test_a_timeout_does_not_wait_for_a_checksum(node: Node) -> None:
    archive = node.path / "sparse.json"
    archive.write_text(json.dumps([{"path": "holes", "mode": 0o100644, "size": 15 << 30}]))
    done = run("stage", "--copy", archive, node.path / "b", "--timeout", "1s")
    assert done.returncode == 124, done.stderr
    assert not (node.path / "b/holes").exists()


def test_an_include_that_matches_nothing_is_an_error(node: Node) -> None:
    """A job would read fill values from an empty store."""
    done = run("stage", "--copy", SOURCE, node.path / "a", "--include", "nosuch/*", "--include", ".zgroup")
    assert done.returncode == 1
    assert "nothing in it matches nosuch/*" in one_line(done.stderr)
    assert ".zgroup" in files(node.path / "a")
