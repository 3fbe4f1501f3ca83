"""The memory that the processes of one mount share."""

from __future__ import annotations

from zarrfs.fuse.shared import Handles, Shared


def test_a_slot_of_a_killed_process_is_free_once() -> None:
    shared = Shared(1)
    handle = Handles(shared, 0).take(7, 1, 0, None, False)
    assert handle is not None
    successor = Handles(shared, 0)
    successor.release(handle)  # what release() of a worker does, after which it sweeps
    successor.free(handle)
    successor.reclaim()
    taken = [successor.take(inode, 1, 0, None, False) for inode in (8, 9)]
    assert None not in taken
    assert [slot.inode for number in taken if number and (slot := successor.get(number))] == [8, 9]
