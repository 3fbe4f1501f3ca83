"""Ordinary programs write through a writable mount: databases, git, rsync, h5py, locks, stressors."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests import caches
from tests.conftest import DATA
from tests.mounts.mounting import mounted
from tests.mounts.test_semantics import document
from tests.mounts.treemodel import differences, snapshot


class Place:
    """A reference set with an upper directory, which a test can mount several times."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "upper").mkdir()
        (directory / "target.bin").write_bytes(os.urandom(300_000))
        target = str(directory / "target.bin")
        day = DATA / "references/data/day0.nc"
        refs = {"d/a": "text", "d/sub/large": [target, 0, 300_000], "d/sub/part": [target, 1000, 100_000],
                "e/x": "x" * 5000, "day0.nc": [str(day), 0, day.stat().st_size]}  # fmt: skip
        self.source = document(directory, refs)

    def mounted(self) -> contextlib.AbstractContextManager[Path]:
        return mounted(self.source, self.directory / "mnt", f"upperdir={self.directory}/upper")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a reference set once for all tests that do not remount."""
    with Place(tmp_path_factory.mktemp("tools")).mounted() as root:
        yield root


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def sh(*command: object, cwd: Path | None = None, home: Path | None = None) -> str:
    environment = {**os.environ, "HOME": str(home or cwd or "/"), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def same(found: Path, expected: Path) -> None:
    with caches.kept():  # the names of a file have one inode number while the kernel knows the file
        assert differences(snapshot(found), snapshot(expected)) == []


# -- SQLite


def rows(path: Path) -> list[tuple[int, int]]:
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found = database.execute("SELECT count(*), sum(length(value)) FROM t").fetchall()
    database.close()
    return found


WRITER = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=60)
database.execute("PRAGMA mmap_size=1000000")
for n in range(30):
    with database:
        database.execute("INSERT INTO t VALUES (?, ?)", (None, "v" * (n * 13 % 3000)))
        database.execute("UPDATE t SET value = value || 'w' WHERE key % 7 = 0")
"""


@pytest.mark.parametrize("journal", ["wal", pytest.param("delete", marks=pytest.mark.nightly)])
def test_an_sqlite_database_is_intact_after_concurrent_writers(journal: str, place: Place) -> None:
    """Two processes write while one reads; the database is checked before and after a remount."""
    with place.mounted() as root:
        path = root / "d/base.sqlite"
        database = sqlite3.connect(path, timeout=60)
        assert database.execute(f"PRAGMA journal_mode={journal}").fetchone() == (journal,)
        database.execute("CREATE TABLE t (key INTEGER PRIMARY KEY, value TEXT)")
        database.commit()
        writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(2)]
        while any(writer.poll() is None for writer in writers):
            database.execute("SELECT count(*) FROM t").fetchall()
            time.sleep(0.002)
        assert [writer.wait() for writer in writers] == [0, 0]
        database.close()
        [(count, size)] = rows(path)
        assert count == 60
    with place.mounted() as root:
        assert rows(root / "d/base.sqlite") == [(count, size)]
    assert rows(place.directory / "upper/d/base.sqlite") == [(count, size)]


# -- trees


def write_tree(root: Path) -> None:
    """Write files of all types, with old times and unusual modes."""
    root.mkdir()
    chance = np.random.default_rng(5)
    for number in range(60):
        directory = root / f"d{number % 7}" / f"e{number % 3}"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"file {number}"
        path.write_bytes(chance.bytes(number * 777))
        path.chmod([0o644, 0o600, 0o4755, 0o444, 0][number % 5])
        os.chown(path, number, number + 1)
        os.utime(path, ns=(10**18, 10**18 + number * 1_000_001))
    os.link(root / "d0/e0/file 0", root / "d1/linked")
    os.symlink("../d1/linked", root / "d2/link")
    os.symlink("nowhere", root / "d2/dangling")
    os.mkfifo(root / "d3/fifo")
    (root / "empty").mkdir(0o2775)
    with (root / "sparse").open("wb") as file:
        file.truncate(20 << 20)
        file.seek(10 << 20)
        file.write(b"here")
    for path in [*root.rglob("*")]:
        if not path.is_symlink() and path.stat().st_mtime > 1.1e9:
            os.utime(path, ns=(10**18, 10**18))
        elif path.is_symlink():
            os.utime(path, ns=(10**18, 10**18), follow_symlinks=False)


def test_rsync_copies_and_updates_a_tree(place: Place, tmp_path: Path) -> None:
    write_tree(tmp_path / "tree")
    with place.mounted() as root:
        sh("rsync", "-aHAS", f"{tmp_path}/tree/", root / "d", "--delete")
        same(root / "d", tmp_path / "tree")
        assert (root / "d/sparse").stat().st_blocks < 100
        for number in (3, 9):
            path = tmp_path / f"tree/d{number % 7}/e0/file {number}"
            path.write_bytes(path.read_bytes() + b"more")
            os.utime(path, ns=(10**18, 10**18))
        shutil.rmtree(tmp_path / "tree/d4")
        sh("rsync", "-aHA", "--inplace", "--no-whole-file", f"{tmp_path}/tree/", root / "d", "--delete", "--checksum")
        same(root / "d", tmp_path / "tree")
    with place.mounted() as root:
        same(root / "d", tmp_path / "tree")


# -- h5py, shared memory, locks


