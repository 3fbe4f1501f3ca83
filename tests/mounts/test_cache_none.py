"""-o cache=none: zarrfs writes nothing anywhere, neither before nor during nor after a mount."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA, run
from tests.mounts.mounting import daemon_pid, mounted, until
from tests.mounts.test_remote import publish_references
from tests.mounts.test_samples import files_below
from tests.servers import Nginx, nginx

__all__ = ["nginx"]

MEMORY = Path("/dev/shm")
SYSTEM = Path("/var/cache/zarrfs/index")  # the index directory of root where the environment names none


class Places:
    """The directories that a program might write to, and a record of their contents."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.all = [base / name for name in ("home", "cache", "tmp", "cwd", "index", "blocks")]
        for place in self.all:
            place.mkdir(parents=True)
        self.seen = self.listing()

    def listing(self) -> dict[str, tuple[int, int, int, int]]:
        """Return all paths in the directories, each with its inode, mode, size and modification time."""
        found = {}
        for top in self.all:
            for path in [top, *top.rglob("*")]:
                status = path.lstat()
                found[str(path)] = status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns
        return found

    def check(self) -> None:
        """Assert that nothing has changed since the record was made."""
        assert self.listing() == self.seen


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    """Set the environment of a test's commands to new, empty directories; check at the end that they are unchanged."""
    found = Places(tmp_path / "places")
    monkeypatch.setenv("HOME", str(found.base / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(found.base / "cache"))
    monkeypatch.setenv("TMPDIR", str(found.base / "tmp"))
    monkeypatch.setenv("ZARRFS_TESTS_EXEC", "1")  # SQLite reads TMPDIR when it is imported
    monkeypatch.chdir(found.base / "cwd")
    before = set(os.listdir(MEMORY))
    yield found
    found.check()
    left = set(os.listdir(MEMORY)) - before
    until(lambda: not left & set(os.listdir(MEMORY)))  # other programs remove their files soon


def own_files(mountpoint: Path) -> list[str]:
    """Return the paths of the files that the daemon of a mount has open."""
    directory = f"/proc/{daemon_pid(mountpoint)}/fd"
    found = []
    for number in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(os.readlink(f"{directory}/{number}"))
    return found


def test_a_mount_of_a_document_writes_nothing(places: Places, references: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with mounted(references / "combined_v1.json", tmp_path / "mnt", "cache=none") as root:
            places.check()
            for path in files_below(root).values():
                path.read_bytes()
            places.check()
            [index] = [path for path in own_files(root) if path.partition(" ")[0].endswith(".index")]
            assert index.startswith(f"{MEMORY}/")
            assert index.endswith(" (deleted)")
            assert not os.path.exists(os.path.dirname(index))


def test_cache_directories_that_are_named_stay_empty(places: Places, nginx: Nginx, tmp_path: Path) -> None:
    """The document and its targets are behind URLs, so both directories would be used without cache=none."""
    publish_references(nginx.plain.root)
    named = f"cache=none,index_dir={places.base}/index,cache_dir={places.base}/blocks,cache_min_free=0B"
    with mounted(f"{nginx.plain.url}/references/combined_v1.json", tmp_path / "mnt", named) as root:
        for path in files_below(root).values():
            path.read_bytes()
        places.check()


def test_a_refused_mount_leaves_no_index(places: Places, references: Path, tmp_path: Path) -> None:
    (tmp_path / "upper" / "mnt").mkdir(parents=True)
    options = f"cache=none,rw,upperdir={tmp_path}/upper"
    done = run("mount", references / "combined_v1.json", tmp_path / "upper" / "mnt", "-o", options)
    assert done.returncode != 0
    assert "the mount would contain itself" in done.stderr


def test_nothing_is_written_to_the_index_directory_of_the_system(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without HOME it is the default. The test looks for its own index only, as other programs may use it, too."""
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": {"x": os.urandom(16).hex()}}))
    made = json.loads(run("info", "--json", tmp_path / "refs.json", "--index-dir", tmp_path / "kept").stdout)["index"]
    digest = os.path.basename(made).split(".")[0]
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", "cache=none"):
        places.check()
    assert len(digest) == 64
    assert not list(SYSTEM.glob(f"{digest}.*"))


def test_a_document_that_sqlite_cannot_hold_in_memory_writes_nothing(places: Places, tmp_path: Path) -> None:
    refs = {f"directory-{number:06}/{number:040}/x": "1" for number in range(60_000)}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", "cache=none") as root:
        places.check()
        assert (root / "directory-000123" / f"{123:040}" / "x").read_bytes() == b"1"


def test_earlier_cache_files_are_neither_used_nor_removed(places: Places, references: Path, tmp_path: Path) -> None:
    source, kept = references / "combined_v1.json", places.base / "cache/zarrfs/index"
    while not list(kept.glob("*.index")):  # the index of a document written just now is not remembered
        assert run("ls", source).returncode == 0
    places.seen = places.listing()
    with mounted(source, tmp_path / "mnt", "cache=none") as root:
        assert not [path for path in own_files(root) if path.startswith(str(places.base))]
        places.check()


def test_stores_and_other_commands_write_nothing(
    places: Places, nginx: Nginx, references: Path, tmp_path: Path
) -> None:
    shutil.copytree(DATA / "zarr/v3_hier", nginx.listing.root / "none_v3", dirs_exist_ok=True)
    for source in (f"{nginx.listing.url}/none_v3/", DATA / "zarr/v2_hier"):
        with mounted(source, tmp_path / "mnt", "cache=none") as root:
            for path in files_below(root).values():
                path.read_bytes()
            places.check()
    for command in ("ls", "info", "check"):
        assert run(command, references / "combined_v1.json", "-o", "cache=none").returncode == 0
        places.check()

