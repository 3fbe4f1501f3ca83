"""A merged tree as a directory, or as a zip file."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
import zipfile

from zarrfs.copying.committree import Node, Tree
from zarrfs.store.api import SET_IDS, Kind
from zarrfs.store.destination import is_utf8
from zarrfs.system.buffers import write_all

_NAME_MAX = 0xFFFF  # bytes of a name in a zip file
_OLDEST, _NEWEST = (1980, 1, 1, 0, 0, 0), (2107, 12, 31, 23, 59, 58)  # times of a zip file, in the local zone


async def write_directory(tree: Tree, path: str) -> None:
    """Write all of `tree` to the new directory `path`, with modes, times, and holes.

    Of what is in the upper also owners (as far as permitted), hard links and attributes user.*. OSError.
    """
    writer = _Directory(tree, path)
    os.mkdir(path, 0o700)
    async for node in tree.with_values_ahead(tree.nodes(lambda node: None)):
        await writer.add(node)
    writer.finish(await tree.root())


class _Directory:
    """A directory that is filled; nothing is ever written through a link, as `path` is nobody else's yet."""

    def __init__(self, tree: Tree, path: str) -> None:
        self._tree, self._path = tree, path
        self._directories: list[tuple[str, Node]] = []
        self._links: dict[tuple[int, int], str] = {}  # files with several names, by device and inode

    async def add(self, node: Node) -> None:
        path = os.path.join(self._path, node.key)
        if node.kind is Kind.DIRECTORY:
            os.mkdir(path, 0o700)
            self._directories.append((path, node))
        elif node.kind is Kind.SYMLINK:
            os.symlink(node.target or "", path)
            _own(path, node.status)
            _set_time(path, node.mtime_ns)
        elif not self._linked(node, path):
            await self._add_file(node, path)

    def finish(self, root: os.stat_result) -> None:
        """Modes and times of directories, which would be in the way, or change, until all is there."""
        for path, node in reversed(self._directories):
            _copy_attributes(self._tree, node, path)
            _dress(path, node)
        os.chmod(self._path, stat.S_IMODE(root.st_mode) | stat.S_IRWXU)  # as long as it has another name
        _set_time(self._path, root.st_mtime_ns)

    def _linked(self, node: Node, path: str) -> bool:
        """Whether a file is one that is there under another name, and now under this, too."""
        if node.status is None or node.status.st_nlink < 2:
            return False
        known = self._links.setdefault((node.status.st_dev, node.status.st_ino), path)
        if known != path:
            os.link(known, path)
        return known != path

    async def _add_file(self, node: Node, path: str) -> None:
        size = await self._tree.size(node)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for low, high in await self._tree.extents(node, size):
                at = low
                async for piece in self._tree.pieces(node, low, high):
                    at = write_all(descriptor, piece, at)
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
        _copy_attributes(self._tree, node, path)
        _dress(path, node)


def _dress(path: str, node: Node) -> None:
    owned = _own(path, node.status)
    # those of another owner, or of a source, which tells none, would be ours
    bare = not owned or (node.status is None and node.kind is Kind.FILE)
    os.chmod(path, node.mode & ~SET_IDS if bare else node.mode)
    _set_time(path, node.mtime_ns)


def _own(path: str, status: os.stat_result | None) -> bool:
    """Whether `path` now has the owner and group that it has in the upper, or needs none."""
    if status is None or (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid()):
        return True
    try:
        os.chown(path, status.st_uid, status.st_gid, follow_symlinks=False)
    except PermissionError:
        return False
    return True


def _set_time(path: str, mtime_ns: int | None) -> None:
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


def _copy_attributes(tree: Tree, node: Node, path: str) -> None:
    """Copy the extended attributes user.* of what is in the upper, as far as both file systems have any."""
    if node.status is None:
        return
    descriptor = tree.open(node)
    try:
        with contextlib.suppress(OSError):
            for name in os.listxattr(descriptor):
                if name.startswith("user."):
                    os.setxattr(path, name, os.getxattr(descriptor, name))
    finally:
        os.close(descriptor)


async def write_zip(tree: Tree, path: str) -> None:
    """Write all of `tree` to the new zip file `path`: nothing is compressed, so that ranges can be read.

    Modes and times are noted as Info-ZIP notes them. SourceError for what no zip file that is a source can hold.
    """
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as file:
        async for node in tree.with_values_ahead(tree.nodes(_rule)):
            await _add_to_zip(tree, node, file)


def _rule(node: Node) -> str | None:
    if node.kind is Kind.SYMLINK:
        return "a symbolic link, which a zip file shows as a file"
    if not is_utf8(node.key):
        return "a name that is not UTF-8, which no zip file can hold"
    if len(node.key.encode()) >= _NAME_MAX:
        return f"a name of {_NAME_MAX} bytes or more, which no zip file can hold"
    return None


async def _add_to_zip(tree: Tree, node: Node, file: zipfile.ZipFile) -> None:
    seconds = int(time.time()) if node.mtime_ns is None else node.mtime_ns // 10**9
    directory = node.kind is Kind.DIRECTORY
    info = zipfile.ZipInfo(node.key + "/" * directory, _date(seconds))
    info.create_system = 3  # Unix: external_attr holds a mode
    info.external_attr = ((stat.S_IFDIR if directory else stat.S_IFREG) | node.mode) << 16 | 0x10 * directory
    if -(2**31) <= seconds < 2**31:
        info.extra = struct.pack("<HHBi", 0x5455, 5, 1, seconds)  # "UT": the mtime, in UTC
    if directory:
        file.writestr(info, b"")
        return
    info.file_size = size = await tree.size(node)
    with file.open(info, "w", force_zip64=size >= zipfile.ZIP64_LIMIT) as to:
        async for piece in tree.pieces(node, 0, size):
            to.write(piece)


def _date(seconds: int) -> tuple[int, int, int, int, int, int]:
    """A time as a zip file has it, cut to what that can tell."""
    try:
        found = time.localtime(seconds)[:6]
    except (OverflowError, ValueError, OSError):
        return _OLDEST if seconds < 0 else _NEWEST
    return min(max(found, _OLDEST), _NEWEST)
