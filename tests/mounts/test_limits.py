"""Large numbers of open files, readers, mounts and entries, and long names, paths and files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import counters_of, daemon_pid, mounted
from tests.mounts.remotevalues import cut, publish, read_all, wait_for, whole
from tests.mounts.remotevalues import document as values_document
from tests.mounts.test_semantics import document, error_of
from tests.servers import Nginx, nginx

__all__ = ["nginx"]

OPEN, READERS = 2_000, 256
HUGE = 1 << 60
BLOB = b"the last bytes of a very large file"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Raise this process's limit of open files to the hard limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < OPEN + 1000:
        pytest.skip(f"no more than {before[1]} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# -- open files


def test_thousands_of_open_files_can_be_read(many_descriptors: None, tmp_path: Path) -> None:
    """All are open at the same time, and 500 of them are read; after they are closed, the daemon holds none open."""
    source, keys = tmp_path / "store.zarr", [f"c/{number}" for number in range(100)]
    (source / "c").mkdir(parents=True)
    (source / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    for key in keys:
        (source / key).write_bytes(os.urandom(5000))
    with mounted(source, tmp_path / "mnt") as root:
        wanted = {key: (root / key).read_bytes() for key in keys}
        assert {len(data) for data in wanted.values()} == {5000}
        descriptors = []
        try:
            for number in range(OPEN):
                descriptors.append(os.open(root / keys[number % 100], os.O_RDONLY))
            assert counters_of(root)["open_files"] == OPEN
            for number in random.Random(1).sample(range(OPEN), 500):
                assert os.pread(descriptors[number], 100, 4000) == wanted[keys[number % 100]][4000:4100]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        wait_for(lambda: counters_of(root)["open_files"] == 0)
        assert len(os.listdir(f"/proc/{daemon_pid(root)}/fd")) < 1000


def test_more_open_files_than_the_daemon_may_have_are_emfile(tmp_path: Path) -> None:
    """Files that are already open stay readable; after they are closed, all files can be read again."""
    source = tmp_path / "store.zarr"
    (source / "c").mkdir(parents=True)
    (source / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    for number in range(400):
        (source / f"c/{number}").write_bytes(bytes([number % 251]) * 100)
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    command = ["prlimit", "--nofile=300:300", PROGRAM, "mount", source, mountpoint]
    subprocess.run(command, check=True, timeout=60)
    descriptors = []
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):  # noqa: PT012
            for number in range(400):
                descriptors.append(os.open(mountpoint / f"c/{number}", os.O_RDONLY))
        assert len(descriptors) > 200
        for number, descriptor in enumerate(descriptors):
            assert os.read(descriptor, 200) == bytes([number % 251]) * 100
        assert run("stats", mountpoint).returncode == 0
        while descriptors:
            os.close(descriptors.pop())
        for number in range(400):
            assert (mountpoint / f"c/{number}").read_bytes() == bytes([number % 251]) * 100
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        assert run("umount", mountpoint).returncode == 0


# -- readers


def test_256_parallel_threads_read_the_right_bytes(nginx: Nginx, tmp_path: Path) -> None:
    """The values are on a web server."""
    values = cut(publish(nginx.plain.root, "parallel.bin", 8 << 20), "v", 16 << 10)
    source = values_document(tmp_path / "refs.json", {f"{nginx.plain.url}/parallel.bin": values})
    with mounted(source, tmp_path / "mnt", "memory_limit=16MiB") as root:
        outcome = read_all(root, whole(random.Random(2).choices(values, k=READERS * 2)), READERS)
        assert (outcome.right, outcome.failed) == (READERS * 2, {})


# -- entries


# -- names and paths


def test_names_of_255_bytes_can_be_read_and_written(tmp_path: Path) -> None:
    """The limit counts bytes, not characters."""
    names = {}  # name in the source: another name of the same length
    for letter in ("a", "é", "漢", "🗺"):
        size = len(letter.encode())
        tail = letter * (255 // size - 1) + "x" * (255 % size)
        names[letter + tail] = ("b" * size) + tail
    assert {len(name.encode()) for pair in names.items() for name in pair} == {255}
    with mounted(document(tmp_path, dict.fromkeys(names, "found")), tmp_path / "mnt") as root:
        assert set(os.listdir(root)) == set(names)
        for name in names:
            assert (root / name).read_text() == "found"
            assert error_of(os.stat, root / f"{name}x") == errno.ENAMETOOLONG
    (tmp_path / "upper").mkdir()
    with mounted(tmp_path / "refs.json", tmp_path / "mnt", f"upperdir={tmp_path}/upper") as root:
        for name, own in names.items():
            (root / name).write_text("new")
            assert (root / name).read_text() == "new"
            assert error_of((root / f"{name}x").write_text, "") == errno.ENAMETOOLONG
            for change in (os.unlink, root / name), (os.rename, root / name, root / "short"):
                assert error_of(*change) == errno.ENAMETOOLONG  # the name of the whiteout would be too long
            assert (root / name).read_text() == "new"
            (root / own).write_text("not of the source")
            (root / own).unlink()
        assert set(os.listdir(root)) == set(names)


def test_paths_of_4095_bytes_can_be_read(tmp_path: Path) -> None:
    """This is the longest path that a system call accepts."""
    key = "/".join(["d" * 99] * 40) + "/" + "f" * 95
    assert len(key) == 4095
    path = document(tmp_path, {key: "found"})
    reader = "import os, sys; os.chdir(sys.argv[1]); print(open(sys.argv[2]).read())"
    with mounted(path, tmp_path / "mnt") as root:
        command = [sys.executable, "-I", "-S", "-c", reader, root, key]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "found\n"
        assert error_of(os.stat, f"{root}/{key}") == errno.ENAMETOOLONG  # from the kernel
    done = run("ls", "-R", path)
    assert done.returncode == 0
    assert key in done.stdout


# -- sizes


def test_files_of_2_to_the_60_bytes_can_be_read(tmp_path: Path) -> None:
    """The files are mostly holes: they have few blocks, take little memory, and can be read at any offset."""
    reference = _blob(tmp_path / "blobs")
    regions = [[0, len(BLOB), reference], [HUGE - len(BLOB), len(BLOB), reference]]
    entries = [
        {"path": "sparse", "mode": 0o100644, "size": HUGE, "encoding": "blobvec", "data": regions},
        {"path": "hole", "mode": 0o100644, "size": HUGE},
    ]
    (tmp_path / "a.json").write_text(json.dumps(entries))
    with mounted(tmp_path / "a.json", tmp_path / "mnt", f"blobs={tmp_path}/blobs") as root:
        for name, end in ("sparse", BLOB), ("hole", bytes(len(BLOB))):
            status = os.stat(root / name)
            assert status.st_size == HUGE
            assert status.st_blocks <= 2
            descriptor = os.open(root / name, os.O_RDONLY)
            assert os.pread(descriptor, 1000, HUGE - len(BLOB)) == end
            assert os.pread(descriptor, 1000, 0) == end + bytes(1000 - len(BLOB))
            assert os.pread(descriptor, 10, HUGE // 2) == bytes(10)
            assert os.lseek(descriptor, 0, os.SEEK_END) == HUGE
            assert os.pread(descriptor, 10, HUGE) == b""
            assert os.pread(descriptor, 10, (1 << 63) - 20) == b""
            os.close(descriptor)
        assert daemon_memory(root) < 100 << 20


def test_an_array_of_2_to_the_60_bytes_can_be_read(tmp_path: Path) -> None:
    """The array has no stored chunks: with view=arrays its file has the fill value at every offset."""
    (tmp_path / "x.zarr/x").mkdir(parents=True)
    (tmp_path / "x.zarr/.zgroup").write_text('{"zarr_format": 2}')
    metadata = {"zarr_format": 2, "shape": [1 << 57], "chunks": [1 << 20], "dtype": "<i8", "compressor": None,
                "fill_value": 7, "filters": None, "order": "C"}  # fmt: skip
    (tmp_path / "x.zarr/x/.zarray").write_text(json.dumps(metadata))
    with mounted(tmp_path / "x.zarr", tmp_path / "mnt", "view=arrays") as root:
        header = os.stat(root / "x.npy").st_size - HUGE
        with open(root / "x.npy", "rb") as file:
            for at in (0, HUGE // 2, HUGE - 16):
                file.seek(header + at)
                assert file.read(16) == (7).to_bytes(8, "little") * 2
            assert file.read() == b""
        assert daemon_memory(root) < 200 << 20


def _blob(directory: Path) -> str:
    directory.mkdir()
    name = f"sha256-{hashlib.sha256(BLOB).hexdigest()}"
    (directory / name).write_bytes(BLOB)
    return name


def daemon_memory(root: Path) -> int:
    """Return the resident memory (RSS) of the daemon of a mount in bytes."""
    status = Path(f"/proc/{daemon_pid(root)}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10
