"""Writable mounts: create, mkdir, unlink, rename and all other requests that change names.

Names change one at a time, in functions that do not await: overlay.change() looks up what they need. A whiteout hides
the lower store's entry before the upper directory's entry of that name is removed, so that after a crash in between
the lower entry does not reappear.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FileNameT, FlagT, InodeT, ModeT, RequestContext

from zarrfs.errors import IsDirectory, NotDirectory, NotFound, Refused
from zarrfs.fuse.operations import handler
from zarrfs.fuse.writable_files import FileOperations, changing
from zarrfs.store.api import SET_IDS, split_key
from zarrfs.store.overlay import Now, OverlayEntry
from zarrfs.store.upper import PREFIX, remove_unfinished
from zarrfs.store.writing import RESERVED, remove_abandoned
from zarrfs.system.renaming import EXCHANGE, rename

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class WritableOperations(FileOperations):
    """All handlers of a writable mount. New files belong to their creator; the kernel checks permissions."""

    # -- creating

    @handler
    @changing
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """Create a file and open it."""
        descriptor = -1

        def make(directory: int, entry: bytes) -> None:
            nonlocal descriptor
            access = os.O_RDWR if self.enable_writeback_cache else flags & os.O_ACCMODE
            descriptor = os.open(entry, access | _NEW, mode & 0o7777, dir_fd=directory)

        try:
            attributes = await self._make(parent_inode, name, ctx, make, mode)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            raise pyfuse3.FUSEError(errno.ESTALE) from None  # the kernel looks the name up and opens it
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        return self._opened_file(descriptor, attributes.st_ino), attributes

    @handler
    @changing
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Create a file, FIFO, socket or device."""
        return await self._make(
            parent_inode, name, ctx, lambda at, entry: os.mknod(entry, mode, rdev, dir_fd=at), mode
        )

    @handler
    @changing
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        """Create a directory. A whiteout of that name stays, so the lower store's entry remains hidden."""
        return await self._make(parent_inode, name, ctx, lambda at, entry: os.mkdir(entry, mode & 0o7777, dir_fd=at))

    @handler
    @changing
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Create a symbolic link."""
        return await self._make(parent_inode, name, ctx, lambda at, entry: os.symlink(target, entry, dir_fd=at))

    @handler
    @changing
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Create a hard link. A file of the lower store is copied up first."""
        await self.copy_up(inode)

        def make(directory: int, entry: bytes) -> None:
            with self._path(inode) as path:
                os.link(path, entry, dst_dir_fd=directory, follow_symlinks=True)

        return await self._make(new_parent_inode, new_name, None, make)

    # -- removing

    @handler
    @changing
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove a name of a file. Open handles keep the file."""
        await self._remove(parent_inode, name, directory=False)

    @handler
    @changing
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove a directory; ENOTEMPTY if it has visible entries."""
        await self._remove(parent_inode, name, directory=True)

    async def _remove(self, parent_inode: int, name: bytes, directory: bool) -> None:
        def remove(now: Now) -> None:
            key = self._key_in(parent_inode, name)
            found = now.find(key)
            if directory:
                _check_empty(key, found, now)
            elif found.is_directory:
                raise IsDirectory(key)
            with self.losing(key, found):
                now.hide_lower(key)
                if found.status is None:
                    return
                if directory:
                    self._remove_whiteouts(key)
                with self.upper.at(key) as (above, entry):
                    (os.rmdir if directory else os.unlink)(entry, dir_fd=above)

        await self.overlay.change(remove, self._key_in(parent_inode, name))

    # -- renaming

    @handler
    @changing
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        """Rename an entry; copy it up first. EXDEV for a directory that is at least partly in the lower store."""
        if flags not in (0, pyfuse3.RENAME_NOREPLACE, pyfuse3.RENAME_EXCHANGE):
            raise Refused("", errno.EINVAL)
        exchange = flags == pyfuse3.RENAME_EXCHANGE
        self.overlay.check_name(os.fsdecode(name_new))

        def keys() -> tuple[str, str]:
            return self._key_in(parent_inode_old, name_old), self._key_in(parent_inode_new, name_new)

        def step(now: Now) -> list[str]:
            """Rename, or return the keys to copy up first."""
            (old, new), target = keys(), None
            source = now.find(old)
            with contextlib.suppress(NotFound):
                target = now.find(new)
            _check_rename(old, source, new, target, flags, now)
            below = [old] if source.status is None else []
            if target is not None and target.status is None and (exchange or target.is_directory):
                below.append(new)
            if not below:
                self._rename(old, source, new, target, exchange, now)
            return below

        old, new = keys()
        wanted = (old, new) if self.inodes.peek(new) is None else (old,)  # a known file is mostly in the upper
        while below := await self.overlay.change(step, *wanted):
            for key in below:
                await self.copy_up_name(key)

    def _rename(
        self, old: str, source: OverlayEntry, new: str, target: OverlayEntry | None, exchange: bool, now: Now
    ) -> None:
        if target is not None and target.status is not None and source.status is not None \
                and os.path.samestat(source.status, target.status):  # fmt: skip
            return
        hidden = [old] if not exchange or (target is not None and target.is_directory) else []
        if source.is_directory:  # the directory must not be merged with a lower one that has its new name
            hidden.append(new)
        hidden = [key for key in hidden if now.hides_lower(key)]
        now.make_parents(new)
        for key in hidden:
            now.hide_lower(key)
        with self.upper.at(old) as (old_directory, old_entry), self.upper.at(new) as (new_directory, new_entry):
            if exchange:
                rename(old_entry, new_entry, EXCHANGE, old_directory, new_directory)
                self.inodes.exchange(old, new)
                return
            if target is not None and target.is_directory:
                self._remove_whiteouts(new)
            with contextlib.nullcontext() if target is None else self.losing(new, target):
                os.rename(old_entry, new_entry, src_dir_fd=old_directory, dst_dir_fd=new_directory)
            self.inodes.rename(old, new)

    # -- parts

    async def _make(
        self, parent_inode: int, name: bytes, ctx: RequestContext | None, make: Callable[[int, bytes], None],
        mode: int = 0,
    ) -> EntryAttributes:  # fmt: skip
        """Create an entry with make(directory descriptor, name). `mode` is set again after a chown, of a new file.

        If the entry cannot be given to its creator, remove it again.
        """

        def new(now: Now) -> EntryAttributes:
            key = self._new_key(parent_inode, name, now)
            with self.upper.at(key) as (directory, entry):
                make(directory, entry)
                try:
                    if ctx is not None:
                        self._give(directory, entry, mode, ctx)
                except BaseException:
                    status = os.stat(entry, dir_fd=directory, follow_symlinks=False)
                    (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(entry, dir_fd=directory)
                    raise
                found = OverlayEntry(os.stat(entry, dir_fd=directory, follow_symlinks=False), None)
            return self._fill_found(found, self._looked_up(key, found))

        return await self.overlay.change(new, self._key_in(parent_inode, name))

    def _new_key(self, parent_inode: int, name: bytes, now: Now) -> str:
        """Check that a new name is free, copy up its parents, and return its key."""
        key = self._key_in(parent_inode, name)
        self.overlay.check_name(split_key(key)[1])
        if not self.overlay.lacks(key):  # an entry of the upper directory makes the system call itself fail
            with contextlib.suppress(NotFound):
                now.find(key)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
        if not self._in_upper(parent_inode):
            now.make_parents(key)
        return key

    def _give(self, directory: int, entry: bytes, mode: int, ctx: RequestContext) -> None:
        """Make the calling user the owner of a new entry. In a set-group-ID directory keep the directory's group."""
        if os.geteuid() or (ctx.uid, ctx.gid) == (0, os.getegid()):
            return
        gid = -1 if os.fstat(directory).st_mode & stat.S_ISGID else ctx.gid
        os.chown(entry, ctx.uid, gid, dir_fd=directory, follow_symlinks=False)
        if mode & SET_IDS:  # chown has cleared them
            os.chmod(entry, stat.S_IMODE(mode), dir_fd=directory)

    def _remove_whiteouts(self, key: str) -> None:
        """Delete the reserved names in a directory of the upper directory, so that it can be removed.

        Only this process writes there, unless it is `plain`: staging files are those of killed processes.
        """
        descriptor = self.upper.open(key, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if self.upper.plain:
                remove_abandoned(descriptor)
                return
            remove_unfinished(descriptor)
            for name in os.listdir(descriptor):
                if name.startswith((PREFIX, RESERVED)):
                    os.unlink(name, dir_fd=descriptor)
        finally:
            os.close(descriptor)


def _check_rename(
    old: str, source: OverlayEntry, new: str, target: OverlayEntry | None, flags: int, now: Now
) -> None:
    exchange = flags == pyfuse3.RENAME_EXCHANGE
    if target is None and exchange:
        raise NotFound(new)
    if target is not None and flags == pyfuse3.RENAME_NOREPLACE:
        raise Refused(new, errno.EEXIST)
    for key, found in (old, source), (new, target if exchange else None):
        if found is not None and found.is_directory and found.info is not None:
            raise Refused(key, errno.EXDEV)
    if target is not None and not exchange:
        if source.is_directory:
            _check_empty(new, target, now)
        elif target.is_directory:
            raise IsDirectory(new)


def _check_empty(key: str, found: OverlayEntry, now: Now) -> None:
    if not found.is_directory:
        raise NotDirectory(key)
    if now.entries(key):
        raise Refused(key, errno.ENOTEMPTY)
