"""Writable mounts: open files and directories."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyfuse3
import trio
from pyfuse3 import FileHandleT, FileInfo, FileNameT, FlagT, InodeT, ReaddirToken, RequestContext

from zarrfs.config.options import Options
from zarrfs.errors import NotDirectory, NotFound, Refused
from zarrfs.fuse.operations import OpenFile, handler, is_settled
from zarrfs.fuse.writable_attributes import REFUSALS, AttributeOperations, answering, changing
from zarrfs.store.api import Info, Kind, join_key, split_key
from zarrfs.store.overlay import MergedEntry, Overlay, OverlayEntry
from zarrfs.system.beneath import file_version
from zarrfs.system.localfiles import read_file


@dataclasses.dataclass(slots=True)
class WritableDirectoryHandle:
    """An open directory, with the entries that it had when it was last read from offset 0, by _offset()."""

    inode: int
    entries: list[MergedEntry] | None = None
    changes: int = -1  # AttributeOperations.changes at that time


def _offset(entry: MergedEntry) -> int:
    """Return the offset of an entry in its directory: a hash of its name.

    An NFS server opens the directory for each READDIR and seeks to the last offset. Counted offsets would then skip
    entries if others were removed meanwhile. Offsets 1 and 2 are those of "." and "..".
    """
    return 3 + (hash(entry.name) & (1 << 62) - 1)


class HandleOperations(AttributeOperations):
    """The handlers of a writable mount for open files and directories."""

    def __init__(
        self, overlay: Overlay, options: Options, about: dict[str, Any], on_ready: Callable[[], None]
    ) -> None:
        super().__init__(overlay, options, about, on_ready)
        self._listings: dict[int, WritableDirectoryHandle] = {}
        self._unsynced: set[int] = set()  # inodes written to since their last fsync
        self._unsynced_gone = 0  # number of such inodes that the kernel has forgotten

    def describe(self, operation: str, number: Any, name: Any = b"") -> str:
        """Return the key that a request refers to, for the log."""
        if operation in ("write", "fsync"):
            return self._files[number].key
        if operation in ("readdir", "releasedir", "fsyncdir"):
            return self.inodes.key(self._listings[number].inode)
        return super().describe(operation, number, name)

    @property
    def open_handles(self) -> int:
        """The number of open files and directories."""
        return len(self._files) + len(self._listings)

    @property
    def unsynced(self) -> int | None:
        """The number of files that were written to and not synced since, including removed ones."""
        return len(self._unsynced) + self._unsynced_gone

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Lower lookup counts. Dropped inodes with unsynced writes are still counted in `unsynced`."""
        await super().forget(inode_list)
        for inode, _ in inode_list:
            if inode in self._unsynced and inode not in self.inodes:
                self._unsynced.discard(inode)
                self._unsynced_gone += 1

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
        self.counters["open"] += 1
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
        if not file.upper or file.descriptor is None:
            return await super().read(fh, off, size)
        data = await read_file(file.descriptor, off, size)
        self.counters["read"] += 1
        self.counters["bytes"] += len(data)
        return cast(bytes, data)  # pyfuse3 takes any buffer

    @handler
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """Write `buf`; return the number of bytes written.

        After an error such as ENOSPC return the number of bytes written before it. Raise the error if there are none,
        or with a writeback cache; always raise those in REFUSALS, such as EFBIG.
        """
        file, done = self._files[fh], 0
        if file.descriptor is None or not file.upper:
            raise Refused(file.key, errno.EBADF)
        self.changes += 1
        self._unsynced.add(file.inode)
        kept = os.fstat(file.descriptor) if self.enable_writeback_cache else None  # the kernel sets times itself
        try:
            done = os.pwrite(file.descriptor, buf, off)
            while done < len(buf):
                done += os.pwrite(file.descriptor, memoryview(buf)[done:], off + done)
        except OSError as exc:
            if exc.errno in REFUSALS:
                raise Refused(file.key, exc.errno) from exc
            if not done or self.enable_writeback_cache:  # the kernel's writeback does not handle short writes
                raise
        if kept is not None:
            os.utime(file.descriptor, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        return done

    @handler
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """Sync a file, and the parent directories that its copy-up created."""
        file = self._files[fh]
        if not file.upper or file.descriptor is None:
            return
        self._unsynced.discard(file.inode)  # a concurrent write adds it again
        try:
            await trio.to_thread.run_sync(os.fdatasync if datasync else os.fsync, file.descriptor)
        except BaseException:
            self._unsynced.add(file.inode)
            raise
        if file.inode in self._copied:
            self._copied.discard(file.inode)
            with contextlib.suppress(NotFound):
                await trio.to_thread.run_sync(self._sync_directories, split_key(self.inodes.key(file.inode))[0])

    # -- open directories

    @handler
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Open a directory."""
        return self._handle(self._listings, WritableDirectoryHandle(inode))

    @handler
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Send entries after offset `start_id`, in the order of their offsets."""
        self.counters["readdir"] += 1
        directory = self._listings[fh]
        if start_id == 0 or directory.entries is None:
            directory.changes = self.changes
            directory.entries = sorted(await self._list(directory.inode), key=_offset)
        while start_id < 2:
            key = self.inodes.key(directory.inode)
            # peek(), because the kernel counts no lookup for . and ..
            inode = (self.inodes.peek(split_key(key)[0]) if start_id else directory.inode) or pyfuse3.ROOT_INODE
            entry = self._fill(self._new_entry(), Info("", Kind.DIRECTORY), inode)
            if not pyfuse3.readdir_reply(token, FileNameT(b".." if start_id else b"."), entry, start_id + 1):
                return
            start_id += 1
        if self.inodes.is_nameless(directory.inode):  # the directory was removed, so it is empty
            return
        prefix = self.inodes.key(directory.inode)
        entries, counted = directory.entries, list[tuple[InodeT, int]]()
        try:
            # a slice would copy the rest of the list each time
            for position in range(bisect.bisect_right(entries, start_id, key=_offset), len(entries)):
                listed = entries[position]
                encoded, key = FileNameT(os.fsencode(listed.name)), join_key(prefix, listed.name)
                found = OverlayEntry(listed.status, listed.info)
                if self.under_way or self.changes != directory.changes:  # this entry may have changed
                    try:
                        key, found = await self._find(directory.inode, encoded)
                    except NotFound:
                        continue
                inode = self._looked_up(key, found)
                counted.append((InodeT(inode), 1))
                entry = self._fill_found(found, inode)
                if not pyfuse3.readdir_reply(token, encoded, entry, _offset(listed)):
                    await self.forget(counted[-1:])
                    return
        except BaseException:  # an error reply has no entries, so the kernel sends no FORGET for them
            await self.forget(counted)
            raise

    @handler
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close a directory."""
        del self._listings[fh]

    @handler
    @answering
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Sync the names in a directory."""
        inode = self._listings[fh].inode
        if inode not in self._gone:
            await trio.to_thread.run_sync(self._sync_directories, self.inodes.key(inode))

    # -- parts

    @changing
    async def _copy_up_to_write(self, inode: int, flags: int) -> None:
        await self.copy_up(inode, 0 if flags & os.O_TRUNC else None)

    async def _list(self, inode: int) -> list[MergedEntry]:
        while True:
            key = self.inodes.key(inode)
            try:
                return await self.overlay.entries(key)
            except (NotFound, NotDirectory):
                if self.inodes.key(inode) == key:
                    raise

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
            version, changed = file_version(status), max(status.st_mtime_ns, status.st_ctime_ns)
            keep = self._page_versions.get(inode, version) == version
            self._page_versions[inode] = version if is_settled(changed) else None
        try:
            key = self.inodes.key(inode)
        except NotFound:
            key = ""
        return FileInfo(fh=self._add_file(OpenFile(key, inode, descriptor, upper=True)), keep_cache=keep)

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
            if not key or self.overlay.lower is None:
                return
            key = split_key(key)[0]
