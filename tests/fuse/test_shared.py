"""The memory that the processes of one mount share."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from zarrfs.fuse.shared import NEW, RELEASED, Handles, Shared, SharedInodes
from zarrfs.store.api import Kind
from zarrfs.store.directory import FileSystemStore


def test_a_slot_of_a_killed_process_is_freed_only_once() -> None:
    shared = Shared(1)
    handle = Handles(shared, 0).take(7, 1, 0, None, False)
    assert handle is not None
    successor = Handles(shared, 0)
    successor.release(handle)  # as release() of a worker does before it sweeps
    successor.free(handle)
    successor.reclaim()
    taken = [successor.take(inode, 1, 0, None, False) for inode in (8, 9)]
    assert None not in taken
    assert [slot.inode for number in taken if number and (slot := successor.get(number))] == [8, 9]


def test_a_handle_whose_reply_was_not_sent_is_released_with_its_process() -> None:
    shared = Shared(2)
    handles = Handles(shared, 1)
    known = handles.take(7, 1, 0, None, False)
    shared.cells[shared.at(1, NEW)] = 0  # as SharedWaiting does before the next request
    lost = handles.take(8, 1, 0, None, False)
    assert known is not None
    assert lost is not None
    shared.release_new(1)
    assert (handles.is_open(known), handles.is_open(lost)) == (True, False)
    shared.release_new(1)  # for its successor, which has no unsent reply
    assert (shared.cell(1, RELEASED), handles.is_open(known)) == (1, True)


def test_open_handles_are_found_by_inode_and_by_generation() -> None:
    shared = Shared(2)
    one, other = Handles(shared, 0), Handles(shared, 1)
    taken = [
        one.take(7, 3, 0, None, False), one.take(8, 4, 0, None, True), other.take(7, 4, 0, None, False),
        other.take(9, 5, 0, None, False),
    ]  # fmt: skip
    for handles in one, other:
        assert [handle for handle, _slot in handles.of_inode(7)] == [taken[0], taken[2]]
        assert [slot.generation for _handle, slot in handles.of_inode(8)] == [4]
        assert not list(handles.of_inode(0))
        assert [handles.holds(generation) for generation in (2, 3, 5)] == [False, True, True]
    assert taken[0] is not None
    other.release(taken[0])
    assert [handle for handle, _slot in one.of_inode(7)] == [taken[2]]
    assert [one.holds(generation) for generation in (3, 4)] == [False, True]


def test_directories_of_all_processes_are_found_without_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, store = Shared(2), FileSystemStore(str(tmp_path))
    one, other = (SharedInodes(memory, process, store) for process in range(2))
    expected = {1, one.lookup("a", Kind.DIRECTORY), other.lookup("b", Kind.DIRECTORY)}
    for kind in Kind.FILE, Kind.SYMLINK:
        one.lookup(kind.name, kind)

    def decoded(record: bytes) -> None:
        raise AssertionError("a name is decoded")

    monkeypatch.setattr("zarrfs.fuse.shared._decoded", decoded)
    assert set(other.directories()) == expected
    trio.run(store.aclose)


@pytest.mark.parametrize("identity", [None, 0, 2**64 - 1, -(2**63)])
def test_all_processes_know_any_identity_of_a_file(identity: int | None, tmp_path: Path) -> None:
    """st_ino is an unsigned 64-bit number; identities of views are signed."""
    shared, store = Shared(2), FileSystemStore(str(tmp_path))
    inode = SharedInodes(shared, 0, store).lookup("a", Kind.FILE, identity)
    found = SharedInodes(shared, 1, store).find(inode)
    assert (found.key, found.identity) == ("a", identity)
    trio.run(store.aclose)
