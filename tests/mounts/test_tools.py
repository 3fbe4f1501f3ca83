"""Ordinary tools read a mounted archive and agree with its manifest."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA
from tests.mounts.mounting import mounted

EXPECTED = json.loads((DATA / "archives/expected.json").read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    mountpoint = tmp_path_factory.mktemp("tools") / "mnt"
    with mounted(DATA / "archives/flux-list.json", mountpoint, f"blobs={DATA / 'archives/blobs'}") as path:
        yield path


def sh(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rsync_copies_contents_modes_times_and_attributes(root: Path, tmp_path: Path) -> None:
    sh("rsync", "-aHAX", f"{root}/", tmp_path / "copy")
    for key, about in EXPECTED.items():
        path = tmp_path / "copy" / key
        assert path.lstat().st_mode == about["mode"], key
        if "target" in about:
            assert os.readlink(path) == about["target"]
        else:
            assert path.lstat().st_mtime_ns == about["mtime"] * 10**9, key
        if "sha256" in about:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == about["sha256"], key
    assert sh("rsync", "-ain", "--checksum", f"{root}/", tmp_path / "copy").strip() == ""


def test_find_lists_every_entry_with_its_size(root: Path) -> None:
    listed = sh("find", ".", "-mindepth", "1", "-printf", "%P %s %y\n", cwd=root).splitlines()
    sizes = {line.rsplit(" ", 2)[0]: int(line.rsplit(" ", 2)[1]) for line in listed}
    assert sizes.keys() == EXPECTED.keys()
    assert all(sizes[key] == about["size"] for key, about in EXPECTED.items() if "size" in about)
    shown = {line.split("\t")[1]: int(line.split("\t")[0]) for line in sh("du", "-aB1", ".", cwd=root).splitlines()}
    assert (shown["./job/inputs/hole"], shown["./job/inputs/sparse"]) == (0, 4096)
    assert sh("find", root, "-type", "d", "-links", "+2").split() == [str(root), f"{root}/job", f"{root}/job/inputs"]


def test_gsutil_copies_contents(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    copy = tmp_path / "copy"
    (copy / "job").mkdir(parents=True)
    # without parallelism: it is not under test, and would fork two dozen interpreters
    single = ("-o", "GSUtil:parallel_process_count=1", "-o", "GSUtil:parallel_thread_count=1")
    sh(os.path.join(os.path.dirname(sys.executable), "gsutil"), *single, "rsync", "-r", root / "job", copy / "job")
    for key, about in EXPECTED.items():
        if "sha256" in about:
            assert hashlib.sha256((copy / key).read_bytes()).hexdigest() == about["sha256"], key