def test_h5py_appends_to_a_file_of_the_source(place: Place) -> None:
    with place.mounted() as root:
        with h5py.File(root / "day0.nc", "a") as file:
            file["added"] = np.arange(50_000).reshape(500, 100)
            file["added"].attrs["units"] = "m"
            growing = file.create_dataset("growing", shape=(0,), maxshape=(None,), chunks=(100,), dtype="f8")
            for number in range(20):
                growing.resize(((number + 1) * 50,))
                growing[number * 50 :] = number
        with h5py.File(root / "new.h5", "w", libver="latest") as file:
            file["x"] = np.arange(1000)
    with (
        place.mounted() as root,
        h5py.File(root / "day0.nc") as shown,
        h5py.File(root / "new.h5") as new,
        h5py.File(DATA / "references/data/day0.nc") as own,
    ):
        assert set(shown) == {*own, "added", "growing"}
        np.testing.assert_array_equal(shown["t2m"][...], own["t2m"][...])
        np.testing.assert_array_equal(shown["added"][...], np.arange(50_000).reshape(500, 100))
        np.testing.assert_array_equal(shown["growing"][...], np.repeat(np.arange(20.0), 50))
        np.testing.assert_array_equal(new["x"][...], np.arange(1000))


def test_a_shared_mapping_agrees_with_reads_and_writes(place: Place) -> None:
    expected = {}
    with place.mounted() as root:
        (root / "new").write_bytes((root / "d/sub/large").read_bytes())
        for name in ("d/sub/large", "new"):
            path = root / name
            wanted = expected[name] = bytearray(path.read_bytes())
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                for at in (0, 4095, 100_000, len(wanted) - 3):
                    memory[at : at + 3] = wanted[at : at + 3] = b"new"
                    assert path.read_bytes() == wanted  # read(2), without msync
                with path.open("rb") as other, mmap.mmap(other.fileno(), 0, prot=mmap.PROT_READ) as second:
                    memory[5000:5003] = wanted[5000:5003] = b"two"
                    assert second[5000:5003] == b"two"
                os.pwrite(file.fileno(), b"three", 200_000)
                wanted[200_000:200_005] = b"three"
                assert memory[200_000:200_005] == b"three"
            assert (place.directory / "upper" / name).read_bytes() == wanted  # after close(2)
    with place.mounted() as root:
        assert {name: (root / name).read_bytes() for name in expected} == expected


# -- stressors


@pytest.mark.nightly
def test_git_repositories_are_intact_after_a_remount(place: Place) -> None:
    with place.mounted() as root:
        work = root / "d"
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "maintenance.auto=false"]
        sh("git", "init", "-q", cwd=work)
        sh("git", "add", ".", cwd=work)
        sh("git", *identity, "commit", "-q", "-m", "one", cwd=work)
        for number in range(2):
            (work / f"file{number}").write_text(f"{number}\n" * 50)
            sh("git", "add", "-A", cwd=work)
            sh("git", *identity, "commit", "-q", "-m", str(number), cwd=work)
        sh("git", "clone", "-q", work, root / "clone", cwd=root)
        sh("git", "gc", "-q", "--prune=now", cwd=work)
        sh("mv", "sub", "moved", cwd=work)  # a directory of the source: rename(2), and so git mv, fails with EXDEV
        sh("git", "add", "-A", cwd=work)
        sh("git", *identity, "commit", "-q", "-m", "moved", cwd=work)
    with place.mounted() as root:
        for directory in (root / "d", root / "clone"):
            sh("git", "fsck", "--full", "--strict", cwd=directory)
            assert sh("git", "status", "--porcelain", cwd=directory) == ""
        assert len(sh("git", "log", "--oneline", cwd=root / "d").splitlines()) == 4
        sh("git", "pull", "-q", cwd=root / "clone")
        assert (root / "clone/moved/part").read_bytes() == (root / "d/moved/part").read_bytes()


def test_a_lock_excludes_other_processes(shared: Path) -> None:
    path = shared / "e/x"
    for kind in ("flock", "lockf"):
        code = f"import fcntl; fcntl.{kind}(open({str(path)!r}, 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        with path.open("r+b") as file:
            getattr(fcntl, kind)(file, fcntl.LOCK_EX)
            other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert "BlockingIOError" in other.stderr, kind
        sh(sys.executable, "-c", code)


STRESSORS = ("chmod", "chown", "dentry", "dir", "dirdeep", "fcntl", "filename", "flock", "fstat", "getdent", "hdd",
             "link", "lockf", "mknod", "rename", "seek", "symlink", "touch", "utime")  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_stress_ng_finds_no_error(shared: Path) -> None:
    """All stressors run together for two seconds; with --verify they check that they read what they wrote."""
    before = os.stat(shared).st_dev
    (shared / "stress").mkdir()
    stressors = [part for name in STRESSORS for part in (f"--{name}", "1")]
    bounds = ["--timeout", "2", "--hdd-bytes", "8m", "--dentries", "200", "--dirdeep-inodes", "200"]
    sh("stress-ng", "--verify", "--temp-path", shared / "stress", *stressors, *bounds)
    assert os.stat(shared).st_dev == before
    assert os.listdir(shared / "stress") == []


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["mmap", "libaio"])
def test_fio_verifies_the_blocks_that_it_wrote(engine: str, shared: Path) -> None:
    directory = shared / f"fio-{engine}"
    directory.mkdir()
    blocks = "--bsrange=4k-64k" if engine == "mmap" else "--bsrange=512-64k"
    options = [blocks, "--rw=randrw", "--size=8m", "--numjobs=2", "--verify=crc32c", "--do_verify=1",
               "--verify_fatal=1", "--fallocate=none", "--fsync=64", "--minimal"]  # fmt: skip
    sh("fio", "--name=job", f"--directory={directory}", f"--ioengine={engine}", *options, cwd=directory)
