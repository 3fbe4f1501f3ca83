"""Ordinary tools read a mounted archive and agree with its manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA
from tests.mounts.mounting import mounted

EXPECTED = json.loads((DATA / "archives/expected.json").read_text())
GSUTIL = os.path.join(os.path.dirname(sys.executable), "gsutil")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    mountpoint = tmp_path_factory.mktemp("tools") / "mnt"
    with mounted(DATA / "archives/flux-list.json", mountpoint, f"blobs={DATA / 'archives/blobs'}") as path:
        yield path


def sh(*command: object, cwd: Path | None = None, home: Path | None = None) -> str:
    environment = {**os.environ, "HOME": str(home)} if home else None
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def agrees(copy: Path, modes: bool = True, follow: bool = False, empty: bool = True) -> None:
    """Compare a copy of the archive with the manifest."""
    for key, about in EXPECTED.items():
        path = copy / key
        if key == "job/inputs/empty" and not empty:
            continue
        status = path.stat() if follow else path.lstat()
        if "target" in about and not follow:
            assert os.readlink(path) == about["target"]
        elif "sha256" in about:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == about["sha256"], key
        if modes:
            assert status.st_mode == about["mode"], key
            if "target" not in about:
                assert status.st_mtime_ns == about["mtime"] * 10**9, key


def test_cp_copies_contents_modes_and_times(root: Path, tmp_path: Path) -> None:
    sh("cp", "-a", root / "job", tmp_path)
    agrees(tmp_path)


def test_tar_copies_contents_modes_and_times(root: Path, tmp_path: Path) -> None:
    sh("tar", "-C", root, "-cf", tmp_path / "x.tar", "job")
    sh("tar", "-C", tmp_path, "-xpf", tmp_path / "x.tar")
    agrees(tmp_path)


def test_rsync_copies_contents_modes_times_and_attributes(root: Path, tmp_path: Path) -> None:
    sh("rsync", "-aHAX", f"{root}/", tmp_path / "copy")
    agrees(tmp_path / "copy")
    assert sh("rsync", "-ain", "--checksum", f"{root}/", tmp_path / "copy").strip() == ""


def test_find_lists_every_entry_with_its_size(root: Path) -> None:
    listed = sh("find", ".", "-mindepth", "1", "-printf", "%P %s %y\n", cwd=root).splitlines()
    sizes = {line.rsplit(" ", 2)[0]: int(line.rsplit(" ", 2)[1]) for line in listed}
    assert sizes.keys() == EXPECTED.keys()
    assert all(sizes[key] == about["size"] for key, about in EXPECTED.items() if "size" in about)
    assert sh("find", root, "-type", "d", "-links", "+2").split() == [str(root), f"{root}/job", f"{root}/job/inputs"]


def test_du_counts_allocated_bytes(root: Path) -> None:
    shown = {line.split("\t")[1]: int(line.split("\t")[0]) for line in sh("du", "-aB1", ".", cwd=root).splitlines()}
    assert shown["./job/inputs/hole"] == 0
    assert shown["./job/inputs/sparse"] == 4096


def test_gsutil_copies_contents(root: Path, tmp_path: Path) -> None:
    destination = tmp_path / "copy"
    destination.mkdir()
    # without parallelism: it is not under test, and would fork two dozen interpreters
    gsutil = [GSUTIL, "-o", "GSUtil:parallel_process_count=1", "-o", "GSUtil:parallel_thread_count=1"]
    sh(*gsutil, "rsync", "-r", root, destination, home=tmp_path)
    agrees(destination, modes=False, follow=True, empty=False)


def test_dd_skips_into_a_sparse_file(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    sh("dd", f"if={root}/job/inputs/sparse", f"of={copy}", "bs=4096", "skip=731", "count=3")
    shutil.copy(root / "job/inputs/sparse", tmp_path / "whole")
    assert copy.read_bytes() == (tmp_path / "whole").read_bytes()[731 * 4096 : 734 * 4096]
