"""The handlers of two processes of one mount, run in one process: each serves handles that the other opened."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import EntryAttributes, FileNameT, FlagT, InodeT, ReaddirToken

from tests.fuse.test_versions import CONTEXT
from zarrfs.config.options import Options
from zarrfs.fuse.shared import Shared
from zarrfs.fuse.worker import WorkerOperations
from zarrfs.store.api import Info, Value
from zarrfs.store.directory import FileSystemStore
from zarrfs.system.buffers import Buffer

ROOT = InodeT(1)


class _Value(Value):
    """A value without a file descriptor."""

    def __init__(self, value: Value) -> None:
        super().__init__(value.info, value.version)
        self._value = value

    async def read(self, start: int, length: int) -> Buffer:
        return await self._value.read(start, length)

    def close(self) -> None:
        self._value.close()


class RemoteStore(FileSystemStore):
    """A store whose values have no file descriptor, like those behind URLs."""

    async def open(self, key: str) -> Value:
        return _Value(await super().open(key))


class UnsizedStore(FileSystemStore):
    """A store whose listings have no sizes; `asked` records the keys passed to info()."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.asked: list[str] = []

    async def info(self, key: str, sized: bool = True) -> Info:
        self.asked.append(key)
        return await super().info(key, sized)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        async for info in super().list_dir(prefix, after):
            yield info._replace(size=None)


def pair(path: Path, kind: type[FileSystemStore] = FileSystemStore) -> Iterator[WorkerOperations]:
    shared = Shared(2)
    for process in range(2):
        yield WorkerOperations(kind(str(path)), Options(), {}, lambda: None, shared, process)


@pytest.mark.parametrize("left", ["nothing", "a directory", "a file above"])
def test_a_removed_file_is_an_io_error_for_a_process_that_has_to_reopen_it(left: str, tmp_path: Path) -> None:
    """After ENOENT, ENOTDIR or EISDIR a Zarr reader would use fill values."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a").write_bytes(b"value")

    async def body() -> int:
        one, other = pair(tmp_path, RemoteStore)
        above = await one.lookup(ROOT, FileNameT(b"d"), CONTEXT)
        entry = await one.lookup(above.st_ino, FileNameT(b"a"), CONTEXT)
        opened = await one.open(entry.st_ino, FlagT(0), CONTEXT)
        (tmp_path / "d/a").unlink()
        if left == "a directory":
            (tmp_path / "d/a").mkdir()
        elif left == "a file above":
            (tmp_path / "d").rmdir()
            (tmp_path / "d").touch()
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await other.read(opened.fh, 0, 10)
        for operations in one, other:
            await operations.aclose()
        return int(caught.value.errno)

    assert trio.run(body) == errno.EIO


def test_after_rewinddir_a_listing_resumes_where_another_process_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that was created before the rewinddir shifts all other names by one."""
    for number in range(100):
        (tmp_path / f"e{number:02}").touch()
    sent, room = list[str](), 0

    def reply(_token: object, name: bytes, _entry: object, _next: int) -> bool:
        nonlocal room
        room -= 1
        if room >= 0:
            sent.append(name.decode())
        return room >= 0

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)

    async def body() -> None:
        nonlocal room
        token = cast(ReaddirToken, None)
        one, other = pair(tmp_path)
        handle, room = await one.opendir(ROOT, CONTEXT), 27
        await other.readdir(handle, 0, token)
        assert sent[2:] == [f"e{number:02}" for number in range(25)]
        (tmp_path / "!new").touch()
        sent.clear()
        room = 27
        await one.readdir(handle, 0, token)
        room = 1000
        await other.readdir(handle, 27, token)
        assert sent[2:] == ["!new", *(f"e{number:02}" for number in range(100))]
        for operations in one, other:
            await operations.aclose()

    trio.run(body)


def test_a_listing_without_sizes_requests_only_sizes_that_some_process_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads a file would take a size of 0 for its end; finding a size may cost a network request."""
    for name in "abc":
        (tmp_path / name).write_bytes(b"value")
    sent = dict[str, tuple[int, int]]()

    def reply(_token: object, name: bytes, entry: EntryAttributes, _next: int) -> bool:
        sent[name.decode()] = entry.st_size, entry.st_ino
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)

    async def body() -> None:
        one, other = pair(tmp_path, UnsizedStore)
        store = cast(UnsizedStore, one.store)

        async def sizes() -> list[int]:
            store.asked.clear()
            await one.readdir(await one.opendir(ROOT, CONTEXT), 0, cast(ReaddirToken, None))
            return [sent[name][0] for name in "abc"]

        for _ in range(2):
            assert (await sizes(), store.asked) == ([0, 0, 0], [])
        assert (await other.getattr(InodeT(sent["b"][1]), CONTEXT)).st_size == 5
        assert (await sizes(), store.asked) == ([0, 5, 0], ["b"])
        assert (await sizes(), store.asked) == ([0, 5, 0], [])
        for operations in one, other:
            await operations.aclose()

    trio.run(body)
