"""Versions of what a mount shows: when one that is shown no more is closed."""

from __future__ import annotations

import errno
import os
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
from zarrfs.fuse.versions import Version
from zarrfs.fuse.xattrs import SOURCE_XATTR
from zarrfs.store.api import Info
from zarrfs.store.directory import FileSystemStore

CONTEXT = cast(pyfuse3.RequestContext, None)


class Slow(FileSystemStore):
    """It answers info() when it is let, and notes when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.let = trio.Event()
        self.let.set()
        self.closed = False

    async def info(self, key: str, sized: bool = True) -> Info:
        await self.let.wait()
        if self.closed:
            raise RuntimeError("is closed")
        return await super().info(key, sized)

    async def aclose(self) -> None:
        self.closed = True
        await super().aclose()


Question = Callable[[Operations, InodeT], Awaitable[Any]]
QUESTIONS: dict[str, Question] = {
    "getattr": lambda mount, inode: mount.getattr(inode, CONTEXT),
    "getxattr": lambda mount, inode: mount.getxattr(inode, SOURCE_XATTR, CONTEXT),
    "listxattr": lambda mount, inode: mount.listxattr(inode, CONTEXT),
    "readlink": lambda mount, inode: mount.readlink(inode, CONTEXT),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_is_not_closed_under_a_question(question: str, tmp_path: Path) -> None:
    """The last who has a file open in it closes that while another one's question about the file goes on."""
    (tmp_path / "a").write_bytes(b"value")

    async def body() -> None:
        old, new = Slow(tmp_path), Slow(tmp_path)
        async with trio.open_nursery() as nursery:
            mount = Operations(old, Options(), {}, lambda: None)
            mount.background, mount.current.descriptors = nursery, None
            entry = await mount.lookup(InodeT(1), pyfuse3.FileNameT(b"a"), CONTEXT)
            opened = await mount.open(entry.st_ino, FlagT(os.O_RDONLY), CONTEXT)
            mount.show(Version(new, Options()))
            old.let = trio.Event()
            answers: list[Any] = []

            async def ask() -> None:
                try:
                    answers.append(await QUESTIONS[question](mount, entry.st_ino))
                except pyfuse3.FUSEError as exc:
                    answers.append(exc.errno)

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            await mount.release(opened.fh)
            await trio.testing.wait_all_tasks_blocked()
            assert not old.closed
            old.let.set()
            await trio.testing.wait_all_tasks_blocked()
            assert old.closed
            assert mount.versions == [mount.current]
            assert answers not in ([], [errno.EIO])
        await mount.aclose()

    trio.run(body)
