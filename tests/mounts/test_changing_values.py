"""Values of a remote store that are replaced: an open file never mixes two versions of a value."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import run
from tests.mounts.mounting import log_of, mounted
from tests.mounts.test_semantics import error_of
from tests.servers import Faulty, Nginx, Web, nginx

__all__ = ["nginx"]

SIZE = 24 << 20  # more than a reader of the beginning makes zarrfs fetch
LATER = 3 * SIZE // 4  # not in the block that a read of the beginning fetches
SMALL = "prefetch=0B,metadata_ttl=200ms"  # values of this size are fetched in pieces
METADATA = {"zarr_format": 2, "shape": [2 * SIZE], "chunks": [SIZE], "dtype": "|u1", "compressor": None,
            "filters": None, "fill_value": 0, "order": "C"}  # fmt: skip


class Changing:
    """A server with a store whose chunk v/0 a test can replace."""

    def __init__(self, server: Faulty) -> None:
        self.server, self.url, self.number = server, f"{server.url}/store", 0
        server.put("/store/.zgroup", b'{"zarr_format": 2}')
        server.put("/store/v/.zarray", json.dumps(METADATA).encode())
        both = {".zgroup": {"zarr_format": 2}, "v/.zarray": METADATA}
        server.put("/store/.zmetadata", json.dumps({"zarr_consolidated_format": 1, "metadata": both}).encode())
        self.value = self.change()

    def change(self, size: int = SIZE) -> bytes:
        """Replace the chunk with a new value of `size` bytes, and return the value."""
        self.number += 1
        self.value = random.Random(self.number).randbytes(size)
        self.server.put("/store/v/0", self.value, tag=str(self.number))
        return self.value


@pytest.fixture
def changing() -> Iterator[Changing]:
    server = Faulty()
    yield Changing(server)
    server.close()


def opened(path: Path) -> int:
    """Open a file without read-ahead, and return the descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


