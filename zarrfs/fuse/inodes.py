"""Inode tables of read-only and writable mounts: the key of each inode, and the kernel's lookup counts."""

from __future__ import annotations

import os
import secrets
import stat

import pyfuse3

from zarrfs.errors import NotFound
from zarrfs.fuse.sizes import Sizes
from zarrfs.store.api import Kind

_FILE = Kind.FILE  # looking up an enum member is slow, and every entry needs it
_MANY = 10_000


class InodeTable:
    """Every inode that the kernel knows. An inode is dropped when the kernel has forgotten the last lookup of it.

    A key keeps its inode as long as it names the same file: the kernel refuses an inode that changes type, and would
    mix the pages of two files that share an inode. After renew() only directories keep their inodes.
    """

    def __init__(self) -> None:
        root = int(pyfuse3.ROOT_INODE)
        self._keys: dict[int, str] = {root: ""}
        self._inodes: dict[str, int] = {"": root}
        self._extra_lookups: dict[int, int] = {}  # lookup counts minus one
        self._kinds: dict[int, Kind] = {}  # by inode, except regular files
        self._kinds[root] = Kind.DIRECTORY
        self._identities: dict[int, int] = {}
        self.sizes = Sizes()
        # The first inode of the visible version. It is random, so that an NFS client that still has an inode number of
        # an earlier mount gets ESTALE and not another file.
        self._next = self._first = root + 1 + (secrets.randbits(40) << 20)
        self._gone = 0  # inodes dropped since the last _shrink()

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, inode: int) -> str:
        """Return the key of an inode; NotFound if the kernel does not know it (any more)."""
        try:
            return self._keys[inode]
        except KeyError:
            raise NotFound(f"inode {inode}") from None

    def is_other(self, inode: int, identity: int | None) -> bool:
        """Return whether an inode belongs to another file than `identity` says; False if either is unknown."""
        return identity is not None and self._identities.get(inode, identity) != identity

    def learn(self, inode: int, identity: int | None) -> None:
        """Record the Info.identity of the file behind an inode."""
        if identity is not None:
            self._identities[inode] = identity

    def kind(self, inode: int) -> Kind:
        """Return the kind that the kernel has for an inode, which must never change."""
        return self._kinds.get(inode, _FILE)

    def directories(self) -> list[int]:
        """Return the inodes of all known directories."""
        return [inode for inode, kind in list(self._kinds.items()) if kind is Kind.DIRECTORY]

    def renew(self) -> None:
        """Begin a new version of the tree: files get new inodes at their next lookup. Takes constant time."""
        self._first = self._next

    def is_old(self, inode: int) -> bool:
        """Return whether an inode belongs to a replaced version; a directory never does."""
        return inode < self._first and self._kinds.get(inode, _FILE) is not Kind.DIRECTORY

    def survives(self, inode: int) -> bool:
        """Return whether an inode is a directory from before renew(), now used for the new version's directory."""
        return inode < self._first and self._kinds.get(inode) is Kind.DIRECTORY

    def known(self) -> dict[str, int]:
        """Return a copy of the inodes by key."""
        return dict(self._inodes)

    def lookup(self, key: str, kind: Kind, identity: int | None = None) -> int:
        """Return the inode of `key`, a new one if another file has taken the name. Count one lookup."""
        inode = self._inodes.get(key)
        if inode is not None and self._kinds.get(inode, _FILE) is kind:
            old = inode < self._first  # from before renew()
            if kind is Kind.DIRECTORY if old else not self.is_other(inode, identity):
                self.learn(inode, identity)
                self._extra_lookups[inode] = self._extra_lookups.get(inode, 0) + 1
                return inode
        # the previous inode, if any, stays valid without a name until the kernel forgets it
        inode = self._next
        self._next = inode + 1
        self._keys[inode] = key
        self._inodes[key] = inode
        if kind is not _FILE:
            self._kinds[inode] = kind
        self.learn(inode, identity)
        return inode

    def peek(self, key: str) -> int | None:
        """Return the inode of `key` if the kernel knows one. Count no lookup."""
        return self._inodes.get(key)

    def forget(self, inode: int, lookups: int) -> bool:
        """Lower the lookup count of `inode`; drop it at zero, and return whether that happened."""
        more = self._extra_lookups.get(inode, 0) - lookups
        if more >= 0:
            if more:
                self._extra_lookups[inode] = more
            else:
                self._extra_lookups.pop(inode, None)
            return False
        if inode != pyfuse3.ROOT_INODE:
            self._extra_lookups.pop(inode, None)
            self._kinds.pop(inode, None)
            self._identities.pop(inode, None)
            self.sizes.pop(inode, None)
            key = self._keys.pop(inode, None)
            if key is not None and self._inodes.get(key) == inode:
                del self._inodes[key]
            self._gone += 1
            if self._gone > _MANY and self._gone > 4 * len(self._keys):
                self._shrink()
            return True
        return False

    def _shrink(self) -> None:
        """Rebuild the tables to free memory: a dict never shrinks by itself."""
        self._keys, self._inodes, self._extra_lookups = dict(self._keys), dict(self._inodes), dict(self._extra_lookups)
        self._kinds, self._identities, self.sizes = dict(self._kinds), dict(self._identities), Sizes(self.sizes)
        self._gone = 0


