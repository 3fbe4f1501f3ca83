"""A file system that only serves a prepared tree from memory, which shows the cost of pyfuse3 itself.

    noop.py MOUNTPOINT many ENTRIES DATA    the keys of the large set, bytes from DATA
    noop.py MOUNTPOINT big DATA             one file with the bytes of DATA
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pyfuse3
import trio
from data import BIG, PIECE, keys

DAY = 86_400.0


def attributes(inode: int, mode: int, size: int) -> pyfuse3.EntryAttributes:
    """Return attributes that never change."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino, entry.st_mode, entry.st_size = inode, mode, size
    entry.st_nlink = 1
    entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
    entry.st_blocks = -(-size // 512)
    entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = 10**18
    entry.attr_timeout = entry.entry_timeout = DAY
    return entry


class Noop(pyfuse3.Operations):
    """A tree in memory: inode 1 is the root; the content of each file is a slice of one buffer."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = memoryview(data)  # slices of it are not copied
        self.entries = [attributes(0, 0, 0), attributes(1, stat.S_IFDIR | 0o555, 0)]
        self.starts = [0, 0]
        self.children: dict[int, list[tuple[bytes, int]]] = {1: []}
        self.names: dict[tuple[int, bytes], int] = {}

    def add(self, parent: int, name: str, start: int | None, size: int = 0) -> int:
        """Add a file, or a directory if `start` is None; return its inode."""
        inode = len(self.entries)
        mode = stat.S_IFDIR | 0o555 if start is None else stat.S_IFREG | 0o444
        self.entries.append(attributes(inode, mode, size))
        self.starts.append(start or 0)
        self.names[parent, name.encode()] = inode
        self.children[parent].append((name.encode(), inode))
        if start is None:
            self.children[inode] = []
        return inode

    async def lookup(self, parent_inode: int, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        inode = self.names.get((parent_inode, name))
        if inode is None:
            raise pyfuse3.FUSEError(2)
        return self.entries[inode]

    async def getattr(self, inode: int, ctx: object) -> pyfuse3.EntryAttributes:
        return self.entries[inode]

    async def opendir(self, inode: int, ctx: object) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: object) -> None:
        children = self.children[fh]
        for number in range(start_id, len(children)):
            name, inode = children[number]
            if not pyfuse3.readdir_reply(token, name, self.entries[inode], number + 1):
                return

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> memoryview:
        start = self.starts[fh]
        return self.data[start + off : start + min(off + size, self.entries[fh].st_size)]


def main() -> None:
    mountpoint, shape, *rest = sys.argv[1:]
    fs = Noop(Path(rest[-1]).read_bytes())
    if shape == BIG:
        fs.add(1, BIG, 0, len(fs.data))
    else:
        directories: dict[str, int] = {}
        pieces = len(fs.data) // PIECE
        for number, (directory, name) in enumerate(keys(int(rest[0]))):
            if directory not in directories:
                directories[directory] = fs.add(1, directory, None)
            fs.add(directories[directory], name, number % pieces * PIECE, PIECE)
        for children in fs.children.values():
            children.sort()
    serve(fs, mountpoint, {"fsname=noop", "subtype=noop", "ro", "default_permissions"})


def serve(operations: pyfuse3.Operations, mountpoint: str, options: set[str]) -> None:
    """Mount, and serve until unmounted."""
    pyfuse3.init(operations, mountpoint, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
