"""Inode numbers of a tree that changes: renamed subtrees, files with several names, and with none."""

from __future__ import annotations

import os
import stat

import pyfuse3

from zarrfs.errors import NotFound
from zarrfs.fuse.inodes import InodeTable
from zarrfs.store.api import Kind

File = tuple[int, int, int]  # st_dev, st_ino and the type of a file of the upper


def file_of(status: os.stat_result) -> File:
    """What tells a file of the upper from all others, as long as it exists."""
    return status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode)


class NodeTable(InodeTable):
    """An InodeTable where a file of the upper has one inode, whatever names it has.

    An inode may lose its last name and lives on until the kernel forgets it; key() is NotFound then. An entry of
    the lower store keeps its inode when it is copied up: bind(), or lookup_file() under its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inode_of: dict[File, int] = {}
        self._files: dict[int, File] = {}  # of inodes that are in the upper
        self._names: dict[int, set[str]] = {}  # of inodes with more than one
        self._nameless: set[int] = set()

    def key(self, inode: int) -> str:
        """A key of an inode; NotFound for one that was never handed out, was forgotten, or has lost its names."""
        if inode in self._nameless:
            raise NotFound(f"inode {inode}")
        return super().key(inode)

    def __contains__(self, inode: int) -> bool:
        return inode in self._keys

    def is_nameless(self, inode: int) -> bool:
        """Whether an inode has lost its names."""
        return inode in self._nameless

    def is_superseded(self, inode: int, key: str) -> bool:
        """Whether `key`, which was a name of `inode`, is that of another inode by now."""
        return self._inodes.get(key, inode) != inode

    def file(self, inode: int) -> File | None:
        """The file of the upper that an inode stands for; None while it is of the lower store."""
        return self._files.get(inode)

    def bind(self, inode: int, file: File) -> None:
        """`inode` has been copied up: it is `file` from now on."""
        self._unbind(inode)
        self._files[inode] = file
        self._inode_of[file] = inode

    def lookup(self, key: str, kind: Kind, identity: int | None = None) -> int:
        """The inode of `key`, an entry of the lower store, counted as looked up once more."""
        if self._inodes.get(key) in self._files:
            self.unlink(key)
        return super().lookup(key, kind, identity)

    def lookup_file(self, key: str, file: File) -> int:
        """The inode of `file`, of which `key` is a name, counted as looked up once more."""
        known = self._inodes.get(key)
        inode = self._inode_of.get(file)
        if inode is None and known is not None and known not in self._files and self._may_become(known, file):
            inode = known
            self.bind(inode, file)
        if inode is None:
            if known is not None:
                self.unlink(key)
            inode = super().lookup(key, Kind.DIRECTORY if stat.S_ISDIR(file[2]) else Kind.FILE)
            self.bind(inode, file)
            return inode
        if known != inode:
            self._add_name(key, inode)
        self._more[inode] = self._more.get(inode, 0) + 1
        return inode

    def unlink(self, key: str) -> None:
        """`key` is no name of its inode any more."""
        inode = self._inodes.pop(key, None)
        if inode is None:
            return
        names = self._names.get(inode, set())
        names.discard(key)
        if names:
            self._keys[inode] = next(iter(names))
            if len(names) == 1:
                del self._names[inode]
        else:
            self._nameless.add(inode)

    def rename(self, old: str, new: str) -> None:
        """What was at `old`, and all below it, is at `new`; what was there has lost that name."""
        self.unlink(new)
        self._put(self._take(old), old, new)

    def exchange(self, one: str, other: str) -> None:
        """What was at `one`, and all below it, is at `other`, and the reverse."""
        ones, others = self._take(one), self._take(other)
        self._put(ones, one, other)
        self._put(others, other, one)

    def forget(self, inode: int, lookups: int) -> bool:
        """As InodeTable.forget(); all names of an inode go with it."""
        names = self._names.get(inode, ())
        if not super().forget(inode, lookups):
            return False
        for key in names:
            if self._inodes.get(key) == inode:
                del self._inodes[key]
        self._names.pop(inode, None)
        self._nameless.discard(inode)
        self._unbind(inode)
        return True

    def _may_become(self, inode: int, file: File) -> bool:
        """Whether an inode of the lower store can have been copied up as `file`: a directory stays one."""
        return (self._kinds.get(inode, Kind.FILE) is Kind.DIRECTORY) == stat.S_ISDIR(file[2])

    def _unbind(self, inode: int) -> None:
        file = self._files.pop(inode, None)
        if file is not None and self._inode_of.get(file) == inode:
            del self._inode_of[file]

    def _add_name(self, key: str, inode: int) -> None:
        self.unlink(key)
        self._inodes[key] = inode
        if inode in self._nameless:
            self._nameless.discard(inode)
        elif inode != pyfuse3.ROOT_INODE:
            self._names.setdefault(inode, {self._keys[inode]}).add(key)
        self._keys[inode] = key

    def _take(self, key: str) -> list[tuple[str, int]]:
        """(key, inode) of `key` and all below it, which are taken out of the names."""
        taken = []
        inode = self._inodes.pop(key, None)
        if inode is not None:
            taken.append((key, inode))
        if inode is None or self._kinds.get(inode) is Kind.DIRECTORY:
            below = key + "/"
            taken += [(name, child) for name, child in self._inodes.items() if name.startswith(below)]
            for name, _ in taken[inode is not None :]:
                del self._inodes[name]
        return taken

    def _put(self, taken: list[tuple[str, int]], old: str, new: str) -> None:
        """Give what was taken from below `old` its names below `new`."""
        for key, inode in taken:
            moved = new + key[len(old) :]
            self._inodes[moved] = inode
            if self._keys[inode] == key:
                self._keys[inode] = moved
            names = self._names.get(inode)
            if names is not None:
                names.discard(key)
                names.add(moved)
