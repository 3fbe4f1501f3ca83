"""Attributes of files that are open while the source changes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FlagT, InodeT

from tests.fuse.test_versions import CONTEXT, PausedStore
from zarrfs.config.options import Options
from zarrfs.fuse.operations import Operations
from zarrfs.fuse.versions import StoreVersion
from zarrfs.store.directory import FileSystemStore


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


def test_getattr_of_an_open_file_survives_a_refresh(root: Path) -> None:
    async def body() -> None:
        store, found = PausedStore(root), list[Any]()
        async with trio.open_nursery() as nursery:
            mount = Operations(store, Options(), {}, lambda: None)
            mount.background = nursery
            inode = await look_up(mount)
            opened = await mount.open(inode, FlagT(os.O_RDONLY), CONTEXT)

            async def ask() -> None:
                found.append(await mount.getattr(inode, CONTEXT))

            store.may_answer = trio.Event()
            async with trio.open_nursery() as asking:
                asking.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                mount.show(StoreVersion(FileSystemStore(str(root)), Options()))
                store.may_answer.set()
            await mount.release(opened.fh)
        assert [entry.st_size for entry in found] == [5]
        await mount.aclose()

    trio.run(body)


@pytest.mark.parametrize(("age", "keeps"), [(0, False), (1, False), (10, True), (-10, False), (-3600, True)])
def test_the_kernel_keeps_no_pages_of_a_file_that_has_just_changed(age: int, keeps: bool, root: Path) -> None:
    """On some file systems, the next change may get the same time. A time far in the future was set explicitly."""

    async def body() -> None:
        mount = Operations(FileSystemStore(str(root)), Options(), {}, lambda: None)
        inode = await look_up(mount)
        now = time.time()
        os.utime(root / "d/x", (now, now - age))
        for opened in [await mount.open(inode, FlagT(os.O_RDONLY), CONTEXT) for _ in range(2)]:
            await mount.release(opened.fh)
        assert opened.keep_cache == keeps
        await mount.aclose()

    trio.run(body)