@pytest.mark.parametrize(("size", "view"), [(SIZE // 2, ""), (SIZE, "view=v3")])
def test_an_open_file_never_mixes_versions(changing: Changing, tmp_path: Path, size: int, view: str) -> None:
    with mounted(changing.url, tmp_path / "mnt", SMALL, *filter(None, [view])) as root:
        chunk = root / "v/0"
        old, file = changing.value, opened(chunk)
        assert os.pread(file, 4096, 0) == old[:4096]
        new = changing.change(size)
        assert error_of(os.pread, file, 4096, LATER) == errno.EIO
        with contextlib.suppress(OSError):  # EIO if another test has made the kernel drop its page cache
            assert os.pread(file, 4096, 0) == old[:4096]  # from the page cache
        assert chunk.read_bytes() == new  # a new open shows the new version
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        assert error_of(os.pread, file, 4096, LATER) == errno.EIO
        os.close(file)
        [line] = [line for line in log_of(root).splitlines() if "EIO" in line]
        assert "has changed since it was" in line
        assert "v/0" in line


def test_opening_a_replaced_value_does_not_use_its_cached_size(changing: Changing, tmp_path: Path) -> None:
    """The kernel caches attributes for a day here; still, a reader that opens a grown value gets all of its bytes."""
    with mounted(changing.url, tmp_path / "mnt", SMALL, "attr_timeout=1d") as root:
        assert os.stat(root / "v/0").st_size == SIZE
        for size in (SIZE // 2, 2 * SIZE):
            new = changing.change(size)
            until_old_is_forgotten()
            assert (root / "v/0").read_bytes() == new
            assert os.stat(root / "v/0").st_size == size


@pytest.mark.parametrize("begun", [True, False])
def test_an_open_file_whose_value_was_removed_is_an_error_and_not_absent(
    changing: Changing, tmp_path: Path, begun: bool
) -> None:
    """For ENOENT, readers of Zarr would return fill values."""
    with mounted(changing.url, tmp_path / "mnt", SMALL) as root:
        file = opened(root / "v/0")
        if begun:
            assert os.pread(file, 4096, 0) == changing.value[:4096]
        changing.server.values.pop("/store/v/0")
        assert error_of(os.pread, file, 4096, LATER) == errno.EIO
        os.close(file)


def test_a_replaced_value_is_found_in_a_mount_with_an_upper_directory(changing: Changing, tmp_path: Path) -> None:
    """The old inode is ESTALE, so that the kernel looks the name up again. ENOENT would be read as fill values."""
    (tmp_path / "upper").mkdir()
    options = f"upperdir={tmp_path}/upper,attr_timeout=0s,{SMALL}"
    with mounted(changing.url, tmp_path / "mnt", options) as root:
        chunk, old = root / "v/0", changing.value
        assert chunk.read_bytes() == old
        new = changing.change(SIZE // 2)
        until_old_is_forgotten()
        assert os.stat(chunk).st_size == SIZE // 2
        assert chunk.read_bytes() == new
        file = os.open(chunk, os.O_RDONLY)
        newer = changing.change()
        until_old_is_forgotten()
        with open(chunk, "r+b") as other:
            other.write(b"x")
        assert error_of(os.fchmod, file, 0o600) == errno.ESTALE  # the old version was not copied up
        assert os.fstat(file).st_size == SIZE // 2
        assert chunk.read_bytes() == b"x" + newer[1:]
        os.close(file)


def test_without_etags_a_changed_size_is_a_new_version(changing: Changing, tmp_path: Path) -> None:
    """The name then leads to another inode, with the new size."""
    changing.server.tell_tags = False
    with mounted(changing.url, tmp_path / "mnt", SMALL, "attr_timeout=0s") as root:
        inode = os.stat(root / "v/0").st_ino
        assert [entry.inode() for entry in os.scandir(root / "v") if entry.name == "0"] == [inode]
        old, file = changing.value, opened(root / "v/0")
        assert os.pread(file, 4096, 0) == old[:4096]
        new = changing.change(2 * SIZE)
        until_old_is_forgotten()
        assert os.stat(root / "v/0").st_size == 2 * SIZE
        assert os.fstat(file).st_size == SIZE
        assert os.fstat(file).st_ino == inode != os.stat(root / "v/0").st_ino
        assert (root / "v/0").read_bytes() == new
        assert error_of(os.pread, file, 4096, LATER) == errno.EIO
        os.close(file)


def test_a_last_modified_equal_to_the_date_is_not_used_as_a_version(changing: Changing, tmp_path: Path) -> None:
    changing.server.tell_tags, changing.server.tell_times = False, True
    with mounted(changing.url, tmp_path / "mnt", SMALL) as root:
        file = opened(root / "v/0")
        inode = os.fstat(file).st_ino
        for at in (0, LATER):
            assert os.pread(file, 4096, at) == changing.value[at : at + 4096]
            time.sleep(1.1)  # until the clock of the server, and so its Date, shows another second
        assert os.stat(root / "v/0").st_ino == inode
        os.close(file)


# -- servers without ETag


def put(web: Web, value: bytes, age: float = 60.0) -> Path:
    """Write `value` as the chunk v/0 of a store on the server, dated `age` seconds ago; return its path."""
    root = web.root / "undated"
    (root / "v").mkdir(parents=True, exist_ok=True)
    if not (root / "v/.zarray").exists():
        (root / ".zgroup").write_text('{"zarr_format": 2}')
        (root / "v/.zarray").write_text(json.dumps(METADATA))
        for document in (root / ".zgroup", root / "v/.zarray"):  # the current second would not count as a version
            os.utime(document, (time.time() - 3600,) * 2)
    (root / "v/new").write_bytes(value)
    then = time.time() - age
    os.utime(root / "v/new", (then, then))
    return (root / "v/new").rename(root / "v/0")


@pytest.mark.parametrize("age", [60.0, -2.0])
def test_last_modified_is_the_version_without_an_etag(nginx: Nginx, tmp_path: Path, age: float) -> None:
    """This also holds for a value so new at its first read that its Last-Modified did not count as a version yet."""
    old, new = (letter * SIZE for letter in (b"a", b"b"))
    put(nginx.dated, old, age)
    url = f"{nginx.dated.url}/undated"
    (tmp_path / "set.json").write_text(json.dumps({"x": [f"{url}/v/0", 0, SIZE]}))
    sources = (url, tmp_path / "store", SMALL), (tmp_path / "set.json", tmp_path / "set", SMALL)
    with mounted(*sources[0]) as store, mounted(*sources[1]) as refs:
        files = [opened(store / "v/0"), opened(refs / "x")]
        for file in files:
            assert os.pread(file, 4096, 0) == old[:4096]
        time.sleep(1.2 - age if age < 0 else 0)
        for file in files:
            assert os.pread(file, 4096, SIZE // 2) == old[:4096]
        put(nginx.dated, new, age + 20)
        until_old_is_forgotten()
        for file in files:
            assert error_of(os.pread, file, 4096, LATER) == errno.EIO
            os.close(file)
        assert (store / "v/0").read_bytes() == new
        assert "has changed since it was opened" in log_of(store)
        assert "has changed since it was first read" in log_of(refs)
        assert "sends no version" not in log_of(store) + log_of(refs) or age < 0


def test_a_server_without_versions_is_logged_once(nginx: Nginx, tmp_path: Path) -> None:
    put(nginx.bare, b"a" * SIZE)
    url = f"{nginx.bare.url}/undated"
    (tmp_path / "set.json").write_text(json.dumps({name: [f"{url}/v/0", 0, SIZE] for name in "xyz"}))
    for source, name in ((url, "v/0"), (tmp_path / "set.json", "x")):
        with mounted(source, tmp_path / name[0]) as root:
            for at in (0, LATER):
                file = opened(root / name)
                assert os.pread(file, 4096, at) == b"a" * 4096
                os.close(file)
            assert log_of(root).count("sends no version (neither ETag nor Last-Modified)") == 1
    for web, hosts in ((nginx.bare, [nginx.bare.url.removeprefix("http://")]), (nginx.dated, [])):
        done = run("info", "--json", "-o", "members=v", f"{web.url}/undated")
        assert done.returncode == 0, done.stderr
        about = json.loads(done.stdout)
        assert about["unversioned"] == hosts


def test_a_translated_document_never_mixes_versions(changing: Changing, tmp_path: Path) -> None:
    """The document is longer than a page, and two versions of it are open."""
    def attributes(letter: str) -> bytes:
        both = {".zgroup": {"zarr_format": 2}, "v/.zarray": METADATA, "v/.zattrs": {"text": letter * 60_000}}
        changing.server.put("/store/v/.zattrs", json.dumps(both["v/.zattrs"]).encode(), tag=letter)
        document = json.dumps({"zarr_consolidated_format": 1, "metadata": both}).encode()
        changing.server.put("/store/.zmetadata", document, tag=letter)
        return letter.encode()

    attributes("a")
    with mounted(changing.url, tmp_path / "mnt", "view=v3", "metadata_ttl=200ms") as root:
        file = opened(root / "v/zarr.json")
        assert b"aaaa" in os.pread(file, 8192, 0)
        attributes("b")
        assert run("refresh", root).returncode == 0
        newer = opened(root / "v/zarr.json")
        os.pread(file, 4096, 40_000)
        assert b"aaaa" not in os.pread(newer, 100_000, 0)
        os.close(file)
        os.close(newer)


def until_old_is_forgotten() -> None:
    """Wait for longer than the daemon caches metadata (metadata_ttl=200ms)."""
    time.sleep(0.3)
