"""FileSystemStore: links, special files, atomic writes, crashes, and random operations compared with a model."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests.conftest import tmpfs
from tests.store.contract import keys, listed
from tests.system.leases import leased
from zarrfs.errors import (
    InvalidKey,
    IsDirectory,
    NotDirectory,
    NotFound,
    ReadError,
    SourceError,
    TargetMissing,
)
from zarrfs.store.api import Info, Kind
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.writing import RESERVED


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FileSystemStore]:
    """Return a store of tmp_path/base, with and without openat2(2)."""
    (tmp_path / "base").mkdir()
    made = FileSystemStore(str(tmp_path / "base"))
    made._base._kernel_walks = request.param
    yield made
    trio.run(made.aclose)


def files(base: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory, also of those with reserved names."""
    return {
        os.path.relpath(os.path.join(top, name), base): Path(top, name).read_bytes()
        for top, _, names in os.walk(base)
        for name in names
    }


@pytest.mark.parametrize("name", ["missing", "file"])
def test_only_a_directory_can_be_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceError) as caught:
        FileSystemStore(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


# -- reading


def test_a_key_is_a_path_below_the_base(store: FileSystemStore) -> None:
    trio.run(store.set, "foo/bar", b"x")
    assert Path(store.path, "foo", "bar").read_bytes() == b"x"


def test_attributes_are_those_of_the_file(store: FileSystemStore) -> None:
    path = Path(store.path, "f")
    with path.open("wb") as file:
        file.truncate(1_000_000)
    path.chmod(0o640)
    os.utime(path, ns=(1, 1_234_567_891_234_567_891))
    os.link(path, path.with_name("g"))
    info = trio.run(store.info, "f")
    assert info == Info("f", Kind.FILE, 1_000_000, 0o640, 1_234_567_891_234_567_891, None, 0, 2, info.identity)
    assert trio.run(listed, store, "")[0] == info


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
        lambda: store.set("link/new", b""), lambda: store.delete("link/secret"),
        lambda: store.delete("link/f"), lambda: store.set("link/new/er", b""),
    ]  # fmt: skip
    for call in calls:
        # a link used as a directory may raise NotDirectory
        with pytest.raises((ReadError, NotDirectory)) as caught:
            trio.run(call)
        if call in calls[:2]:
            assert caught.type in (ReadError, TargetMissing)
            assert re.search("out of the store [(]-o allow_path=DIR|not there", str(caught.value))
    assert trio.run(store.info, "link").target == target
    assert files(base.parent / "base2") == {"f": b"secret"}


def test_a_dangling_link_is_a_failure_not_a_missing_key(store: FileSystemStore) -> None:
    (Path(store.path) / "link").symlink_to("nowhere")
    (Path(store.path) / "loop").symlink_to("loop")
    assert trio.run(keys, store) == ["link", "loop"]
    with pytest.raises(TargetMissing):
        trio.run(store.get, "link")
    with pytest.raises(ReadError):
        trio.run(store.get, "loop")


def test_set_and_delete_change_the_link_not_its_target(store: FileSystemStore) -> None:
    base = Path(store.path)
    (base / "f").write_bytes(b"old")
    for name in ("a", "b"):
        (base / name).symlink_to("f")
    trio.run(store.set, "a", b"new")
    trio.run(store.delete, "b")
    assert files(base) == {"f": b"old", "a": b"new"}
    assert not (base / "a").is_symlink()


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


def test_names_need_not_be_utf8(store: FileSystemStore) -> None:
    raw = os.path.join(os.fsencode(store.path), b"a\xff\xfe")
    with open(raw, "wb") as file:
        file.write(b"x")
    (key,) = trio.run(keys, store)
    assert bytes(trio.run(store.get, key)) == b"x"
    assert trio.run(store.info, key).name == key
    trio.run(store.set, key, b"yy")
    with open(raw, "rb") as file:
        assert file.read() == b"yy"
    for call in (store.info, store.get):
        with pytest.raises(InvalidKey):
            trio.run(call, "\ud800")


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


