"""InodeTable frees the memory of forgotten inodes; WritableInodeTable tracks the names of files."""

from __future__ import annotations

import stat
import sys
from collections.abc import Sized

import pytest

from zarrfs.fuse.inodes import InodeTable, WritableInodeTable
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


@pytest.mark.parametrize("kind", [stat.S_IFREG, stat.S_IFDIR])
def test_the_key_of_an_inode_is_the_name_that_was_looked_up_last(kind: int) -> None:
    """A rename or unlink that bypasses the mount removes a name which the table still holds."""
    inodes, file = WritableInodeTable(), (1, 2, kind)
    inode = inodes.lookup_file("b", file)
    assert inodes.lookup_file("a", file) == inode
    assert inodes.key(inode) == "a"
    assert inodes.lookup_file("b", file) == inode
    assert inodes.key(inode) == "b"
    inodes.unlink("b")
    assert inodes.key(inode) == "a"
    inodes.unlink("a")
    assert inodes.is_nameless(inode)
