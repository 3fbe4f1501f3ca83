"""A file system in memory that folds names, as those of Windows and macOS do: python foldingfs.py DIRECTORY.

Its file `damaged` is listed, but lstat(2) of it fails with EIO.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import Any

import pyfuse3
import trio

NOREPLACE = 1  # of renameat2(2)


class Node:
    def __init__(self, mode: int) -> None:
        self.mode, self.mtime_ns, self.data, self.inode = mode, 0, bytearray(), 0
        self.children: dict[str, tuple[bytes, int]] = {}  # {folded name: (name, inode)}


class Folding(pyfuse3.Operations):
    """The operations that copying needs. Inodes are positions in a list, and stay after a removal."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = [Node(0), Node(stat.S_IFDIR | 0o755)]
        self.add(pyfuse3.ROOT_INODE, b"damaged", stat.S_IFREG | 0o644)

    def child(self, parent: int, name: bytes) -> int | None:
        found = self.nodes[parent].children.get(name.decode().casefold())
        return None if found is None else found[1]

    def add(self, parent: int, name: bytes, mode: int) -> int:
        if self.child(parent, name) is not None:
            raise pyfuse3.FUSEError(errno.EEXIST)
        self.nodes.append(Node(mode))
        self.nodes[parent].children[name.decode().casefold()] = name, len(self.nodes) - 1
        return len(self.nodes) - 1

    async def getattr(self, inode: int, ctx: Any = None) -> pyfuse3.EntryAttributes:
        node, found = self.nodes[inode], pyfuse3.EntryAttributes()
        found.entry_timeout = found.attr_timeout = 0
        found.st_ino, found.st_mode, found.st_nlink, found.st_size = inode, node.mode, 1, len(node.data)
        found.st_mtime_ns, found.st_uid, found.st_gid = node.mtime_ns, os.geteuid(), os.getegid()
        return found

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> pyfuse3.EntryAttributes:
        found = self.child(parent, name)
        if name == b"damaged":
            raise pyfuse3.FUSEError(errno.EIO)
        if found is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(found)

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> pyfuse3.EntryAttributes:
        node = self.nodes[inode]
        if fields.update_mode:
            node.mode = attr.st_mode
        if fields.update_mtime:
            node.mtime_ns = attr.st_mtime_ns
        if fields.update_size:
            node.data = node.data[: attr.st_size].ljust(attr.st_size, b"\0")
        return await self.getattr(inode)

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        return await self.getattr(self.add(parent, name, stat.S_IFDIR | mode))

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        inode = self.add(parent, name, stat.S_IFREG | mode)
        return pyfuse3.FileInfo(fh=inode), await self.getattr(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return bytes(self.nodes[fh].data[off : off + size])

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self.nodes[fh].data[off : off + len(buf)] = buf
        return len(buf)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        del self.nodes[parent].children[name.decode().casefold()]

    async def rename(self, old_parent: int, old: bytes, parent: int, name: bytes, flags: int, ctx: Any) -> None:
        if flags & NOREPLACE and self.child(parent, name) is not None:
            raise pyfuse3.FUSEError(errno.EEXIST)
        _, inode = self.nodes[old_parent].children.pop(old.decode().casefold())
        self.nodes[parent].children[name.decode().casefold()] = name, inode

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        return pyfuse3.StatvfsData()

    async def opendir(self, inode: int, ctx: Any) -> int:
        return inode

    async def readdir(self, fh: int, start: int, token: Any) -> None:
        for at, (name, inode) in enumerate([*self.nodes[fh].children.values()][start:], start + 1):
            if not pyfuse3.readdir_reply(token, name, await self.getattr(inode), at):
                return


if __name__ == "__main__":
    pyfuse3.init(Folding(), sys.argv[1], {"fsname=folding", "default_permissions"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)
