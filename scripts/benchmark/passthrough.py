"""A plain pass-through file system, which shows the cost of a writable mount on pyfuse3.

    passthrough.py ROOT MOUNTPOINT [writeback]

It keeps an O_PATH descriptor for each inode that the kernel knows (EMFILE beyond the limit of open files), and a
normal one for each open file. Nothing else may change ROOT meanwhile. Extended attributes cost a request per
write(2): the kernel asks for security.capability each time. Without getxattr it would ask only once, and random writes
are twice as fast.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import stat
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyfuse3
import trio
from noop import serve
from pyfuse3 import EntryAttributes as Entry
from pyfuse3 import RequestContext as Context

DAY = 86_400.0
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def errors(handler: Handler) -> Handler:
    """Convert OSError to FUSEError: any other exception from a handler would end the mount."""

    @functools.wraps(handler)
    async def wrapper(*args: Any) -> Any:
        try:
            return await handler(*args)
        except OSError as exc:
            raise pyfuse3.FUSEError(exc.errno or errno.EIO) from None

    return wrapper  # type: ignore[return-value]


@dataclass
class Node:
    """An inode: its descriptor, and its lookup count."""

    fd: int
    key: tuple[int, int]  # st_dev, st_ino: not reused while fd is open
    lookups: int = 0

    @property
    def path(self) -> str:
        """Return a path of the inode, for calls that take no O_PATH descriptor; a symlink is not followed."""
        return f"/proc/self/fd/{self.fd}"


def attributes(inode: int, status: os.stat_result) -> Entry:
    """Return attributes for the kernel."""
    entry = Entry()
    entry.st_ino = inode
    entry.st_mode, entry.st_nlink, entry.st_rdev = status.st_mode, status.st_nlink, status.st_rdev
    entry.st_uid, entry.st_gid = status.st_uid, status.st_gid
    entry.st_size, entry.st_blocks, entry.st_blksize = status.st_size, status.st_blocks, status.st_blksize
    entry.st_atime_ns, entry.st_mtime_ns = status.st_atime_ns, status.st_mtime_ns
    entry.st_ctime_ns = status.st_ctime_ns
    entry.entry_timeout = entry.attr_timeout = DAY
    return entry


class PassThrough(pyfuse3.Operations):
    """A pass-through of the tree below a directory."""

    def __init__(self, root: str, writeback: bool) -> None:
        super().__init__()
        self.enable_writeback_cache = writeback
        fd = os.open(root, _PATH | os.O_DIRECTORY)
        status = os.fstat(fd)
        self.nodes = {pyfuse3.ROOT_INODE: Node(fd, (status.st_dev, status.st_ino), 1)}
        self.inodes = {self.nodes[pyfuse3.ROOT_INODE].key: pyfuse3.ROOT_INODE}
        self.last = int(pyfuse3.ROOT_INODE)
        self.names: dict[int, list[str]] = {}  # per open directory, as last read from its start
        self.me = os.geteuid(), os.getegid()

    def _enter(self, parent_fd: int, name: str | bytes) -> Entry:
        """Return the entry `name`, and increment its lookup count."""
        fd = os.open(name, _PATH, dir_fd=parent_fd)
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        inode = self.inodes.get(key)
        if inode is None:
            self.last = inode = self.last + 1
            self.nodes[inode] = Node(fd, key)
            self.inodes[key] = inode
        else:
            os.close(fd)
        self.nodes[inode].lookups += 1
        return attributes(inode, status)

    def _fd(self, inode: int) -> int:
        return self.nodes[inode].fd

    def _made(self, parent_fd: int, name: bytes, ctx: Context) -> Entry:
        """Return a new entry, with the caller as its owner; a setgid directory passes on its group."""
        if (ctx.uid, ctx.gid) != self.me:
            gid = -1 if os.fstat(parent_fd).st_mode & stat.S_ISGID else ctx.gid
            os.chown(name, ctx.uid, gid, dir_fd=parent_fd, follow_symlinks=False)
        return self._enter(parent_fd, name)

    @errors
    async def lookup(self, parent_inode: int, name: bytes, ctx: object) -> Entry:
        return self._enter(self._fd(parent_inode), name)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for inode, count in inode_list:
            self._forget(inode, count)

    def _forget(self, inode: int, count: int) -> None:
        (node := self.nodes[inode]).lookups -= count
        if node.lookups <= 0 and inode != pyfuse3.ROOT_INODE:
            del self.nodes[inode], self.inodes[node.key]
            os.close(node.fd)

    @errors
    async def getattr(self, inode: int, ctx: object) -> Entry:
        return attributes(inode, os.fstat(self._fd(inode)))

    @errors
    async def setattr(self, inode: int, attr: Entry, fields: Any, fh: int | None, ctx: object) -> Entry:
        node = self.nodes[inode]
        if fields.update_size:
            os.truncate(node.path if fh is None else fh, attr.st_size)
        if fields.update_uid or fields.update_gid:
            os.chown(node.path, attr.st_uid if fields.update_uid else -1, attr.st_gid if fields.update_gid else -1)
        if fields.update_mode:
            os.chmod(node.path, stat.S_IMODE(attr.st_mode))
        if fields.update_atime or fields.update_mtime:
            status = os.fstat(node.fd)
            atime = attr.st_atime_ns if fields.update_atime else status.st_atime_ns
            mtime = attr.st_mtime_ns if fields.update_mtime else status.st_mtime_ns
            os.utime(node.path, ns=(atime, mtime))
        return attributes(inode, os.fstat(node.fd))

    @errors
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: Context) -> Entry:
        parent = self._fd(parent_inode)
        os.mknod(name, mode, rdev, dir_fd=parent)
        return self._made(parent, name, ctx)

    @errors
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Context) -> Entry:
        parent = self._fd(parent_inode)
        os.mkdir(name, mode, dir_fd=parent)
        return self._made(parent, name, ctx)

    @errors
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: Context) -> Entry:
        parent = self._fd(parent_inode)
        os.symlink(target, name, dir_fd=parent)
        return self._made(parent, name, ctx)

    @errors
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: object) -> Entry:
        parent = self._fd(new_parent_inode)
        os.link(self.nodes[inode].path, new_name, dst_dir_fd=parent, follow_symlinks=True)
        return self._enter(parent, new_name)

    @errors
    async def readlink(self, inode: int, ctx: object) -> bytes:
        return os.readlink(b"", dir_fd=self._fd(inode))

    @errors
    async def unlink(self, parent_inode: int, name: bytes, ctx: object) -> None:
        os.unlink(name, dir_fd=self._fd(parent_inode))

    @errors
    async def rmdir(self, parent_inode: int, name: bytes, ctx: object) -> None:
        os.rmdir(name, dir_fd=self._fd(parent_inode))

    @errors
    async def rename(
        self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int, ctx: object
    ) -> None:
        if flags:
            raise OSError(errno.EINVAL, "flags")  # mv then renames without flags
        os.rename(name_old, name_new, src_dir_fd=self._fd(parent_old), dst_dir_fd=self._fd(parent_new))

    @errors
    async def opendir(self, inode: int, ctx: object) -> int:
        fd = os.open(self.nodes[inode].path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.names[fd] = []
        return fd

    @errors
    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        if start_id == 0:
            self.names[fh] = os.listdir(fh)
        for number, name in enumerate(self.names[fh][start_id:], start_id + 1):
            try:
                entry = self._enter(fh, name)
            except FileNotFoundError:
                continue  # removed since
            if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, number):
                self._forget(entry.st_ino, 1)
                return

    @errors
    async def releasedir(self, fh: int) -> None:
        del self.names[fh]
        os.close(fh)

    @errors
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await trio.to_thread.run_sync(os.fsync, fh)

    def _flags(self, flags: int) -> int:
        """Adapt open flags: the kernel positions appends; its writeback cache also reads write-only files."""
        flags &= ~(os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        if self.enable_writeback_cache and flags & os.O_ACCMODE == os.O_WRONLY:
            flags = flags & ~os.O_ACCMODE | os.O_RDWR
        return flags | os.O_CLOEXEC

    @errors
    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=os.open(self.nodes[inode].path, self._flags(flags)), keep_cache=True)

    @errors
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Context
    ) -> tuple[pyfuse3.FileInfo, Entry]:
        parent = self._fd(parent_inode)
        flags = self._flags(flags) | os.O_CREAT | os.O_NOFOLLOW | flags & os.O_EXCL
        fd = os.open(name, flags, mode, dir_fd=parent)
        try:
            return pyfuse3.FileInfo(fh=fd, keep_cache=True), self._made(parent, name, ctx)
        except OSError:
            os.close(fd)
            raise

    @errors
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return os.pread(fh, size, off)

    @errors
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return os.pwrite(fh, buf, off)

    @errors
    async def flush(self, fh: int) -> None:
        os.close(os.dup(fh))  # raises the errors of close(2)

    @errors
    async def fsync(self, fh: int, datasync: bool) -> None:
        await trio.to_thread.run_sync(os.fdatasync if datasync else os.fsync, fh)

    @errors
    async def release(self, fh: int) -> None:
        os.close(fh)

    @errors
    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        status, answer = os.fstatvfs(self._fd(pyfuse3.ROOT_INODE)), pyfuse3.StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax"):
            setattr(answer, f"f_{name}", getattr(status, f"f_{name}"))
        return answer

    @errors
    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        return os.getxattr(self.nodes[inode].path, name)

    @errors
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: object) -> None:
        os.setxattr(self.nodes[inode].path, name, value)

    @errors
    async def removexattr(self, inode: int, name: bytes, ctx: object) -> None:
        os.removexattr(self.nodes[inode].path, name)

    @errors
    async def listxattr(self, inode: int, ctx: object) -> list[bytes]:
        return [os.fsencode(name) for name in os.listxattr(self.nodes[inode].path)]


def main() -> None:
    root, mountpoint, *rest = sys.argv[1:]
    os.umask(0)  # the kernel has applied the caller's umask
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    options = {"fsname=passthrough", "subtype=passthrough", "default_permissions"}
    serve(PassThrough(root, "writeback" in rest), mountpoint, options)


if __name__ == "__main__":
    main()