FileId = tuple[int, int, int]  # st_dev, st_ino and the type of a file of the upper directory


def file_of(status: os.stat_result) -> FileId:
    """Return the identity of a file of the upper directory. It is unique as long as the file exists."""
    return status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode)


class WritableInodeTable(InodeTable):
    """An InodeTable of a tree that changes: a file of the upper directory has one inode for all its hard links.

    An inode that has lost its last name stays until the kernel forgets it; key() raises NotFound for it. An entry of
    the lower store keeps its inode when it is copied up, by bind() or by lookup_file() under its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inode_of: dict[FileId, int] = {}
        self._files: dict[int, FileId] = {}  # by inode, for inodes in the upper directory
        self._names: dict[int, set[str]] = {}  # all names of an inode, for inodes with more than one name
        self._nameless: set[int] = set()

    def key(self, inode: int) -> str:
        """Return the most recently looked up key of an inode.

        Raise NotFound if the inode has no name, or if the kernel does not know it.
        """
        if inode in self._nameless:
            raise NotFound(f"inode {inode}")
        return super().key(inode)

    def __contains__(self, inode: int) -> bool:
        return inode in self._keys

    def is_nameless(self, inode: int) -> bool:
        """Return whether an inode has lost all its names."""
        return inode in self._nameless

    def is_superseded(self, inode: int, key: str) -> bool:
        """Return whether `key`, once a name of `inode`, belongs to another inode now."""
        return self._inodes.get(key, inode) != inode

    def file(self, inode: int) -> FileId | None:
        """Return the file of the upper directory behind an inode; None while it is in the lower store."""
        return self._files.get(inode)

    def bind(self, inode: int, file: FileId) -> None:
        """Record that `inode` was copied up and is `file` now."""
        self._unbind(inode)
        self._files[inode] = file
        self._inode_of[file] = inode

    def lookup(self, key: str, kind: Kind, identity: int | None = None) -> int:
        """Return the inode of `key`, an entry of the lower store. Count one lookup."""
        if self._inodes.get(key) in self._files:
            self.unlink(key)
        return super().lookup(key, kind, identity)

    def lookup_file(self, key: str, file: FileId) -> int:
        """Return the inode of `file`, which `key` names. Count one lookup."""
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
        else:
            self._keys[inode] = key  # the most recent name: others may have been removed beneath the mount
        self._extra_lookups[inode] = self._extra_lookups.get(inode, 0) + 1
        return inode

    def unlink(self, key: str) -> None:
        """Remove the name `key` from its inode."""
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
        """Move `old` and everything below it to `new`; the inode that was at `new` loses that name."""
        self.unlink(new)
        self._put(self._take(old), old, new)

    def exchange(self, one: str, other: str) -> None:
        """Swap `one` and `other`, with everything below them."""
        ones, others = self._take(one), self._take(other)
        self._put(ones, one, other)
        self._put(others, other, one)

    def forget(self, inode: int, lookups: int) -> bool:
        """Lower the lookup count as InodeTable.forget() does. A dropped inode also loses all its names."""
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

    def _may_become(self, inode: int, file: FileId) -> bool:
        """Return whether `file` can be the copy of a lower inode: a directory stays a directory."""
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
        """Remove the name `key` and all names below it; return them as (key, inode)."""
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
        """Add the names that _take() removed at and below `old` again at and below `new`."""
        for key, inode in taken:
            moved = new + key[len(old) :]
            self._inodes[moved] = inode
            if self._keys[inode] == key:
                self._keys[inode] = moved
            names = self._names.get(inode)
            if names is not None:
                names.discard(key)
                names.add(moved)
