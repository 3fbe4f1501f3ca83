"""Open directories: any sequence of requests gets the right entries, and every lookup is counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from zarrfs.config.options import Options
from zarrfs.errors import ReadError
from zarrfs.fuse import listing
from zarrfs.fuse.inodes import InodeTable
from zarrfs.fuse.listing import DirectoryHandle
from zarrfs.fuse.operations import Operations
from zarrfs.fuse.sizes import StatAhead
from zarrfs.fuse.versions import StoreVersion
from zarrfs.store.api import Info, Kind
from zarrfs.store.directory import FileSystemStore


class Names:
    """A store with only list_dir(), which fails after `fails_after` names."""

    def __init__(self, count: int, fails_after: int | None = None) -> None:
        self.names = [f"{number:04}" for number in range(count)]
        self.fails_after = fails_after

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        assert prefix == "d"
        for number, name in enumerate(self.names):
            if number == self.fails_after:
                raise ReadError(name, "gone")
            if name > after:
                await trio.lowlevel.checkpoint()
                yield Info(name, Kind.FILE, number)


def known(inodes: InodeTable) -> Counter[str]:
    """Return by key how many lookups the kernel would have to forget."""
    root = int(pyfuse3.ROOT_INODE)
    keys = {inode: key for inode, key in inodes._keys.items() if inode != root}
    return Counter({key: 1 + inodes._extra_lookups.get(inode, 0) for inode, key in keys.items()})


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read on"), st.integers(0, 9)),
        st.tuples(st.just("seek"), st.integers(0, 30)),
        st.tuples(st.just("prepare"), st.just(0)),
    ),
    max_size=20,
)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PIECE", 4)


@settings(deadline=None, max_examples=200)
@given(count=st.integers(0, 25), fails=st.none() | st.integers(0, 25), steps=STEPS, more=st.booleans())
def test_requests_come_in_any_order(count: int, fails: int | None, steps: list[tuple[str, int]], more: bool) -> None:
    """Entries before a failure are sent; later requests fail, or get [] for a reply that already holds entries."""
    fails = None if fails is None or fails >= count else fails
    end = count if fails is None else fails

    async def main() -> None:
        store, inodes = Names(count, fails), InodeTable()
        version: Any = SimpleNamespace(store=store)
        directory = DirectoryHandle(version, "d", inodes, StatAhead())
        at, sent = 0, Counter[str]()
        for step, number in steps:
            if step == "prepare":
                await directory.prepare()
                continue
            if step == "seek":
                at = min(number, count)
            if fails is not None and at >= end:
                if more:
                    assert await directory.entries(version, at, more) == []
                for _ in range(2):
                    with pytest.raises(ReadError):
                        await directory.entries(version, at)
                continue
            piece = await directory.entries(version, at, more)
            expected = store.names[at : at + len(piece)]
            assert [entry.info.name for entry in piece] == expected
            assert [entry.name.decode() for entry in piece] == expected
            assert bool(piece) == (at < end)
            taken = piece[:number] if step == "read on" else piece[:2]
            assert [inodes.key(entry.inode) for entry in taken] == [f"d/{name}" for name in expected[: len(taken)]]
            at += len(taken)
            directory.sent(at)
            sent.update(f"d/{entry.info.name}" for entry in taken)
        await directory.close()
        assert known(inodes) == sent

    trio.run(main)


class Counting(FileSystemStore):
    listings = 0

    def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        self.listings += 1
        return super().list_dir(prefix, after)


def listed_in_replies(
    mount: Operations, monkeypatch: pytest.MonkeyPatch, after_first: Callable[[], None]
) -> list[str]:
    """List d in replies of 7 entries, and check that all lookups of the kernel are counted; return the names."""
    sent, room = list[str](), 0

    def reply(token: object, name: bytes, entry: object, next_id: int) -> bool:
        nonlocal room
        room -= 1
        if room >= 0:
            sent.append(name.decode())
        return room >= 0

    async def body() -> None:
        nonlocal room
        context = cast(pyfuse3.RequestContext, None)
        directory = mount.inodes.lookup("d", Kind.DIRECTORY)
        handle, before = await mount.opendir(directory, context), -1
        while len(sent) > before:
            before, room = len(sent), 7
            await mount.readdir(handle, before, cast(pyfuse3.ReaddirToken, None))
            if not before:
                after_first()
        await mount.releasedir(handle)
        mount.inodes.forget(directory, 1)
        assert known(mount.inodes) == Counter(f"d/{name}" for name in sent[2:])
        await mount.aclose()

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)
    trio.run(body)
    assert sent[:2] == [".", ".."]
    return sent[2:]


def store_of(root: Path, names: list[str]) -> Counting:
    (root / "d").mkdir(parents=True)
    for name in names:
        (root / "d" / name).touch()
    return Counting(str(root))


def test_a_directory_that_takes_many_replies_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry that does not fit into a reply begins the next one, and the kernel has not looked it up before."""
    names = [f"{number:04}" for number in range(30)]
    store = store_of(tmp_path, names)
    mount = Operations(store, Options(), {}, lambda: None)
    assert sorted(listed_in_replies(mount, monkeypatch, lambda: None)) == names
    assert store.listings == 1


def test_an_open_listing_goes_on_in_a_new_version_after_the_last_name_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = store_of(tmp_path / "old", [f"{number:04}" for number in range(20)])
    new = ["0000", "0003a", "0003b", "0004a", "0019"]
    mount = Operations(old, Options(), {}, lambda: None)
    after = StoreVersion(store_of(tmp_path / "new", new), Options())
    found = listed_in_replies(mount, monkeypatch, lambda: mount.show(after))
    assert found == ["0000", "0001", "0002", "0003", "0004", "0004a", "0019"]
