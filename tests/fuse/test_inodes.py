"""InodeTable frees the memory of forgotten inodes."""

from __future__ import annotations

import sys
from collections.abc import Sized

from zarrfs.fuse.inodes import InodeTable
from zarrfs.store.api import Kind


def tables(inodes: InodeTable) -> dict[str, int]:
    """Return the size of each table in bytes, without its contents."""
    return {name: sys.getsizeof(value) for name, value in vars(inodes).items() if isinstance(value, Sized)}


def test_tables_shrink_after_many_forgets() -> None:
    inodes = InodeTable()
    before = tables(inodes)
    numbers = []
    for index in range(50_000):
        numbers.append(inodes.lookup(f"{index}", (Kind.FILE, Kind.DIRECTORY)[index % 2], identity=index))
        inodes.lookup(f"{index}", (Kind.FILE, Kind.DIRECTORY)[index % 2], identity=index)
        inodes.sizes.shown(numbers[-1], index)
    assert all(size > 100 * before[name] for name, size in tables(inodes).items())
    for number in numbers:
        assert inodes.forget(number, 2)
    assert len(inodes) == 1
    assert {name: size for name, size in tables(inodes).items() if size > before[name] + 300_000} == {}
