"""Store versions that a refresh has replaced: when they are used and closed."""

from __future__ import annotations

import errno
import os
import sqlite3
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


Request = Callable[[Operations, InodeT], Awaitable[Any]]
REQUESTS: dict[str, Request] = {
    "getxattr": lambda mount, inode: mount.getxattr(inode, SOURCE_XATTR, CONTEXT),
    "listxattr": lambda mount, inode: mount.listxattr(inode, CONTEXT),
    "readlink": lambda mount, inode: mount.readlink(inode, CONTEXT),
}


def test_getattr_of_an_open_file_does_not_ask_a_replaced_store(tmp_path: Path) -> None:
    """The open value knows its attributes, so the request neither waits for the old store nor sees the new file."""
    (tmp_path / "a").write_bytes(b"value")

    async def body() -> None:
        old, new = PausedStore(tmp_path), FileSystemStore(str(tmp_path))
        async with trio.open_nursery() as nursery:
            mount = Operations(old, Options(), {}, lambda: None)
            mount.background = nursery
            entry = await mount.lookup(InodeT(1), pyfuse3.FileNameT(b"a"), CONTEXT)
            opened = await mount.open(entry.st_ino, FlagT(os.O_RDONLY), CONTEXT)
            mount.show(StoreVersion(new, Options()))
            old.may_answer = trio.Event()
            with trio.fail_after(60):
                attributes = await mount.getattr(entry.st_ino, CONTEXT)
            assert attributes.st_size == 5
            await mount.release(opened.fh)
            await trio.testing.wait_all_tasks_blocked()
            assert old.closed
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
