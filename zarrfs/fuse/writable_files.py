"""Writable mounts: lookup, attributes, open files and directories, and copying files up.

The upper directory is on a local file system. System calls that its caches mostly answer (stat, pwrite, rename, ...)
run on the event loop, because passing them to a thread would cost more than most of them. Copy-up and fsync run in
threads.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import functools
import os
import stat
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    InodeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
    XAttrNameT,
)

from zarrfs.config.options import Options
from zarrfs.errors import NotFound, Refused
from zarrfs.fuse.inodes import WritableInodeTable, file_of
from zarrfs.fuse.operations import OpenFile, Operations, handler
from zarrfs.fuse.xattrs import MOUNT_XATTR
from zarrfs.metrics.counters import COUNTS
from zarrfs.store.api import Info, join_key, split_key
from zarrfs.store.overlay import Now, Overlay, OverlayEntry
from zarrfs.system.beneath import file_version

P = ParamSpec("P")
T = TypeVar("T")

_ITSELF = os.O_PATH | os.O_NOFOLLOW
_REFUSALS = frozenset(  # regular answers of system calls, which are not logged
    (
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EXDEV,
        errno.EPERM, errno.ENAMETOOLONG, errno.EFBIG, errno.EINVAL, errno.EMLINK, errno.EOPNOTSUPP,
    )
)  # fmt: skip


def answering(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Wrap a handler that makes system calls on the upper directory: do not log errors that are regular answers."""

    @functools.wraps(method)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except OSError as exc:
            if exc.errno in _REFUSALS:
                raise Refused("", exc.errno) from exc
            raise

    return wrapped


