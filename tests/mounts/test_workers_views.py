"""Views served by several processes: each process shows the same names, sizes and bytes as a single process."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

from tests.conftest import run
from tests.mounts.manyworkers import processes, running, stopped, workers
from tests.mounts.mounting import counters_of, mounted, until
from tests.servers import Nginx, nginx

__all__ = ["nginx"]

WORKERS = 2
VIEWS = "view=v2", "view=v3", "view=arrays", "view=arrays,arrays=raw"
FRESH = "attr_timeout=0", "entry_timeout=0", "negative_timeout=0"

# Processes read random files and compare their digests until SIGTERM; the program prints how many reads were right,
# wrong, and failed. Cached pages of a file are dropped before each read.
READERS = """
import hashlib, json, os, random, signal, sys, time
root, readers, wanted = sys.argv[1], int(sys.argv[2]), list(json.load(open(sys.argv[3])).items())
pipe, ends = os.pipe(), False
def end(*_):
    global ends
    ends = True
signal.signal(signal.SIGTERM, end)
for seed in range(readers):
    if os.fork() == 0:
        choose, right, wrong, failed = random.Random(seed), 0, 0, 0
        while not ends:
            key, digest = choose.choice(wanted)
            try:
                with open(f"{root}/{key}", "rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    found = hashlib.sha256()
                    while data := file.read(1 << 16):
                        found.update(data)
            except OSError:
                failed += 1
                continue
            right += found.hexdigest() == digest
            wrong += found.hexdigest() != digest
        os.write(pipe[1], b"%d %d %d\\n" % (right, wrong, failed))
        os._exit(0)
os.close(pipe[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(*(sum(map(int, column)) for column in zip(*(line.split() for line in open(pipe[0])))))
"""


def write_store(path: Path) -> None:
    """Write a v3 hierarchy with shards, text, missing chunks and consolidated metadata."""
    group = zarr.open_group(path, mode="w", zarr_format=3, attributes={"title": "of the test"})
    t = group.create_array("t", shape=(40, 40), chunks=(16, 16), dtype="f4", attributes={"units": "K"})
    t[:20] = np.arange(800).reshape(20, 40)
    group.create_array("s", shape=(24, 16), chunks=(8, 8), shards=(16, 16), dtype="i2")[:] = 7
    group.create_array("words", shape=(6,), chunks=(2,), dtype="str")[:] = ["a", "née", "", "dd", "e" * 50, "f"]
    below = group.create_group("below", attributes={"level": 2})
    below.create_array("u", shape=(5,), chunks=(2,), dtype="<i8")[:] = range(5)
    zarr.consolidate_metadata(path)


def write_old_store(path: Path) -> None:
    """Write a v2 hierarchy with chunks that view=v3 must decode, so that their sizes are not known in advance."""
    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.attrs["title"] = "older"
    labels = np.array(["a", "ccc", "", "a"], object)
    category = numcodecs.Categorize(["a", "ccc"], dtype=object)
    (path / "labels").mkdir()
    about = {"zarr_format": 2, "shape": [8], "chunks": [4], "dtype": "|O", "fill_value": "", "order": "C",
             "compressor": None, "filters": [category.get_config()]}  # fmt: skip
    (path / "labels/.zarray").write_text(json.dumps(about))
    (path / "labels/0").write_bytes(category.encode(labels))
    (path / "labels/1").write_bytes(category.encode(labels[::-1]))
    group.create_array("x", shape=(9, 9), chunks=(4, 4), dtype=">f8")[:] = 1.5


def as_set(store: Path, document: Path, whole: bool = False) -> Path:
    """Write a reference set of a store; its targets are ranges of one file or, with `whole`, the store's own files."""
    target, refs, at = document.with_suffix(".bin"), dict[str, list[object]](), 0
    with target.open("wb") as file:
        for path in sorted(path for path in store.rglob("*") if path.is_file()):
            data = path.read_bytes()
            file.write(data)
            refs[str(path.relative_to(store))] = [str(path)] if whole else [str(target), at, len(data)]
            at += len(data)
    document.write_text(json.dumps({"version": 1, "refs": refs}))
    return document


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stores")
    write_store(root / "new.zarr")
    write_old_store(root / "old.zarr")
    return {
        "new": root / "new.zarr", "set": as_set(root / "new.zarr", root / "set.json"),
        "old set": as_set(root / "old.zarr", root / "oldset.json"),
    }  # fmt: skip


class Seen(NamedTuple):
    """An entry of a mount; with inode numbers left at 0, entries of two mounts can be compared."""

    mode: int
    size: int
    digest: str  # "" for a directory
    inodes: tuple[int, int] = (0, 0)  # of stat(2) and of readdir(3)


def seen(root: Path, numbers: bool = False) -> dict[str, Seen]:
    """Return all entries of a mount, reading files without the page cache; with inode numbers if `numbers`."""
    found: dict[str, Seen] = {}
    below = [root]
    while below:
        with os.scandir(below.pop()) as listing:
            entries = list(listing)
        for entry in entries:
            status, digest = os.lstat(entry.path), ""
            if stat.S_ISDIR(status.st_mode):
                below.append(Path(entry.path))
            else:
                with open(entry.path, "rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    digest = hashlib.sha256(file.read()).hexdigest()
            inodes = (status.st_ino, entry.inode()) if numbers else (0, 0)
            found[os.path.relpath(entry.path, root)] = Seen(status.st_mode, status.st_size, digest, inodes)
    return found


def each_alone(mountpoint: Path) -> Iterator[int]:
    """Yield the number of each process while all others are stopped."""
    everyone = processes(mountpoint)
    for number, pid in enumerate(everyone):
        with stopped(*(other for other in everyone if other != pid)):
            yield number


def all_run(mountpoint: Path) -> None:
    until(lambda: len(workers(mountpoint)) == WORKERS - 1)
    until(lambda: running(mountpoint) == WORKERS)


@pytest.mark.promise("S55")
@pytest.mark.parametrize(
    ("source", "view"),
    [*(("new", view) for view in VIEWS), ("set", "view=v2"),
     ("old set", "view=v3"), ("old set", "view=arrays")],
)  # fmt: skip
def test_each_process_shows_what_one_process_shows(
    source: str, view: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    with mounted(stores[source], tmp_path / "one", view) as alone:
        wanted = seen(alone)
    assert len(wanted) > (0 if "netcdf" in view else 2)
    options = f"workers={WORKERS}", view, *FRESH
    with mounted(stores[source], tmp_path / "mnt", *options) as mountpoint:
        all_run(mountpoint)
        found = []
        for _process in each_alone(mountpoint):
            found.append(seen(mountpoint, numbers=True))
            assert {key: about._replace(inodes=(0, 0)) for key, about in found[-1].items()} == wanted
        assert all(one == found[0] for one in found)
        assert all(about.inodes[0] == about.inodes[1] for about in found[0].values())
        opened = [(os.open(mountpoint / key, os.O_RDONLY), key) for key, about in wanted.items() if about.digest]
        for _process in each_alone(mountpoint):  # files that any process has opened
            for descriptor, key in opened:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                data = os.pread(descriptor, 1 << 20, 0)
                assert hashlib.sha256(data).hexdigest() == wanted[key].digest, key
        for descriptor, _key in opened:
            os.close(descriptor)


@pytest.mark.promise("S55")
@pytest.mark.parametrize("view", ["view=v2", "view=arrays", "view=netcdf"])
def test_killed_workers_cause_no_wrong_bytes_in_views(view: str, stores: dict[str, Path], tmp_path: Path) -> None:
    with mounted(stores["set"], tmp_path / "one", view) as alone:
        wanted = {key: about.digest for key, about in seen(alone).items() if about.digest}
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    with mounted(stores["set"], tmp_path / "mnt", f"workers={WORKERS}", view, *FRESH) as mountpoint:
        all_run(mountpoint)
        opened = counters_of(mountpoint)["open"]
        command = [sys.executable, "-I", "-c", READERS, mountpoint, "6", tmp_path / "wanted.json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as readers:
            try:
                until(lambda: counters_of(mountpoint)["open"] > opened + 20)  # readers now handle SIGTERM
                for _ in range(2):  # not more often: each further death delays the replacement more
                    time.sleep(0.4)
                    until(lambda: len(workers(mountpoint)) == WORKERS - 1)
                    os.kill(workers(mountpoint)[0], signal.SIGKILL)
                time.sleep(0.4)
            finally:
                os.killpg(readers.pid, signal.SIGTERM)
            assert readers.stdout is not None
            right, wrong, failed = map(int, readers.stdout.read().split())
        all_run(mountpoint)
        assert wrong == 0
        assert right
        assert failed <= 6 * 2  # each reader has one request at a time


@pytest.mark.parametrize("view", ["view=arrays", "view=netcdf"])
def test_views_of_decoded_arrays_do_not_need_the_sizes_of_targets(
    view: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    document = as_set(stores["new"], tmp_path / "whole.json", whole=True)
    with mounted(document, tmp_path / "one", view) as alone:
        wanted = seen(alone)
    with mounted(document, tmp_path / "mnt", f"workers={WORKERS}", view, *FRESH) as mountpoint:
        all_run(mountpoint)
        for _process in each_alone(mountpoint):
            assert seen(mountpoint) == wanted


# -- a source that changes


@pytest.fixture
def live(stores: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(stores["new"], tmp_path / "live.zarr")


def grow(store: Path) -> None:
    """Enlarge an array, which changes its metadata document."""
    array = zarr.open_array(store / "t", mode="r+")
    array.resize((60, 40))


def shape(mountpoint: Path, view: str) -> object:
    """Return the shape of the array `t` as a view shows it, or the size of its file."""
    if view == "view=v2":
        return json.loads((mountpoint / "t/.zarray").read_text())["shape"]
    if view == "view=arrays":
        return (mountpoint / "t.npy").stat().st_size
    with h5py.File(io.BytesIO((mountpoint / "live.nc").read_bytes())) as file:
        return file["t"].shape


@pytest.mark.promise("S55")
@pytest.mark.parametrize("view", ["view=v2", "view=arrays", "view=netcdf"])
def test_no_process_shows_a_document_that_another_knows_to_be_replaced(view: str, live: Path, tmp_path: Path) -> None:
    """By itself, each process would reuse a document for at least a second."""
    with mounted(live, tmp_path / "mnt", f"workers={WORKERS}", view, *FRESH) as mountpoint:
        all_run(mountpoint)
        first, *others = processes(mountpoint)
        with stopped(*others):
            old = shape(mountpoint, view)
        grow(live)
        with stopped(*others):
            until(lambda: shape(mountpoint, view) != old)
            new = shape(mountpoint, view)
        with stopped(first):
            assert shape(mountpoint, view) == new
        for _ in range(3):  # the others have just read the document, and the first process finds the change
            with stopped(first):
                old = shape(mountpoint, view)
            zarr.open_array(live / "t", mode="r+").append(np.zeros((1, 40), "f4"))
            with stopped(*others):
                until(lambda old=old: shape(mountpoint, view) != old)  # type: ignore[misc]
                new = shape(mountpoint, view)
            with stopped(first):
                assert shape(mountpoint, view) == new


@pytest.mark.promise("S55")
@pytest.mark.parametrize("view", ["view=arrays", "view=netcdf"])
def test_a_rewritten_chunk_is_read_by_every_process_and_from_open_files(view: str, live: Path, tmp_path: Path) -> None:
    name = "t.npy" if view == "view=arrays" else "live.nc"
    with mounted(live, tmp_path / "mnt", f"workers={WORKERS}", view, *FRESH) as mountpoint:
        all_run(mountpoint)
        first, *others = processes(mountpoint)

        def content() -> bytes:
            return (mountpoint / name).read_bytes()

        with open(mountpoint / name, "rb", buffering=0) as file:
            with stopped(first):
                old = content()
            for value in (1.0, 2.0, 3.0):
                zarr.open_array(live / "t", mode="r+")[:4, :4] = value
                with stopped(*others):
                    until(lambda old=old: content() != old)  # type: ignore[misc]
                    old = content()
                with stopped(first):
                    assert content() == old
                for pids in others, [first]:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    with stopped(*pids):
                        assert os.pread(file.fileno(), 1 << 20, 0) == old


def test_created_and_deleted_names_are_seen_by_every_process(live: Path, tmp_path: Path) -> None:
    """The mount has no view, so each lookup goes to the directory itself."""
    with mounted(live, tmp_path / "mnt", f"workers={WORKERS}", *FRESH) as mountpoint:
        all_run(mountpoint)
        first, *others = processes(mountpoint)
        for number in range(3):
            for pids in others, [first]:
                with stopped(*pids):
                    assert not (mountpoint / "t/c/9/9").exists()
            (live / "t/c/9").mkdir()
            (live / "t/c/9/9").write_bytes(b"%d" % number)
            for pids in others, [first]:
                with stopped(*pids):
                    assert os.listdir(mountpoint / "t/c/9") == ["9"]
                    assert (mountpoint / "t/c/9/9").read_bytes() == b"%d" % number
            shutil.rmtree(live / "t/c/9")


@pytest.mark.parametrize("view", ["view=v2", "view=arrays"])
def test_a_source_on_a_server_without_listings_has_one_process(
    view: str, stores: dict[str, Path], nginx: Nginx, tmp_path: Path
) -> None:
    shutil.copytree(stores["new"], nginx.plain.root / f"{view}.zarr")
    (tmp_path / "mnt").mkdir()
    done = run("mount", f"{nginx.plain.url}/{view}.zarr", tmp_path / "mnt", "-o", f"workers=2,{view}")
    assert done.returncode == 0, done.stderr
    assert run("umount", tmp_path / "mnt").returncode == 0
    assert "names of this source are not in an index: one process answers the mount" in done.stderr
