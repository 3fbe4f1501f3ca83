"""Lookups and copy-up in a writable mount, with concurrent changes and with failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FileNameT, FlagT, InodeT

from zarrfs.config.options import Options
from zarrfs.fuse.writable import WritableOperations
from zarrfs.store.api import Info
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.overlay import Overlay, OverlayEntry
from zarrfs.store.upper import Upper

CONTEXT = cast(pyfuse3.RequestContext, SimpleNamespace(uid=0, gid=0))
Change = Callable[[WritableOperations, InodeT], Awaitable[None]]


class SlowStore(FileSystemStore):
    """A store whose info() waits until the test lets it answer."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.may_answer = trio.Event()

    async def info(self, key: str, sized: bool = True) -> Info:
        found = await super().info(key, sized)
        await self.may_answer.wait()
        return found


async def write(mount: WritableOperations, inode: InodeT) -> None:
    """Replace the value of a file of the lower store through the mount."""
    opened = await mount.open(inode, FlagT(os.O_WRONLY | os.O_TRUNC), CONTEXT)
    await mount.write(opened.fh, 0, b"new value")
    await mount.release(opened.fh)


async def remove(mount: WritableOperations, _: InodeT) -> None:
    await mount.unlink(pyfuse3.ROOT_INODE, FileNameT(b"K"), CONTEXT)


@pytest.mark.parametrize(("change", "expected"), [(write, b"new value"), (remove, None)])
def test_a_lookup_that_waits_for_the_lower_store_sees_a_concurrent_change(
    change: Change, expected: bytes | None, tmp_path: Path
) -> None:
    (tmp_path / "lower").mkdir()
    (tmp_path / "upper").mkdir()
    (tmp_path / "lower/K").write_bytes(b"old")

    async def body() -> bytes | None:
        store = SlowStore(tmp_path / "lower")
        mount = WritableOperations(Overlay(store, Upper(str(tmp_path / "upper"))), Options(), {}, lambda: None)
        store.may_answer.set()
        known = await mount.lookup(pyfuse3.ROOT_INODE, FileNameT(b"K"), CONTEXT)
        store.may_answer = trio.Event()
        late = list[pyfuse3.EntryAttributes]()

        async def look() -> None:
            late.append(await mount.lookup(pyfuse3.ROOT_INODE, FileNameT(b"K"), CONTEXT))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await trio.testing.wait_all_tasks_blocked()
            waiting, store.may_answer = store.may_answer, trio.Event()
            store.may_answer.set()
            await change(mount, known.st_ino)
            waiting.set()
        [entry] = late
        if entry.st_ino == 0:
            return None
        assert entry.st_ino == known.st_ino
        opened = await mount.open(entry.st_ino, FlagT(os.O_RDONLY), CONTEXT)
        found = bytes(await mount.read(opened.fh, 0, 100))
        await mount.release(opened.fh)
        await mount.aclose()
        return found

    assert trio.run(body) == expected


@pytest.mark.parametrize("name", [".zarrfs-upper", ".wh.K", ".zarrfs-staging"])
def test_a_reserved_name_of_the_upper_is_absent_during_a_change(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("lower", "upper"):
        (tmp_path / place).mkdir()
    (tmp_path / "upper" / name).touch()
    overlay = Overlay(FileSystemStore(str(tmp_path / "lower")), Upper(str(tmp_path / "upper")))
    find, asked = overlay.find, list[str]()

    async def counted(key: str) -> OverlayEntry:
        asked.append(key)
        assert len(asked) < 10, "for ever"
        return await find(key)

    monkeypatch.setattr(overlay, "find", counted)

    async def body() -> int:
        mount = WritableOperations(overlay, Options(), {}, lambda: None)
        mount.under_way = 1  # as while a thread copies up or syncs
        found = await mount.lookup(pyfuse3.ROOT_INODE, FileNameT(name.encode()), CONTEXT)
        await mount.aclose()
        return found.st_ino

    assert trio.run(body) == 0
    assert asked == [name]


@pytest.mark.parametrize("uid", [0, 1000])
def test_only_root_truncates_a_read_only_file_while_copying_it_up(
    uid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon of another user cannot open the copy for writing, so the file must keep its bytes."""
    for place in ("lower", "upper"):
        (tmp_path / place).mkdir()
    (tmp_path / "lower/K").write_bytes(b"old")
    (tmp_path / "lower/K").chmod(0o444)
    monkeypatch.setattr(os, "geteuid", lambda: uid)

    async def body() -> bytes:
        store = FileSystemStore(str(tmp_path / "lower"))
        mount = WritableOperations(Overlay(store, Upper(str(tmp_path / "upper"))), Options(), {}, lambda: None)
        known = await mount.lookup(pyfuse3.ROOT_INODE, FileNameT(b"K"), CONTEXT)
        await mount.copy_up(known.st_ino, 0)
        await mount.aclose()
        return (tmp_path / "upper/K").read_bytes()

    assert trio.run(body) == (b"old" if uid else b"")


def test_open_files_read_the_copy_once_descriptors_are_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never read the lower file, whose bytes would stay in the page cache of a file that was written to."""
    for place in ("lower", "upper"):
        (tmp_path / place).mkdir()
    (tmp_path / "lower/K").write_bytes(b"old")
    real = os.open

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def body() -> None:
        store = FileSystemStore(str(tmp_path / "lower"))
        mount = WritableOperations(Overlay(store, Upper(str(tmp_path / "upper"))), Options(), {}, lambda: None)
        known = await mount.lookup(pyfuse3.ROOT_INODE, FileNameT(b"K"), CONTEXT)
        handles = [(await mount.open(known.st_ino, FlagT(os.O_RDONLY), CONTEXT)).fh for _ in range(3)]
        bind = mount.inodes.bind

        def bound(*arguments: Any) -> None:
            bind(*arguments)
            monkeypatch.setattr(os, "open", full)

        monkeypatch.setattr(mount.inodes, "bind", bound)
        await mount.copy_up(known.st_ino)
        with pytest.raises(pyfuse3.FUSEError):
            await mount.read(handles[0], 0, 100)
        monkeypatch.setattr(os, "open", real)
        (tmp_path / "upper/K").write_bytes(b"new value")
        for fh in handles:
            assert bytes(await mount.read(fh, 0, 100)) == b"new value"
            await mount.release(fh)
        await mount.aclose()

    trio.run(body)