def changing(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Wrap a handler that changes files, as answering() does. Count the change, so that open listings stat again."""
    answered = answering(method)

    @functools.wraps(method)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        operations = cast(FileOperations, args[0])
        operations.under_way += 1
        try:
            return await answered(*args, **kwargs)
        finally:
            operations.under_way -= 1
            operations.changes += 1

    return wrapped


@dataclasses.dataclass(slots=True)
class WritableDirectoryHandle:
    """An open directory, with the entries that it had when it was last read from offset 0, by _offset()."""

    inode: int
    key: str  # when it was opened, for the log
    entries: list[tuple[str, OverlayEntry]] | None = None
    changes: int = -1  # FileOperations.changes at that time


def _offset(entry: tuple[str, OverlayEntry]) -> int:
    """Return the offset of an entry, by name, in its directory: a hash of the name.

    An NFS server opens the directory for each READDIR and seeks to the last offset. Counted offsets would then skip
    entries if others were removed meanwhile. Offsets 1 and 2 are those of "." and "..".
    """
    return 3 + (hash(entry[0]) & (1 << 62) - 1)


class FileOperations(Operations):
    """The handlers of a writable mount for existing files and directories."""

    may_push = False

    def __init__(
        self, overlay: Overlay, options: Options, about: dict[str, Any], on_ready: Callable[[], bool | None]
    ) -> None:
        super().__init__(overlay, options, about, on_ready, overlay.lower)
        self.overlay, self.upper = overlay, overlay.upper
        self.inodes: WritableInodeTable = WritableInodeTable()
        lower = overlay.lower
        # With a writeback cache the kernel owns sizes, so it needs correct ones from the first lookup on. A directory
        # that is its own upper directory has other users, who must see writes immediately.
        self.enable_writeback_cache = lower.immutable and lower.sizes_known
        self.changes = 0  # changes made so far
        self.under_way = 0  # changes in progress
        self._gone: dict[int, int | Info] = {}  # nameless inodes: an O_PATH descriptor, or the lower store's Info
        self._copied: set[int] = set()  # copied-up inodes whose new parent directories were not synced yet

    # -- attributes

    @handler
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """Look up `name` in a directory; an absent name becomes a negative entry of the kernel."""
        try:
            key, found = await self._find(parent_inode, name)
        except NotFound:
            with contextlib.suppress(NotFound):  # of the parent
                self.inodes.unlink(self._key_in(parent_inode, name))
            return self._absent_entry()
        return self._fill_found(found, self._looked_up(key, found))

    @handler
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """Stat an inode, even if it has no name."""
        return await self._attributes(inode)

    @handler
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        """Return the target of a symbolic link."""
        gone = self._gone.get(inode)
        if isinstance(gone, int):
            return FileNameT(os.readlink(b"", dir_fd=gone))
        key, found = await self._find(inode)
        target = self.upper.readlink(key) if found.status is not None else found.info and found.info.target
        if target is None:
            raise Refused(key, errno.EINVAL)
        return FileNameT(os.fsencode(target))

    @handler
    @changing
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Set those of size, owner, permission bits and times that `fields` names. Copy the file up."""
        gone, owner = self._gone.get(inode), fields.update_uid or fields.update_gid
        if isinstance(gone, Info) and not (owner or fields.update_size):  # the kernel flushes times at close(2)
            mode = stat.S_IMODE(attr.st_mode) if fields.update_mode else gone.mode
            mtime = attr.st_mtime_ns if fields.update_mtime else gone.mtime_ns
            self._gone[inode] = gone._replace(mode=mode, mtime_ns=mtime)
            return await self._attributes(inode)
        if not (owner or fields.update_size or fields.update_mode or fields.update_atime or fields.update_mtime):
            return await self._attributes(inode)  # ctime alone, after link or unlink: the upper file has it already
        await self.copy_up(inode, attr.st_size if fields.update_size else None)
        file = self._files.get(fh) if fh is not None else None
        held = file.descriptor if file is not None and file.upper else None
        with self._path(inode) as path:
            if fields.update_size:  # a handle opened for writing needs no permission again
                os.truncate(path if held is None else held, attr.st_size)
            if owner:
                os.chown(path, attr.st_uid if fields.update_uid else -1, attr.st_gid if fields.update_gid else -1)
            if fields.update_mode:
                os.chmod(path, stat.S_IMODE(attr.st_mode))
            if fields.update_atime or fields.update_mtime:
                status = os.stat(path)
                atime = attr.st_atime_ns if fields.update_atime else status.st_atime_ns
                os.utime(path, ns=(atime, attr.st_mtime_ns if fields.update_mtime else status.st_mtime_ns))
            status = os.stat(path)
        return await self._attributes(inode) if stat.S_ISDIR(status.st_mode) else self._fill_status(status, inode)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Lower lookup counts. Close the descriptors of nameless inodes that are dropped."""
        await super().forget(inode_list)
        for inode, _ in inode_list:
            if inode not in self.inodes:
                self._copied.discard(inode)
                gone = self._gone.pop(inode, None)
                if isinstance(gone, int):
                    os.close(gone)

    @handler
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Report the file system of the upper directory."""
        status, data = os.statvfs(self.upper.path), StatvfsData()
        for name in (
            "f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax"
        ):  # fmt: skip
            setattr(data, name, getattr(status, name))
        return data

    # -- extended attributes: only those that the mount answers itself; ENOSYS makes the kernel refuse all others

    setxattr, removexattr = pyfuse3.Operations.setxattr, pyfuse3.Operations.removexattr

    @handler
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """List no attribute of files, because programs that copy attributes could not set it."""
        return [MOUNT_XATTR] if inode == pyfuse3.ROOT_INODE else []

    # -- open files

    @handler
    @answering
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """Open a file. Opening for writing copies it up first; with O_TRUNC, without its bytes."""
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            await self._copy_up_to_write(inode, flags)
        if not self._in_upper(inode):
            info = await super().open(inode, flags, ctx)
            if not self._in_upper(inode):
                return info
            await self.release(info.fh)  # copied up meanwhile
        COUNTS["opens_total"] += 1
        with self._path(inode) as path:
            descriptor = self._reopen(path, flags)
        if flags & os.O_TRUNC and ctx.uid:
            self._clear_set_ids(descriptor, inode)
        self.inodes.sizes.learned(inode, os.fstat(descriptor).st_size)
        return self._opened_file(descriptor, inode)

    @handler
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Return the bytes [off, off + size) of a file, cut at its end."""
        file = self._files[fh]
        if not file.upper and self.inodes.file(file.inode) is not None:  # copy_up() could not open the copy for it
            self._move_up(file)
        return await super().read(fh, off, size)

    @handler
    @answering
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """Write `buf`; return the number of bytes written, which may be smaller, as for write(2) on a full disk."""
        file = self._files[fh]
        if file.descriptor is None or not file.upper:
            raise Refused(file.key, errno.EBADF)
        self.changes += 1
        kept = os.fstat(file.descriptor) if self.enable_writeback_cache else None  # the kernel sets times itself
        done = os.pwrite(file.descriptor, buf, off)
        while done < len(buf) and self.enable_writeback_cache:  # the writeback needs the error
            done += os.pwrite(file.descriptor, memoryview(buf)[done:], off + done)
        if kept is not None:
            os.utime(file.descriptor, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        return done

    @handler
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """Sync a file, and the parent directories that its copy-up created."""
        file = self._files[fh]
        if not file.upper or file.descriptor is None:
            return
        await trio.to_thread.run_sync(os.fdatasync if datasync else os.fsync, file.descriptor)
        if file.inode in self._copied:
            self._copied.discard(file.inode)
            with contextlib.suppress(NotFound):
                await trio.to_thread.run_sync(self._sync_directories, split_key(self.inodes.key(file.inode))[0])

    # -- open directories

    @handler
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Open a directory."""
        return self._handle(self._directories, WritableDirectoryHandle(inode, self._name(inode)))

    @handler
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Send entries after offset `start_id`, in the order of their offsets."""
        directory: WritableDirectoryHandle = self._directories[fh]
        if start_id == 0 or directory.entries is None:
            inode = directory.inode
            found = await self.overlay.change(lambda now: now.entries(self.inodes.key(inode)))
            directory.entries = sorted(found.items(), key=_offset)
            directory.changes = self.changes
        prefix = self.inodes.key(directory.inode)  # ENOENT if it was removed, as on local file systems
        if start_id < 2 and not self._send_dots(prefix, start_id, token):
            return
        entries, counted = directory.entries, list[tuple[InodeT, int]]()
        try:
            # a slice would copy the rest of the list each time
            for position in range(bisect.bisect_right(entries, start_id, key=_offset), len(entries)):
                place, (name, entry) = _offset(entries[position]), entries[position]
                encoded, key = FileNameT(os.fsencode(name)), join_key(prefix, name)
                if self.under_way or self.changes != directory.changes:  # this entry may have changed
                    try:
                        key, entry = await self._find(directory.inode, encoded)
                    except NotFound:
                        continue
                inode = self._looked_up(key, entry)
                counted.append((InodeT(inode), 1))
                if not pyfuse3.readdir_reply(token, encoded, self._fill_found(entry, inode), place):
                    await self.forget(counted[-1:])
                    return
        except BaseException:  # an error reply has no entries, so the kernel sends no FORGET for them
            await self.forget(counted)
            raise

    @handler
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close a directory."""
        del self._directories[fh]

    @handler
    @answering
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Sync the names in a directory."""
        inode = self._directories[fh].inode
        if inode not in self._gone:
            await trio.to_thread.run_sync(self._sync_directories, self.inodes.key(inode))

    # -- parts

    @changing
    async def _copy_up_to_write(self, inode: int, flags: int) -> None:
        await self.copy_up(inode, 0 if flags & os.O_TRUNC else None)

    def _reopen(self, path: str, flags: int) -> int:
        """Open a file in the upper directory with the access that the kernel needs.

        The kernel implements O_APPEND and O_SYNC. If the descriptor had O_APPEND, the writeback of mapped pages would
        write at the end of the file.
        """
        access = flags & (os.O_ACCMODE | os.O_TRUNC) | os.O_CLOEXEC
        if self.enable_writeback_cache and access & os.O_ACCMODE == os.O_WRONLY:
            with contextlib.suppress(PermissionError):  # writeback reads the rest of partly written pages
                return os.open(path, access & ~os.O_ACCMODE | os.O_RDWR)
        return os.open(path, access)

    def _clear_set_ids(self, descriptor: int, inode: int) -> None:
        """Clear the set-ID bits as a write by a user other than root does: for O_TRUNC the kernel sends no setattr."""
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        cleared = mode & ~stat.S_ISUID
        if mode & stat.S_IXGRP:
            cleared &= ~stat.S_ISGID
        if cleared == mode:
            return
        with contextlib.suppress(OSError):  # another owner's file, whose bits a write clears; or a forgotten inode
            os.fchmod(descriptor, cleared)
            pyfuse3.invalidate_inode(InodeT(inode), attr_only=True)

    def _opened_file(self, descriptor: int, inode: int) -> FileInfo:
        """Register an open file of the upper directory and return its handle."""
        keep = self.overlay.immutable
        if not keep:
            status = os.fstat(descriptor)
            changed = max(status.st_mtime_ns, status.st_ctime_ns)
            keep = self._keeps_pages(inode, file_version(status), changed)
        return FileInfo(fh=self._add_file(OpenFile(self._name(inode), inode, descriptor, upper=True)), keep_cache=keep)

    def _name(self, inode: int) -> str:
        """Return the key of an inode, for the log; "" if it has lost its name."""
        return "" if self.inodes.is_nameless(inode) else self.inodes.key(inode)

    def _sync_directories(self, key: str) -> None:
        """Sync a directory. In a merged tree also sync its parents, which a copy-up may have created."""
        while True:
            try:
                descriptor = self.upper.open(key, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                pass  # not in the upper directory, so nothing in it has changed
            else:
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            if not key or self.upper.plain:
                return
            key = split_key(key)[0]

    async def copy_up(self, inode: int, size: int | None = None) -> None:
        """Copy an inode to the upper directory, with `size` only its first `size` bytes.

        Open handles read the copy afterwards. Raise Refused (ESTALE) if another file has taken the inode's name.
        """
        if self._in_upper(inode):
            return
        key = self.inodes.key(inode)
        below = await self.overlay.below(key)
        replaced = below is not None and self._is_replaced(inode, below)
        if replaced or self.inodes.is_superseded(inode, key):
            raise Refused(key, errno.ESTALE)  # the kernel repeats the lookup
        if below is not None and os.geteuid() and not self.permissions.unmasked(below) & stat.S_IWUSR:
            size = None  # opening the copy for writing will fail, so the file must keep its bytes
        try:
            status = await self.overlay.copy_up(key, size)
        except NotFound:
            if self.inodes.is_nameless(inode):
                raise Refused(key, errno.ESTALE) from None
            raise
        if self.inodes.file(inode) is not None:
            return
        if self.inodes.is_nameless(inode) or self.inodes.key(inode) != key:  # another file has the name now
            raise Refused(key, errno.ESTALE)
        self.inodes.bind(inode, file_of(status))
        self._copied.add(inode)
        for file in self._files_of(inode):
            with contextlib.suppress(OSError):  # out of descriptors, for example: the next read tries again
                self._move_up(file)
        with contextlib.suppress(OSError):  # owner, blocks and ctime may differ now
            pyfuse3.invalidate_inode(InodeT(inode), attr_only=True)

    async def copy_up_name(self, key: str) -> None:
        """Copy the lower entry `key` to the upper directory."""
        inode = self.inodes.peek(key)
        if inode is None or self._in_upper(inode):  # the latter: its upper file was removed beneath the mount
            await self.overlay.copy_up(key)
        else:
            await self.copy_up(inode)

    def _move_up(self, file: OpenFile) -> None:
        """Make an open file that was copied up read the copy. Raise OSError if the copy cannot be opened."""
        with self._path(file.inode) as path:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if file.descriptor is None:
            file.descriptor = descriptor
        else:  # keep the descriptor number, because a thread may be reading from it
            os.dup2(descriptor, file.descriptor, inheritable=False)
            os.close(descriptor)
        file.upper = True

    @contextlib.contextmanager
    def losing(self, key: str, found: OverlayEntry) -> Iterator[None]:
        """Keep the file at `key` for its open handles while the body of the with statement removes that name."""
        inode = self.inodes.peek(key)
        held: int | Info | None = None
        if inode is not None and inode not in self._gone:
            held = found.info if found.status is None else self.upper.open(key, _ITSELF)
        try:
            yield
            self.inodes.unlink(key)
            if inode is not None and held is not None and self.inodes.is_nameless(inode):
                self._gone[inode] = held._replace(links=0) if isinstance(held, Info) else held
                held = None
        finally:
            if isinstance(held, int):
                os.close(held)

    def _in_upper(self, inode: int) -> bool:
        """Return whether an inode is known to be in the upper directory."""
        return self.inodes.file(inode) is not None or inode in self._gone or inode == pyfuse3.ROOT_INODE

    @contextlib.contextmanager
    def _path(self, inode: int) -> Iterator[str]:
        """Yield a path to an inode's file in the upper directory, also for nameless files and symbolic links."""
        gone = self._gone.get(inode)
        if isinstance(gone, Info):
            raise Refused(gone.name, errno.ESTALE)
        if gone is not None:
            yield f"/proc/self/fd/{gone}"
            return
        key = self.inodes.key(inode)
        descriptor = self.upper.open(key, _ITSELF)
        try:
            wanted = self.inodes.file(inode)
            if wanted is not None and file_of(os.fstat(descriptor)) != wanted:  # another file has taken the name
                raise Refused(key, errno.ESTALE)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def _held_open(self, inode: int) -> int | None:
        """Return a descriptor of an inode's open file in the upper directory, to save a walk of its path, or None."""
        return next((file.descriptor for file in self._files_of(inode) if file.upper), None)

    async def _find(self, inode: int, name: bytes = b"") -> tuple[str, OverlayEntry]:
        """Find an inode, or its entry `name`: return (key, entry of the overlay), which are those of one moment."""

        def step(now: Now) -> tuple[str, OverlayEntry]:
            key = self._key_in(inode, name)
            return key, now.find(key)

        return await self.overlay.change(step)

    def _looked_up(self, key: str, found: OverlayEntry) -> int:
        """Return the inode of the entry at `key`. Count one lookup."""
        if found.status is not None:
            return self.inodes.lookup_file(key, file_of(found.status)) if key else int(pyfuse3.ROOT_INODE)
        assert found.info is not None
        return self.inodes.lookup(key, found.info.kind, found.info.identity)

    async def _attributes(self, inode: int) -> EntryAttributes:
        gone = self._gone.get(inode)
        held = gone if isinstance(gone, int) else self._held_open(inode)
        if held is not None:
            return self._fill_status(os.fstat(held), inode)
        if isinstance(gone, Info):
            return self._fill(self._new_entry(), gone, inode)
        named = None
        with contextlib.suppress(NotFound):
            named = await self._named_attributes(inode)
        return named or self._fill(self._new_entry(), self._stat_by_handle(inode), inode)

    async def _named_attributes(self, inode: int) -> EntryAttributes | None:
        """Stat an inode by its name; None if another file has that name. Raise NotFound if no file has it."""
        key, wanted = self.inodes.key(inode), self.inodes.file(inode)
        if self.inodes.is_superseded(inode, key):
            return None
        key, found = await self._find(inode)
        if found.status is None and found.info is not None:
            info = await self.overlay.info(key) if found.info.size is None else found.info
            if not self._is_replaced(inode, info):
                return self._fill_found(OverlayEntry(None, info), inode)
        elif found.status is not None and wanted in (None, file_of(found.status)):
            return self._fill_found(found, inode)
        return None

    def _is_replaced(self, inode: int, info: Info) -> bool:
        """Return whether a lower entry is another file than that of `inode`, or has another kind."""
        return info.kind is not self.inodes.kind(inode) or self.inodes.is_other(inode, info.identity)

    def _fill_found(self, found: OverlayEntry, inode: int) -> EntryAttributes:
        if found.status is not None:
            return self._fill_status(found.status, inode, found.info is not None)
        assert found.info is not None
        return self._fill(self._new_entry(), found.info, inode)

    def _fill_status(self, status: os.stat_result, inode: int, merged: bool = False) -> EntryAttributes:
        """Fill an entry from a stat in the upper directory. A merged directory has st_nlink 1: not counted."""
        entry = EntryAttributes()
        entry.st_ino = InodeT(inode)
        entry.st_mode = pyfuse3.ModeT(self.permissions.of_upper(status.st_mode))
        entry.st_nlink = 1 if merged else status.st_nlink
        entry.st_uid, entry.st_gid, entry.st_rdev = status.st_uid, status.st_gid, status.st_rdev
        entry.st_size, entry.st_blocks = status.st_size, status.st_blocks
        entry.st_blksize = 4096
        entry.st_atime_ns, entry.st_mtime_ns = status.st_atime_ns, status.st_mtime_ns
        entry.st_ctime_ns = status.st_ctime_ns
        entry.attr_timeout = entry.entry_timeout = self._attr_timeout
        return entry
