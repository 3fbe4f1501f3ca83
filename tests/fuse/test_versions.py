"""Open files while the source changes, and store versions that a refresh has replaced."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FlagT, InodeT

from zarrfs.config.options import Options
from zarrfs.fuse.operations import Operations
from zarrfs.fuse.versions import StoreVersion
from zarrfs.fuse.xattrs import SOURCE_XATTR
from zarrfs.store.api import Info
from zarrfs.store.directory import FileSystemStore

CONTEXT = cast(pyfuse3.RequestContext, None)


class PausedStore(FileSystemStore):
    """A store whose info() waits until the test allows it, and which records when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.may_answer = trio.Event()
        self.may_answer.set()
        self.closed = False

    async def info(self, key: str, sized: bool = True) -> Info:
        await self.may_answer.wait()
        if self.closed:
            raise RuntimeError("is closed")
        return await super().info(key, sized)

    async def aclose(self) -> None:
        self.closed = True
        await super().aclose()


def directory_in_place_of_the_file(root: Path) -> None:
    (root / "d/x").unlink()
    (root / "d/x").mkdir()


def file_in_place_of_the_parent(root: Path) -> None:
    shutil.rmtree(root / "d")
    (root / "d").touch()


CHANGES = directory_in_place_of_the_file, file_in_place_of_the_parent


async def look_up(mount: Operations) -> InodeT:
    """Return the inode of d/x."""
    parent = await mount.lookup(InodeT(1), pyfuse3.FileNameT(b"d"), CONTEXT)
    return (await mount.lookup(parent.st_ino, pyfuse3.FileNameT(b"x"), CONTEXT)).st_ino


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").write_bytes(b"value")
    return tmp_path


@pytest.mark.parametrize("change", CHANGES)
def test_an_open_file_keeps_its_attributes(change: Callable[[Path], None], root: Path) -> None:
    async def body() -> None:
        mount = Operations(FileSystemStore(str(root)), Options(), {}, lambda: None)
        inode = await look_up(mount)
        opened = await mount.open(inode, FlagT(os.O_RDONLY), CONTEXT)
        change(root)
        attributes = await mount.getattr(inode, CONTEXT)
        assert (stat.S_IFMT(attributes.st_mode), attributes.st_size) == (stat.S_IFREG, 5)
        await mount.release(opened.fh)
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await mount.getattr(inode, CONTEXT)
        assert caught.value.errno in (errno.ESTALE, errno.ENOTDIR)
        await mount.aclose()

    trio.run(body)


Request = Callable[[Operations, InodeT], Awaitable[Any]]
REQUESTS: dict[str, Request] = {
    "getxattr": lambda mount, inode: mount.getxattr(inode, SOURCE_XATTR, CONTEXT),
    "listxattr": lambda mount, inode: mount.listxattr(inode, CONTEXT),
    "readlink": lambda mount, inode: mount.readlink(inode, CONTEXT),
}


def test_getattr_of_an_open_file_survives_a_refresh(root: Path) -> None:
    """The open value knows its attributes: a later request neither waits for the old store nor sees the new file."""

    async def body() -> None:
        old, found = PausedStore(root), list[Any]()
        async with trio.open_nursery() as nursery:
            mount = Operations(old, Options(), {}, lambda: None)
            mount.background = nursery
            inode = await look_up(mount)
            opened = await mount.open(inode, FlagT(os.O_RDONLY), CONTEXT)

            async def ask() -> None:
                found.append(await mount.getattr(inode, CONTEXT))

            old.may_answer = trio.Event()
            async with trio.open_nursery() as asking:
                asking.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                mount.show(StoreVersion(FileSystemStore(str(root)), Options()))
                with trio.fail_after(60):
                    await ask()
                old.may_answer.set()
            await mount.release(opened.fh)
            await trio.testing.wait_all_tasks_blocked()
            assert old.closed
        assert [entry.st_size for entry in found] == [5, 5]
        await mount.aclose()

    trio.run(body)


@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_version_stays_open_while_a_request_uses_it(request_name: str, tmp_path: Path) -> None:
    """The last reader closes its file while another client's request about that file is still under way."""
    (tmp_path / "a").write_bytes(b"value")

    async def body() -> None:
        old, new = PausedStore(tmp_path), PausedStore(tmp_path)
        async with trio.open_nursery() as nursery:
            mount = Operations(old, Options(), {}, lambda: None)
            mount.background = nursery
            entry = await mount.lookup(InodeT(1), pyfuse3.FileNameT(b"a"), CONTEXT)
            opened = await mount.open(entry.st_ino, FlagT(os.O_RDONLY), CONTEXT)
            mount.show(StoreVersion(new, Options()))
            old.may_answer = trio.Event()
            answers: list[Any] = []

            async def ask() -> None:
                try:
                    answers.append(await REQUESTS[request_name](mount, entry.st_ino))
                except pyfuse3.FUSEError as exc:
                    answers.append(exc.errno)

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            await mount.release(opened.fh)
            await trio.testing.wait_all_tasks_blocked()
            assert not old.closed
            old.may_answer.set()
            await trio.testing.wait_all_tasks_blocked()
            assert old.closed
            assert answers not in ([], [errno.EIO])
        await mount.aclose()

    trio.run(body)


def test_failing_background_work_does_not_end_the_mount(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A truncated index, for example, is noticed only by the first SQL statement that reads it."""

    async def body() -> None:
        async with trio.open_nursery() as nursery:
            mount = Operations(FileSystemStore(str(tmp_path)), Options(), {}, lambda: None)
            mount.background = nursery

            async def fail() -> None:
                raise sqlite3.DatabaseError("database disk image is malformed")

            mount.begin(mount.current, fail)
            await trio.testing.wait_all_tasks_blocked()
            assert mount.current.users == 0
        await mount.aclose()

    trio.run(body)
    assert "database disk image is malformed" in caplog.text


@pytest.mark.parametrize(("age", "keeps"), [(0, False), (1, False), (10, True), (-10, False), (-3600, True)])
def test_the_kernel_keeps_no_pages_of_a_file_that_has_just_changed(age: int, keeps: bool, root: Path) -> None:
    """On some file systems, the next change may get the same time. A time far in the future was set explicitly."""

    async def body() -> None:
        mount = Operations(FileSystemStore(str(root)), Options(), {}, lambda: None)
        inode = await look_up(mount)
        now = time.time()
        os.utime(root / "d/x", (now, now - age))
        descriptors = len(os.listdir("/proc/self/fd"))
        for opened in [await mount.open(inode, FlagT(os.O_RDONLY), CONTEXT) for _ in range(2)]:
            await mount.release(opened.fh)
        assert opened.keep_cache == keeps
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        await mount.aclose()

    trio.run(body)
