"""Inode numbers and the keys they stand for, with the kernel's lookup counts."""

from __future__ import annotations

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