def test_a_store_keeps_its_directory_when_that_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    store = FileSystemStore(str(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    trio.run(store.set, "k", b"v")
    assert (tmp_path / "b/k").read_bytes() == b"v"


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


# -- writing


def test_a_replaced_value_keeps_its_mode(store: FileSystemStore) -> None:
    path = Path(store.path, "f")
    path.write_bytes(b"old")
    path.chmod(0o600)
    trio.run(store.set, "f", b"new")
    trio.run(store.set, "g", b"new")
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_name("g").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_write_leaves_the_old_value(store: FileSystemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trio.run(store.set, "f", b"old")
    real = os.pwrite

    def full(descriptor: int, data: memoryview, at: int) -> int:
        if at >= 400_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            trio.run(store.set, "f", bytes(800_000))
    trio.run(store.aclose)
    assert files(Path(store.path)) == {"f": b"old"}
    assert os.listdir(store.path) == ["f"]


def test_a_reader_sees_the_old_value_or_the_new_one(store: FileSystemStore) -> None:
    values = [bytes([number]) * (1000 * number + 1) for number in range(1, 40)]
    done = False

    async def main() -> None:
        nonlocal done
        await store.set("f", values[0])

        async def reader() -> None:
            while not done:
                assert bytes(await store.get("f")) in values
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            nursery.start_soon(reader)
            for value in values:
                await store.set("f", value)
            done = True

    trio.run(main)


def test_reserved_names_are_refused_as_keys(store: FileSystemStore) -> None:
    for key in (RESERVED, f"{RESERVED}/x", f"a/{RESERVED}.1"):
        with pytest.raises(InvalidKey):
            trio.run(store.set, key, b"")
        with pytest.raises(InvalidKey):
            trio.run(store.delete, key)
        Path(store.path, key).parent.mkdir(exist_ok=True, parents=True)
    Path(store.path, f"a/{RESERVED}.1").touch()
    for call in (store.info, store.get):
        with pytest.raises(NotFound):
            trio.run(call, f"a/{RESERVED}.1")
    assert trio.run(keys, store) == []
    assert trio.run(listed, store, "a") == []


_CRASH = """
import os, signal, sys, trio
from zarrfs.store.directory import FileSystemStore
moment, base = sys.argv[1:]

def die(*arguments, **more):
    os.kill(os.getpid(), signal.SIGKILL)

def half(descriptor, data, at, write=os.pwrite):
    write(descriptor, data[: len(data) // 2], at)
    die()

store = FileSystemStore(base)
trio.run(store.set, "other", b"other")
if moment == "write":
    os.pwrite = half
elif moment == "rename":
    os.rename = die
elif moment == "after":
    os.rename = lambda *a, rename=os.rename, **k: (rename(*a, **k), die())
trio.run(store.set, "a/key", b"new" * 1000)
"""


@pytest.mark.parametrize("moment", ["write", "rename", "after"])
def test_a_kill_leaves_the_old_or_the_new_value(tmp_path: Path, moment: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/key").write_bytes(b"old")
    died = subprocess.run([sys.executable, "-c", _CRASH, moment, str(tmp_path)], check=False)
    assert died.returncode == -9
    expected = {"other": b"other", "a/key": b"old"}
    if moment == "after":
        expected["a/key"] = b"new" * 1000

    async def check() -> None:
        store = FileSystemStore(str(tmp_path))
        assert {key: bytes(await store.get(key)) for key in await keys(store)} == expected
        await store.aclose()

    trio.run(check)


# -- random operations


class Model(RuleBasedStateMachine):
    """FileSystemStore compared with a dict; empty directories remain, as the specification has directories."""

    known = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.base = tempfile.TemporaryDirectory()
        self.store = FileSystemStore(self.base.name)
        self.model: dict[str, bytes] = {}
        self.directories = {""}

    @rule(target=known, parts=st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
    def name(self, parts: list[str]) -> Any:
        return multiple("/".join(parts))

    @rule(key=known, value=st.binary(max_size=50))
    def set(self, key: str, value: bytes) -> None:
        above = {"/".join(key.split("/")[:depth]) for depth in range(1, key.count("/") + 1)}
        if key in self.directories:
            with pytest.raises(IsDirectory):
                trio.run(self.store.set, key, value)
        elif above & self.model.keys():
            with pytest.raises(NotDirectory):
                trio.run(self.store.set, key, value)
        else:
            trio.run(self.store.set, key, value)
            self.model[key] = value
            self.directories |= above

    @rule(key=consumes(known))
    def delete(self, key: str) -> None:
        below = {other for other in {*self.model, *self.directories} if (other + "/").startswith(key + "/")}
        with contextlib.ExitStack() as stack:
            if not below:
                stack.enter_context(pytest.raises((NotFound, NotDirectory)))
            trio.run(self.store.delete, key)
        self.directories -= below
        for other in below & self.model.keys():
            del self.model[other]

    @rule(key=known, start=st.integers(0, 60), length=st.none() | st.integers(0, 60))
    def get(self, key: str, start: int, length: int | None) -> None:
        if key in self.model:
            wanted = self.model[key][start:] if length is None else self.model[key][start : start + length]
            assert bytes(trio.run(self.store.get, key, start, length)) == wanted
            assert trio.run(self.store.info, key).size == len(self.model[key])
            return
        with pytest.raises(IsDirectory if key in self.directories else (NotFound, NotDirectory)):
            trio.run(self.store.get, key, start, length)

    @invariant()
    def the_same_tree(self) -> None:
        assert trio.run(keys, self.store) == sorted(self.model, key=lambda key: key.split("/"))
        shown = {
            (directory + "/" if directory else "") + info.name
            for directory in self.directories
            for info in trio.run(listed, self.store, directory)
        }
        assert shown | {""} == self.model.keys() | self.directories

    def teardown(self) -> None:
        trio.run(self.store.aclose)
        assert files(Path(self.base.name)) == self.model
        self.base.cleanup()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


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
