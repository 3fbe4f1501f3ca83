"""Inode numbers and the keys they stand for, with the kernel's lookup counts."""

from __future__ import annotations

import os
import stat

import pyfuse3

from zarrfs.errors import NotFound
from zarrfs.store.api import Kind

_FILE = Kind.FILE  # an enum's member is slow to look up, and this is done for every entry
_MANY = 10_000


class InodeTable:
    """Every inode that the kernel knows; an entry leaves with the kernel's last forget.

    A key keeps its inode as long as it stays the same file: the kernel gives up on an inode that changes type,
    and would mix the pages of two files that share one. After renew() only directories keep theirs.
    """

    def __init__(self) -> None:
        root = int(pyfuse3.ROOT_INODE)
        self._keys: dict[int, str] = {root: ""}
        self._inodes: dict[str, int] = {"": root}
        self._more: dict[int, int] = {}  # lookups beyond the first
        self._kinds: dict[int, Kind] = {}  # of what is not a file
        self._kinds[root] = Kind.DIRECTORY
        self._identities: dict[int, int] = {}
        self.unsized: set[int] = set()  # told without a size, which only their targets know, and not opened since
        self.sizes: dict[int, int] = {}  # bytes, as told last since then
        self._next = self._first = root + 1  # the first of the version that is shown
        self._orphans: set[int] = set()  # of listings of older versions
        self._gone = 0  # inodes dropped since the last _shrink()

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, inode: int) -> str:
        """The key of an inode; NotFound for one that was never handed out or was forgotten."""
        try:
            return self._keys[inode]
        except KeyError:
            raise NotFound(f"inode {inode}") from None

    def is_other(self, inode: int, identity: int | None) -> bool:
        """Whether an inode is of another file than the one with this Info.identity, as far as both are known."""
        return identity is not None and self._identities.get(inode, identity) != identity

    def learn(self, inode: int, identity: int | None) -> None:
        """Info.identity of what an inode stands for."""
        if identity is not None:
            self._identities[inode] = identity

    def kind(self, inode: int) -> Kind:
        """What the kernel takes an inode for; it must stay that."""
        return self._kinds.get(inode, _FILE)

    def directories(self) -> list[int]:
        """The inodes of directories."""
        return [inode for inode, kind in list(self._kinds.items()) if kind is Kind.DIRECTORY]

    def renew(self) -> None:
        """The tree is another version from now on: a file has a new inode when it is looked up next. Costs nothing."""
        self._first = self._next

    def is_old(self, inode: int) -> bool:
        """Whether an inode is of an older version than the one that is shown; a directory never is."""
        if inode >= self._first:
            return inode in self._orphans
        return self._kinds.get(inode, _FILE) is not Kind.DIRECTORY

    def survives(self, inode: int) -> bool:
        """Whether an inode is of a directory that was known before renew(): it stands for whatever is there."""
        return inode < self._first and self._kinds.get(inode) is Kind.DIRECTORY

    def orphan(self, key: str, kind: Kind) -> int:
        """An old inode for an entry in a listing of an older version, counted as looked up once."""
        known = self._inodes.get(key)
        if kind is Kind.DIRECTORY and known is not None and self._kinds.get(known) is kind:
            return self.lookup(key, kind, self._identities.get(known))
        inode = self._next
        self._next = inode + 1
        self._keys[inode] = key
        self._kinds[inode] = kind
        self._orphans.add(inode)
        return inode

    def known(self) -> dict[str, int]:
        """A copy: the inode of each key that the kernel knows."""
        return dict(self._inodes)

    def lookup(self, key: str, kind: Kind, identity: int | None = None) -> int:
        """The inode of `key`, counted as looked up once more."""
        inode = self._inodes.get(key)
        if inode is not None and self._kinds.get(inode, _FILE) is kind:
            old = inode < self._first  # of an older version
            if kind is Kind.DIRECTORY if old else not self.is_other(inode, identity):
                self.learn(inode, identity)
                self._more[inode] = self._more.get(inode, 0) + 1
                return inode
        # what the inode stood for, if there was one, lives on without a name until the kernel forgets it
        inode = self._next
        self._next = inode + 1
        self._keys[inode] = key
        self._inodes[key] = inode
        if kind is not _FILE:
            self._kinds[inode] = kind
        self.learn(inode, identity)
        return inode

    def shared(self, inode: int) -> bool:
        """Whether an inode was looked up more than once."""
        return inode in self._more

    def peek(self, key: str) -> int | None:
        """The inode of `key` where the kernel knows one; counts nothing."""
        return self._inodes.get(key)

    def forget(self, inode: int, lookups: int) -> bool:
        """Take `lookups` off the count of `inode`; at none left it is dropped. Whether it was."""
        more = self._more.get(inode, 0) - lookups
        if more >= 0:
            if more:
                self._more[inode] = more
            else:
                self._more.pop(inode, None)
            return False
        if inode != pyfuse3.ROOT_INODE:
            self._more.pop(inode, None)
            self._kinds.pop(inode, None)
            self._identities.pop(inode, None)
            self.sizes.pop(inode, None)
            self.unsized.discard(inode)
            self._orphans.discard(inode)
            key = self._keys.pop(inode, None)
            if key is not None and self._inodes.get(key) == inode:
                del self._inodes[key]
            self._gone += 1
            if self._gone > _MANY and self._gone > 4 * len(self._keys):
                self._shrink()
            return True
        return False

    def _shrink(self) -> None:
        """Give back memory: a dict stays as large as it ever was."""
        self._keys, self._inodes, self._more = dict(self._keys), dict(self._inodes), dict(self._more)
        self._kinds, self._identities, self.sizes = dict(self._kinds), dict(self._identities), dict(self.sizes)
        self._orphans, self.unsized = set(self._orphans), set(self.unsized)
        self._gone = 0


File = tuple[int, int, int]  # st_dev, st_ino and the type of a file of the upper


def file_of(status: os.stat_result) -> File:
    """What tells a file of the upper from all others, as long as it exists."""
    return status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode)


class WritableInodeTable(InodeTable):
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
