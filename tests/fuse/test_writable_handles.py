"""Failing listings of a writable mount."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pyfuse3
import pytest
import trio

from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.fuse.writable import WritableOperations
from zarrfs.store.api import Info
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.overlay import Overlay
from zarrfs.store.upper import Upper

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
        await mount.readdir(handle, 0, cast(pyfuse3.ReaddirToken, None))  # the reply has no room for an entry
        counted, room = [], True
        for _ in range(3):
            mount.changes += 1  # so that each entry is looked up again
            with pytest.raises(pyfuse3.FUSEError):
                await mount.readdir(handle, 2, cast(pyfuse3.ReaddirToken, None))
            counted.append(len(mount.inodes))
        await mount.aclose()
        return counted

    before, *later = trio.run(body)
    assert later == [before, before]
    assert before == 1, "the root alone"
