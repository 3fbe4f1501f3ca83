"""Listings of a writable mount: failing ones, and concurrent opens."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyfuse3
import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.fuse.writable import WritableOperations
from zarrfs.store.api import Info, Value
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.overlay import Overlay
from zarrfs.store.upper import Upper

TOKEN = cast(pyfuse3.ReaddirToken, None)
CONTEXT = cast(pyfuse3.RequestContext, None)


class BadStore(FileSystemStore):
    """A store whose info() fails for one of its names."""

    async def info(self, key: str, sized: bool = True) -> Info:
        if key == "b":
            raise ReadError(key, "is out")
        return await super().info(key, sized)


def test_a_listing_that_fails_counts_no_lookups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is an error without entries, so the kernel sends no FORGET for them."""
    for place in ("lower", "upper"):
        (tmp_path / place).mkdir()
    for name in "abc":
        (tmp_path / "lower" / name).touch()
    monkeypatch.setattr(pyfuse3, "readdir_reply", lambda *_: room)
    room = False

    async def body() -> list[int]:
        nonlocal room
        lower = BadStore(str(tmp_path / "lower"))
        mount = WritableOperations(Overlay(lower, Upper(str(tmp_path / "upper"))), Options(), {}, lambda: None)
        handle = await mount.opendir(pyfuse3.ROOT_INODE, CONTEXT)
        await mount.readdir(handle, 0, TOKEN)  # the reply has no room for an entry
        counted, room = [], True
        for _ in range(3):
            mount.changes += 1  # so that each entry is looked up again
            with pytest.raises(pyfuse3.FUSEError):
                await mount.readdir(handle, 2, TOKEN)
            counted.append(len(mount.inodes))
        await mount.aclose()
        return counted

    before, *later = trio.run(body)
    assert later == [before, before]
    assert before == 1, "the root alone"


def test_a_file_that_is_copied_up_while_it_is_opened_is_open_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lower").mkdir()
    (tmp_path / "upper").mkdir()
    (tmp_path / "lower/a").write_bytes(b"value")
    monkeypatch.setattr(pyfuse3, "invalidate_inode", lambda *_, **__: None)
    mounts: list[WritableOperations] = []

    class CopiedMeanwhile(FileSystemStore):
        async def open(self, key: str) -> Value:
            value = await super().open(key)
            if mounts:
                mount = mounts.pop()
                await mount.copy_up(mount.inodes.peek(key) or 0)
            return value

    async def body() -> None:
        before = len(os.listdir("/proc/self/fd"))
        lower = CopiedMeanwhile(str(tmp_path / "lower"))
        mount = WritableOperations(Overlay(lower, Upper(str(tmp_path / "upper"))), Options(), {}, lambda: None)
        mounts.append(mount)
        file = (await mount.lookup(pyfuse3.ROOT_INODE, pyfuse3.FileNameT(b"a"), CONTEXT)).st_ino
        opened = await mount.open(file, pyfuse3.FlagT(os.O_RDONLY), CONTEXT)
        assert (await mount.read(opened.fh, 0, 9), mount.stats()["open_files"]) == (b"value", 1)
        await mount.release(opened.fh)
        await mount.aclose()
        assert len(os.listdir("/proc/self/fd")) <= before

    trio.run(body)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("request_name", ["create", "mkdir", "mknod", "symlink"])
def test_an_entry_that_cannot_be_given_to_its_creator_is_removed(
    request_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "a file system without owners")

    monkeypatch.setattr(os, "chown", refuse)
    arguments = {"create": (0o644, os.O_RDWR), "mkdir": (0o755,), "mknod": (0o100644, 0), "symlink": (b"t",)}
    creator = cast(pyfuse3.RequestContext, SimpleNamespace(uid=5, gid=5))

    async def body() -> None:
        overlay = Overlay(FileSystemStore(str(tmp_path)), Upper(str(tmp_path), plain=True))
        mount = WritableOperations(overlay, Options(), {}, lambda: None)
        with pytest.raises(pyfuse3.FUSEError):
            await getattr(mount, request_name)(pyfuse3.ROOT_INODE, b"new", *arguments[request_name], creator)
        await mount.aclose()

    trio.run(body)
    assert os.listdir(tmp_path) == []
