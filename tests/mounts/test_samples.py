"""Mounts of all samples: bytes, size, mode and mtime of every file are as recorded with the samples."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest
import trio

from tests.conftest import DATA
from tests.mounts.mounting import mounted
from tests.sources.opening import open_source
from zarrfs.config.options import Options

REFERENCES = json.loads((DATA / "references/expected.json").read_text())
ARCHIVE = json.loads((DATA / "archives/expected.json").read_text())


def files_below(root: Path) -> dict[str, Path]:
    """Return the paths of all files below `root`, by key."""
    found = {}
    for directory, _names, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            found[str(path.relative_to(root))] = path
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_reference_sets_have_the_recorded_files(references: Path) -> None:
    async def contents(name: str) -> dict[str, dict[str, object]]:
        store = open_source(str(references / f"{name}.json"), Options(), child=False)
        try:
            values = {key: bytes(await store.get(key)) async for key in store.list_prefix("")}
        finally:
            await store.aclose()
        return {key: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for key, data in values.items()}

    for name, expected in REFERENCES.items():
        assert trio.run(contents, name) == expected, name


def test_a_reference_set_mounts_as_the_recorded_files(references: Path, tmp_path: Path) -> None:
    expected, document = REFERENCES["combined_v1"], references / "combined_v1.json"
    with mounted(document, tmp_path / "mnt") as root:
        found = files_below(root)
        assert found.keys() == expected.keys()
        for key, path in found.items():
            status = path.stat()
            assert (status.st_size, sha256(path)) == (expected[key]["size"], expected[key]["sha256"]), key
            assert stat.S_IMODE(status.st_mode) == 0o444
            assert status.st_mtime_ns == document.stat().st_mtime_ns
            assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())


@pytest.mark.parametrize("name", ["flux-list.json", "flux-dict.json"])
def test_archives_have_the_recorded_entries(name: str, tmp_path: Path) -> None:
    with mounted(DATA / "archives" / name, tmp_path / "mnt", f"blobs={DATA / 'archives/blobs'}") as root:
        seen = set()
        for directory, directories, names in os.walk(root):
            for entry in directories + names:
                path = Path(directory, entry)
                key = str(path.relative_to(root))
                seen.add(key)
                check_entry(path, ARCHIVE[key])
        assert seen == ARCHIVE.keys()


def check_entry(path: Path, expected: dict[str, object]) -> None:
    status = path.lstat()
    assert status.st_mode == expected["mode"], path
    assert status.st_mtime_ns == int(str(expected["mtime"])) * 10**9, path
    if "target" in expected:
        assert os.readlink(path) == expected["target"]
    if "sha256" in expected:
        assert (status.st_size, sha256(path)) == (expected["size"], expected["sha256"]), path


def test_a_jobspec_mounts_as_the_files_in_it(tmp_path: Path) -> None:
    with mounted(DATA / "archives/jobspec.json", tmp_path / "mnt") as root:
        files = files_below(root)
        assert sorted(files) == ["config.json", "mesh.bin", "run.sh"]
        assert sha256(files["mesh.bin"]) == ARCHIVE["job/inputs/mesh.bin"]["sha256"]
        assert files["run.sh"].read_text() == "#!/bin/sh\necho run\n"
        assert stat.S_IMODE(files["run.sh"].stat().st_mode) == 0o755


def test_a_directory_of_zarr_stores_mounts_as_the_files_in_it(tmp_path: Path) -> None:
    """One store of each generation; tests/cli/test_cli.py lists and reads all of them without a mount."""
    with mounted(DATA / "zarr", tmp_path / "mnt") as root:
        for name in ("v0_float32_04", "v2_hier", "v3_hier"):
            below, shown = files_below(DATA / "zarr" / name), files_below(root / name)
            assert shown.keys() == below.keys()
            for key, path in shown.items():
                assert path.read_bytes() == below[key].read_bytes()
                assert path.stat().st_mtime_ns == below[key].stat().st_mtime_ns
