"""FileSystemStore: links, special files, dead mounts, large directories, leases."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.conftest import tmpfs
from tests.store.contract import keys, listed
from tests.system.leases import leased
from zarrfs.errors import (
    IsDirectory,
    NotDirectory,
    ReadError,
    TargetMissing,
)
from zarrfs.store.api import Kind
from zarrfs.store.directory import FileSystemStore
from zarrfs.system.beneath import BaseDirectory


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FileSystemStore]:
    """Return a store of tmp_path/base, with and without openat2(2)."""
    (tmp_path / "base").mkdir()
    made = FileSystemStore(str(tmp_path / "base"))
    made._base._kernel_walks = request.param
    yield made
    trio.run(made.aclose)


def test_files_of_two_file_systems_have_two_identities(tmp_path: Path) -> None:
    """Files of two snapshots or images often have the same inode number."""
    found = []
    with tmpfs(tmp_path / "a", "size=1m") as one, tmpfs(tmp_path / "b", "size=1m") as other:
        for place in (one, other):
            (place / "f").touch()
            store = FileSystemStore(str(place))
            found.append((trio.run(store.info, "f").identity, (place / "f").stat().st_ino))
            trio.run(store.aclose)
    assert found[0][1] == found[1][1], "this kernel numbers them otherwise"
    assert found[0][0] != found[1][0]


@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.ECONNABORTED])
def test_a_mount_whose_daemon_has_died_hides_no_other_name(
    code: int, store: FileSystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if path == "dead":
            raise OSError(code, os.strerror(code))
        return real(path, *args, **more)

    async def listed() -> list[tuple[str, Kind]]:
        return [(info.name, info.kind) async for info in store.list_dir("")]

    for name in ("a", "dead", "z"):
        (tmp_path / "base" / name).mkdir()
    monkeypatch.setattr(os, "stat", stat)
    assert trio.run(listed) == [(name, Kind.DIRECTORY) for name in ("a", "dead", "z")]


def test_a_key_below_a_dangling_link_is_a_failure_not_a_missing_key(store: FileSystemStore) -> None:
    """A directory of chunks may be a link into an annex or to a disk that is not there."""
    (Path(store.path) / "c").symlink_to("nowhere")
    for read in (store.info, store.open) * 2:  # the second time, the kernel has cached the link
        with pytest.raises(ReadError, match="c: is a symbolic link to nowhere, which is not there"):
            trio.run(read, "c/0")


def test_links_within_the_base_are_followed(store: FileSystemStore) -> None:
    base = Path(store.path)
    (base / "d").mkdir()
    (base / "d/f").write_bytes(b"value")
    links = {
        "beside": "d/f", "d/up": "../d/f", "absolute": f"{base}/d/f", "twice": "beside", "slashes": "./d//f",
    }  # fmt: skip
    for name, target in links.items():
        (base / name).symlink_to(target)
    (base / "dir").symlink_to("d")
    (base / "here").symlink_to(".")
    for name, target in links.items():
        assert trio.run(store.info, name)[:6] == trio.run(store.info, name)._replace(
            name=name.rpartition("/")[2], kind=Kind.SYMLINK, target=os.fsdecode(os.readlink(base / name))
        )[:6]
        assert trio.run(store.info, name).size == len(os.readlink(base / name)), target
        assert bytes(trio.run(store.get, name)) == b"value"
    assert bytes(trio.run(store.get, "dir/f", 1, 2)) == b"al"
    assert bytes(trio.run(store.get, "here/here/dir/f")) == b"value"
    assert {info.name for info in trio.run(listed, store, "dir")} == {"f", "up"}
    with pytest.raises(IsDirectory):
        trio.run(store.get, "dir")
    # list_prefix() follows no links, so it ends
    assert trio.run(keys, store) == sorted([*links, "d/f", "dir", "here"])


@pytest.mark.parametrize(
    "target", ["/etc/hostname", "../secret", "../../secret", "/", "..", "d/../../secret", "../base2/f"]
)
def test_no_link_leads_out(store: FileSystemStore, target: str) -> None:
    base = Path(store.path)
    (base / "d").mkdir()
    (base.parent / "secret").write_bytes(b"secret")
    (base.parent / "base2").mkdir()
    (base.parent / "base2/f").write_bytes(b"secret")
    (base / "link").symlink_to(target)
    (base / "d/link").symlink_to("../link")
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.get("link"), lambda: store.get("d/link"), lambda: store.get("link/secret"),
        lambda: store.info("link/secret"), lambda: listed(store, "link"), lambda: keys(store, "link"),
    ]  # fmt: skip
    for call in calls:
        # a link used as a directory may raise NotDirectory
        with pytest.raises((ReadError, NotDirectory)) as caught:
            trio.run(call)
        if call in calls[:2]:
            assert caught.type in (ReadError, TargetMissing)
            assert re.search("out of the store [(]-o allow_path=DIR|not there", str(caught.value))
    assert trio.run(store.info, "link").target == target


def test_special_files_are_listed_and_not_opened(store: FileSystemStore) -> None:
    base = Path(store.path)
    os.mkfifo(base / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(base / "socket"))
    (base / "f").touch()
    if os.geteuid() == 0:
        os.mknod(base / "null", 0o20666, os.makedev(1, 3))
    kinds = {"fifo": "a FIFO", "socket": "a socket", "null": "a device"}
    if os.geteuid():
        del kinds["null"]
    assert {info.name for info in trio.run(listed, store, "")} == {*trio.run(keys, store)} == {"f", *kinds}
    for name, kind in kinds.items():
        info = trio.run(store.info, name)
        assert (info.kind, info.size, info.unreadable) == (Kind.FILE, 1, f"is {kind}, which is not opened")
        with pytest.raises(ReadError, match=kind):
            trio.run(store.get, name)


def test_a_large_directory_is_listed_in_full_without_names_removed_meanwhile(store: FileSystemStore) -> None:
    names = sorted(f"{number}" for number in range(2500))
    for name in names:
        Path(store.path, name).touch()
    assert [info.name for info in trio.run(listed, store, "")] == names

    async def half() -> None:
        listing = store.list_dir("")
        seen = [(await anext(listing)).name for _ in range(1500)]
        for name in names[2000:]:
            os.unlink(Path(store.path, name))
        seen += [info.name async for info in listing]
        assert seen == names[:2000]

    trio.run(half)


def test_bytes_that_are_not_in_the_page_cache_are_read(store: FileSystemStore) -> None:
    value = os.urandom(1 << 20)
    path = Path(store.path, "f")
    path.write_bytes(value)

    async def reads() -> None:
        for start in (0, 5, 600_000):
            descriptor = os.open(path, os.O_RDWR)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
            assert await store.get("f", start) == value[start:]

    trio.run(reads)


def test_a_file_with_a_lease_is_read_once_its_holder_releases_it(store: FileSystemStore) -> None:
    (path := Path(store.path, "a")).write_bytes(b"value")

    async def body() -> bytes:
        value = await store.open("a")
        try:
            return bytes(await value.read(0, 5))
        finally:
            value.close()

    with leased(path):
        assert trio.run(body) == b"value"


def test_a_file_with_a_lease_is_not_opened_again_and_again(tmp_path: Path) -> None:
    """That took all of a CPU until the lease ended."""
    (tmp_path / "a").write_bytes(b"value")
    base = BaseDirectory(str(tmp_path))
    try:
        with leased(tmp_path / "a"), pytest.raises(BlockingIOError):
            base.open(b"a", os.O_RDONLY)
    finally:
        base.close()
