"""zarrfs stage --copy in the presence of files, manifests and journals that the copy did not write."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import DATA, PROGRAM, run
from tests.mounts.staging import Node, eventually, one_line
from tests.mounts.staging import node as node
from tests.servers import Faulty
from tests.servers import faulty as faulty
from zarrfs.copying.destination_directory import DestinationDirectory
from zarrfs.store.api import Info, Kind

SOURCE = DATA / "zarr/v2_hier"


def killed(node: Node, faulty: Faulty) -> Path:
    """Start a copy, kill it while its last file is being fetched, and return its destination."""
    source, dest = node.path / "source.json", node.path / "input"
    refs = {f"{index}": "x" * 100 for index in range(100)} | {"last": [faulty.put("/last", b"last", forever="slow")]}
    source.write_text(json.dumps(refs))
    child = subprocess.Popen([PROGRAM, "stage", "--copy", source, dest])
    assert eventually(lambda: faulty.arrived.is_set() and len(os.listdir(dest)) >= 100)
    child.kill()
    child.wait()
    assert eventually(lambda: not node.processes())
    faulty.put("/last", b"last")
    return dest


def filled(dest: Path, name: str, mark: str = "other") -> DestinationDirectory:
    """Start another run, which has written one file and is still running."""
    filling = DestinationDirectory(str(dest), mark=mark)
    root = filling.root(Info("", Kind.DIRECTORY))
    handle = filling.open(root)
    filling.place(filling.create(root, handle, None), handle, Info(name, Kind.FILE), True)
    os.close(handle)
    return filling


@pytest.mark.parametrize("name", ["input.manifest.jsonl", "input.sha256"])
def test_a_file_that_is_no_manifest_is_not_replaced(name: str, node: Node) -> None:
    dest, notes = node.path / "input", node.path / name
    notes.write_text(f"{'0' * 64}  notes\n")
    done = run("stage", "--copy", SOURCE, dest, "--manifest", notes)
    assert done.returncode == 2
    assert f"--manifest {notes}: exists and is not a manifest of zarrfs: not replaced" in one_line(done.stderr)
    assert (notes.read_text(), dest.exists()) == (f"{'0' * 64}  notes\n", False)


@pytest.mark.parametrize("name", ["input.manifest.jsonl", "input.sha256"])
def test_a_manifest_is_replaced_by_that_of_the_same_copy(name: str, node: Node) -> None:
    dest, manifest = node.path / "input", node.path / name
    for _ in range(2):
        assert run("stage", "--copy", SOURCE, dest, "--manifest", manifest).returncode == 0
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert not manifest.exists()


def test_a_file_at_the_manifest_path_of_a_killed_copy_is_kept(node: Node, faulty: Faulty) -> None:
    """The copy was killed before it wrote one, so the file is not removed with the copy."""
    dest = killed(node, faulty)
    (node.path / "input.manifest.jsonl").write_text("notes")
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert ((node.path / "input.manifest.jsonl").read_text(), dest.exists()) == ("notes", False)


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="has no such device")
def test_a_device_is_refused_as_a_manifest(node: Node) -> None:
    assert run("stage", "--copy", SOURCE, node.path / "input", "--manifest", "/dev/null").returncode == 2
    assert not os.path.isfile("/dev/null")


def test_unstage_keeps_files_of_another_run(node: Node, faulty: Faulty) -> None:
    dest = killed(node, faulty)
    (filling := filled(dest, "others")).close()  # as a killed run leaves it
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert (dest / "others").exists()
    assert filling is not None
    assert json.loads((dest / ".zarrfs-staging/note").read_text())["mark"] == "other"


def test_nothing_is_removed_while_another_run_is_writing(node: Node) -> None:
    dest = node.path / "input"
    assert run("stage", "--copy", SOURCE, dest).returncode == 0
    filling = filled(dest, "others")
    before = sorted(os.listdir(dest))
    done = run("unstage", dest, "--remove-copies")
    assert (done.returncode, "another run is writing to it" in one_line(done.stderr)) == (1, True)
    assert sorted(os.listdir(dest)) == before
    filling.finish(Info("", Kind.DIRECTORY))
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert os.listdir(dest) == ["others"]


def test_a_killed_copy_is_not_removed_while_another_node_resumes_it(node: Node, faulty: Faulty) -> None:
    dest = killed(node, faulty)
    mark = json.loads((dest / ".zarrfs-staging/note").read_text())["mark"]
    filling = filled(dest, "others", mark)
    before = sorted(os.listdir(dest))
    for _ in range(2):
        done = run("unstage", dest, "--remove-copies")
        assert (done.returncode, "another run is writing to it" in one_line(done.stderr)) == (1, True)
        assert sorted(os.listdir(dest)) == before
    filling.abandon()
    assert run("unstage", dest, "--remove-copies").returncode == 0
    assert not dest.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a PID namespace")
def test_a_copy_staged_in_a_container_is_not_stale_outside(node: Node) -> None:
    place = node.path / "local/in"
    stage = f"'{PROGRAM}' stage --copy --node-local='{place.parent}' '{SOURCE}' '{place}' --for $$"
    script = f"{stage} && echo up && read x"
    container = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", script]
    with subprocess.Popen(container, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        done = run("unstage", "--stale")
        assert (done.returncode, done.stderr) == (0, "")
        assert (place / ".zgroup").exists()
        assert len(node.records()) == 1
        job.communicate("\n")
    assert run("unstage", place).returncode == 0
    assert node.clean()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("whose", ["staging", "note", "name", "open"])
def test_a_journal_that_another_user_could_write_is_not_trusted(
    whose: str, again: bool, node: Node, faulty: Faulty
) -> None:
    """The forged journal claims that the copy wrote every file since 1970."""
    dest = killed(node, faulty)
    (dest / "precious").write_text("mine")
    note = dest / ".zarrfs-staging/note"
    said = json.loads(note.read_text()) | {"spans": [[0, 9 * 10**18]]}
    note.write_text(json.dumps(said))
    before = note.read_text()
    if whose == "name":
        os.link(note, node.path / "another name")
    elif whose == "open":
        note.parent.chmod(0o777)
    else:
        os.chown(note if whose == "note" else note.parent, 1234, 1234)
    if again:
        done = run("stage", "--copy", node.path / "source.json", dest)
        assert done.returncode == (1 if whose in ("staging", "open") else 2)
        assert whose in ("staging", "open") or note.read_text() == before
    run("unstage", dest, "--remove-copies")
    assert (dest / "precious").read_text() == "mine"


@pytest.mark.parametrize("spans", ["[[Infinity, 0]]", "[[1]]", "7", "[[\"a\", 0]]"])
def test_a_copy_with_a_damaged_journal_is_not_resumed(spans: str, node: Node, faulty: Faulty) -> None:
    dest = killed(node, faulty)
    note = dest / ".zarrfs-staging/note"
    said = json.loads(note.read_text())
    said.pop("spans")
    note.write_text(f'{json.dumps(said)[:-1]}, "spans": {spans}}}')
    done = run("stage", "--copy", node.path / "source.json", dest)
    assert done.returncode == 1
    assert "is there already" in done.stderr.splitlines()[-1]
