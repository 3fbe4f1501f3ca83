"""Mounts of Icechunk repositories: values, errors, refreshes; and the transcript in docs/icechunk.md."""

from __future__ import annotations

import errno
import functools
import http.server
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.conftest import DATA, PROGRAM, run
from tests.icechunk.repositories import NUMBERS, VALUES, Repository, commit, contents, write
from tests.mounts.mounting import log_of, mount_lines, mounted
from tests.mounts.test_semantics import error_of


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return write(tmp_path_factory.mktemp("icechunk"))


def test_a_mount_shows_one_snapshot_until_it_is_refreshed(repository: Repository, tmp_path: Path) -> None:
    source = tmp_path / "repo"
    shutil.copytree(repository.path, source)
    with mounted(source, tmp_path / "mnt") as root:
        group = zarr.open_group(root, mode="r")
        assert np.array_equal(group["rain"][3:], VALUES[3:])  # type: ignore[index]
        assert np.array_equal(group["virtual"][:], NUMBERS)  # type: ignore[index]
        assert (group["rain"][0, 0], group["deep/er/n"][()]) == (5, 7)  # type: ignore[index]
        found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        assert found == contents(repository, branch="main")
        before = (root / "rain/c/0/0").read_bytes()
        third = commit(source, 9)
        with open(root / "rain/c/0/0", "rb") as file:
            assert (root / "rain/c/0/0").read_bytes() == before  # still the first snapshot
            assert run("refresh", root).returncode == 0
            assert file.read() == before
            assert (root / "rain/c/0/0").read_bytes() != before
        assert zarr.open_array(root / "rain", mode="r")[0, 0] == 9
        assert third in run("info", source).stdout
        for name in os.listdir(source / "chunks"):
            (source / "chunks" / name).unlink()
        assert run("refresh", root).returncode == 0
        assert error_of((root / "rain/c/1/1").read_bytes) == errno.EIO
        assert "chunks/" in log_of(root)
        assert (root / "deep/er/n/c").read_bytes()


def test_a_tag_can_be_mounted_and_an_unknown_version_is_refused(repository: Repository, tmp_path: Path) -> None:
    source, mnt = repository.path, tmp_path / "mnt"
    with mounted(source, mnt, "tag=v1", "view=arrays", f"allow_path={tmp_path}") as root:
        assert np.array_equal(np.load(root / "rain.npy"), VALUES)
        assert error_of((root / "virtual.npy").read_bytes) == errno.EIO  # its target is not beneath allow_path=
    for option, rule in ("branch=nope", "no branch 'nope'"), ("snapshot=1CECHNKREP0F1RSTCMT1", "unknown, or expired"):
        done = run("mount", source, mnt, "-o", option)
        assert (done.returncode, done.stderr.count("\n"), rule in done.stderr) == (1, 1, True)
        assert not mount_lines(mnt)
    listed = run("ls", source, "-o", f"snapshot={repository.first}").stdout.split()
    assert listed == ["deep", "rain", "virtual", "zarr.json"]


def test_a_tag_is_read_as_a_netcdf_file(repository: Repository, tmp_path: Path) -> None:
    import h5py
    import netCDF4
    import xarray

    with mounted(repository.path, tmp_path / "mnt", "tag=v1", "view=netcdf") as root:
        (file,) = root.iterdir()
        with netCDF4.Dataset(file) as opened:
            assert np.array_equal(opened["rain"][:], VALUES)
            assert np.array_equal(opened["virtual"][:], NUMBERS)
            assert (opened["deep/er/n"][...], opened.title) == (7, "rain")
        with xarray.open_dataset(file, engine="h5netcdf", phony_dims="sort") as opened:
            assert np.array_equal(opened["rain"], VALUES)
    with mounted(repository.path, tmp_path / "mnt", "tag=v1", "view=netcdf", f"allow_path={tmp_path}") as root:
        (file,) = root.iterdir()
        with h5py.File(file) as opened:  # the NetCDF library would read the first 4 MiB on opening, which fails here
            assert np.array_equal(opened["rain"][:], VALUES)
            with pytest.raises(OSError, match="Input/output error"):  # its target is not beneath allow_path=
                opened["virtual"][:]


def test_branches_and_tags_are_completed(repository: Repository) -> None:
    for typed, found in ("branch=", "branch=dev branch=main"), ("ro,tag=", "ro,tag=v1"), ("branch=d", "branch=dev"):
        words = f"zarrfs mount {repository.path} -o {typed}"
        environment = {"_ZARRFS_COMPLETE": "fish_complete", "COMP_WORDS": words, "COMP_CWORD": typed}
        done = run(env=os.environ | environment, program=("env", PROGRAM))
        assert [line.partition(",")[2] for line in done.stdout.splitlines()] == found.split()


def test_a_snapshot_is_compiled_once_by_all_processes_that_need_it(tmp_path: Path) -> None:
    shutil.copytree(DATA / "icechunk/format2", tmp_path / "repo")
    asked: list[str] = []

    class Slow(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            time.sleep(2 if "/manifests/" in self.path else 0)
            super().do_GET()

        def list_directory(self, path: object) -> None:  # type: ignore[override]
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    clients, environment = 4, {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Slow, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [PROGRAM, "ls", f"http://127.0.0.1:{server.server_port}/repo"]
        started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) for _ in range(clients)]
        assert [one.wait(120) for one in started] == [0] * clients
        server.shutdown()
    assert asked.count("/repo/repo") == clients
    manifests = [path for path in asked if "/manifests/" in path]
    assert manifests
    assert len(manifests) == len(set(manifests))
