"""The adapter between pyfuse3 and a Store: every request of the kernel becomes a call on the store.

A refresh replaces the visible version of the source. Open files and directories keep the version in which they were
opened. A replaced version is closed when no request and no handle uses it any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator, Sequence
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
    StatvfsData,
    XAttrNameT,
)

from zarrfs.config.options import Options
from zarrfs.errors import NotDirectory, NotFound, ReadError, TargetChanged, ZarrfsError, internal_error, to_errno
from zarrfs.fuse.inodes import InodeTable
from zarrfs.fuse.listing import DirectoryHandle, Listed
from zarrfs.fuse.pagecache import PUSHED, READ_AHEAD, push_rest
from zarrfs.fuse.permissions import Permissions
from zarrfs.fuse.sizes import StatAhead, request_sizes
from zarrfs.fuse.versions import StoreVersion
from zarrfs.fuse.xattrs import (
    LEFT_OUT_XATTR,
    MOUNT_XATTR,
    REFRESH_XATTR,
    RELEASE_XATTR,
    SOURCE_XATTR,
    STATS_XATTR,
    Control,
    bounded,
    first_of,
)
from zarrfs.metrics.counters import COUNTS, counters
from zarrfs.store.api import FILE_TYPES, Info, Kind, Store, Value, check_key, join_key, split_key
from zarrfs.system.buffers import Buffer
from zarrfs.system.localfiles import read_file

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

NEGATIVE = 1.0  # seconds that the kernel may cache that a name does not exist; a refresh waits as long
_DAY = 86_400.0
_BLOCK = 512  # the unit of st_blocks
_NAMED = frozenset(("lookup", "create", "mkdir", "mknod", "symlink", "unlink", "rmdir", "rename"))
_SETTLED_NS = 2 * 10**9  # ns; some file systems record times in whole seconds


def handler(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Wrap a request handler so that only FUSEError leaves it: any other exception would end the mount."""
    operation = cast(Any, method).__name__

    @functools.wraps(method)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        operations = cast(Operations, args[0])
        version = operations.current
        version.users += 1
        try:
            return await method(*args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except Exception as exc:
            if isinstance(exc, TargetChanged):
                version.changed = True
            key = ""
            with contextlib.suppress(Exception):
                key = operations.describe(operation, *args[1:3])
            raise pyfuse3.FUSEError(to_errno(exc, operation, key)) from None
        finally:
            operations.leave(version)

    return wrapped


@dataclasses.dataclass(slots=True)
class OpenFile:
    """An open file."""

    key: str
    inode: int
    descriptor: int | None  # of a local file with the same bytes, read instead of the value
    begun: bool = False  # the file was read at least once
    upper: bool = False  # writable mounts: the descriptor belongs to a file of the upper directory
    version: StoreVersion | None = None  # the version it was opened in; None: the mount has only one
    value: Value | None = None  # None: a file of the upper directory


async def _refused(*_: Any) -> Any:
    """Refuse a change: the kernel requests it only after `mount -i -o remount,rw`, which bypasses mount.zarrfs."""
    raise pyfuse3.FUSEError(errno.EROFS)


_refuse: Any = _refused  # Any, because the methods that it replaces have other parameters


def _is_settled(changed: int) -> bool:
    """Return whether any later change of a file gets another time than `changed` (ns since 1970).

    Two changes within one clock tick may have the same time. A time a minute or more in the future was set explicitly,
    so the next change gets another one.
    """
    return not -60 * 10**9 < time.time_ns() - changed <= _SETTLED_NS


class Operations(pyfuse3.Operations):
    """The request handlers of one read-only mount.

    Attributes come from Store.info() and Store.list_dir(), bytes from the Value that open() opened. The owner of every
    file is the user who mounts, or uid= and gid=. permissions.py computes the permission bits.
    """

    supports_dot_lookup = True
    may_push = True  # pages may be stored in the page cache before a read, because no client can change them
    pushes = False  # they are stored: the read-ahead window cannot be raised
    create = link = mkdir = mknod = removexattr = rename = rmdir = setattr = setxattr = symlink = unlink = _refuse

    def __init__(
        self,
        store: Store,
        options: Options,
        about: dict[str, Any],
        on_ready: Callable[[], bool | None],
        values: Store | None = None,
    ) -> None:
        """`values` is the store that open files are read from; default: `store`."""
        super().__init__()
        self.current = StoreVersion(store, options, values)
        self._retired: list[StoreVersion] = []  # replaced, but still in use
        self.background: trio.Nursery | None = None  # runs work that no request waits for
        self.inodes = InodeTable()
        self._page_versions: dict[int, Hashable] = {}  # by inode: Value.version of the pages the kernel may have
        self._files: dict[int, OpenFile] = {}
        self._opened: dict[int, set[FileHandleT]] = {}  # open files by inode
        self._directories: dict[int, Any] = {}  # DirectoryHandle, or the handle of a writable mount
        self._next_handle = 1
        self._filled: tuple[object, ...] = ()  # contents of readdir's entry, except inode and size
        self.control: Control | None = None
        self._stat_ahead = StatAhead()
        self.started = trio.Event()
        self._options = options
        self._about = about
        self._on_ready = on_ready
        self._uid = os.getuid() if options.uid is None else options.uid
        self._gid = os.getgid() if options.gid is None else options.gid
        self._started_ns = time.time_ns()
        self.permissions = Permissions(options.umask)
        timeout = _DAY if store.immutable else 1.0
        self._attr_timeout = timeout if options.attr_timeout is None else options.attr_timeout
        self._negative_timeout = min(NEGATIVE, self._attr_timeout)
        self._entry = self._new_entry()  # reused by readdir, because pyfuse3 immediately copies it into the reply

    def init(self) -> None:
        """Announce that the mount is up: the kernel begins to send requests."""
        if self._on_ready() is not False:
            self.started.set()

    def describe(self, operation: str, number: Any, name: Any = b"") -> str:
        """Return the key that a request refers to, for the log; `number` is its inode or handle."""
        if operation in ("read", "release", "write", "fsync"):
            return self._files[number].key
        if operation in ("readdir", "releasedir", "fsyncdir"):
            return str(self._directories[number].key)
        key = self.inodes.key(number)
        return join_key(key, os.fsdecode(name)) if operation in _NAMED else key

    def stats(self) -> dict[str, Any]:
        """Return the figures of the mount for `zarrfs stats`."""
        return {**counters(), "inodes": len(self.inodes), "open_files": len(self._files) + len(self._directories)}

    async def aclose(self) -> None:
        """Close all versions."""
        for version in [*self._retired, self.current]:
            await version.aclose()

    # -- names and attributes

    @handler
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """Look up `name` in a directory; an absent name becomes a negative entry of the kernel."""
        key = self._key_in(parent_inode, name)
        try:
            # not sized: the kernel holds the directory's lock during a lookup, and a target whose size is requested
            # may itself be in that directory
            info = await self._info(key, sized=False)
        except NotFound:
            return self._absent_entry()
        return self._fill(self._new_entry(), info, self.inodes.lookup(key, info.kind, info.identity))

    @handler
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """Stat an inode. ESTALE if another file or directory has its name, and no client has the inode open."""
        key, info = self.inodes.key(inode), None
        if not self.inodes.is_old(inode):
            if self.inodes.sizes.is_unknown(inode):
                await self._ask_size(key)
            with contextlib.suppress(NotFound, NotDirectory):
                info = await self._info(key)
        # the name is gone, or another entry has it, or a refresh has replaced the version
        if info is None or self.inodes.is_old(inode) or info.kind is not self.inodes.kind(inode) or (
            self.inodes.is_other(inode, info.identity) and not self.inodes.survives(inode)
        ):  # fmt: skip
            info = self._stat_by_handle(inode)
        return self._fill(self._new_entry(), info, inode)

    @handler
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        """Return the target of a symbolic link."""
        with self._version_of(inode) as version:
            info = await version.store.info(self.inodes.key(inode), sized=False)
        if info.target is None:
            raise pyfuse3.FUSEError(errno.EINVAL)
        return os.fsencode(info.target)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Lower the lookup counts of inodes that the kernel drops."""
        try:
            for inode, lookups in inode_list:
                if self.inodes.forget(inode, lookups):
                    self._page_versions.pop(inode, None)
        except Exception as exc:  # FORGET has no reply: the log is the only place for the failure
            to_errno(exc, "forget")

    # -- directories

    @handler
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Open a directory."""
        handle = DirectoryHandle(self.current, self.inodes.key(inode), self.inodes, self._stat_ahead)
        self.current.users += 1
        return self._handle(self._directories, handle)

    @handler
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Send entries with attributes from offset `start_id` on until the kernel's buffer is full."""
        directory, first = self._directories[fh], start_id
        if start_id < 2:
            if not self._send_dots(directory.key, start_id, token):
                return
            start_id = 2
        while piece := await self._entries(directory, start_id - 2, start_id > first):
            for name, info, inode in piece:
                entry = self._fill_next(info, inode)
                start_id += 1
                if not pyfuse3.readdir_reply(token, name, entry, start_id):
                    directory.sent(start_id - 3)  # the position of the entry that did not fit
                    if self.background is not None and directory.wants_more:
                        self.background.start_soon(directory.prepare)
                    return
            directory.sent(start_id - 2)

    @handler
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close a directory."""
        directory = self._directories.pop(fh)
        try:
            await directory.close()
        finally:
            self.leave(directory.version)

    # -- files

    @handler
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """Open a file for reading. The kernel keeps cached pages if they are of the same version of the value."""
        COUNTS["opens_total"] += 1
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            raise pyfuse3.FUSEError(errno.EROFS)
        version, file = self.current, OpenFile(self.inodes.key(inode), inode, None)
        pages = None if self.inodes.is_old(inode) else await self._open(version, file)
        if self.inodes.is_old(inode):  # a refresh may have replaced the version meanwhile
            self._close_file(file)
            raise pyfuse3.FUSEError(errno.ESTALE)
        if file.value is not None:
            self.inodes.sizes.learned(inode, file.value.size)
        keep = version.store.immutable
        if not keep:
            keep = self._keeps_pages(inode, pages, 0 if file.value is None else file.value.info.mtime_ns or 0)
        version.users += 1
        file.version = version
        return FileInfo(fh=self._add_file(file), keep_cache=keep)

    @handler
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Return the bytes [off, off + size) of a file, cut at its end."""
        file = self._files[fh]
        version = file.version or self.current
        data: Buffer
        try:
            if not (file.begun or file.upper):
                file.begun = True
                await self._begin(version, file.key)
            if file.descriptor is not None:
                data = await read_file(file.descriptor, off, size)
            else:
                assert file.value is not None
                data = await file.value.read(off, size)
        except NotFound:  # the file existed when it was opened; for ENOENT a Zarr reader would return fill values
            raise ReadError(file.key, "removed while open") from None
        # the beginning of a file was read: if the file is small, push the rest of it into the page cache
        if self.pushes and off == 0 and size >= READ_AHEAD and file.value and size < file.value.size <= PUSHED:
            await push_rest(file.value, file.inode, size)
        COUNTS["reads_total"] += 1
        COUNTS["read_bytes_total"] += len(data)
        return cast(bytes, data)  # pyfuse3 takes any buffer

    @handler
    async def release(self, fh: FileHandleT) -> None:
        """Close a file."""
        file = self._files.pop(fh)
        handles = self._opened[file.inode]
        handles.discard(fh)
        if not handles:
            del self._opened[file.inode]
        self._close_file(file)

    # -- statfs and extended attributes

    @handler
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Report the numbers of bytes and entries, and the free space, as Store.usage() returns them."""
        usage = await self.current.store.usage()
        data = StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_blocks = -(-usage.bytes // 4096)
        data.f_bfree = data.f_bavail = usage.bytes_free // 4096
        data.f_files = usage.files
        data.f_ffree = data.f_favail = usage.files_free
        data.f_namemax = 255
        return data

    @handler
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """Return user.zarrfs.source, left_out, mount or stats, or answer a control request.

        Only files have source; only the root has mount and stats.
        """
        if not name.startswith(b"user."):
            # EOPNOTSUPP, not ENODATA: after EOPNOTSUPP, ls requests no more attributes in this mount; after ENODATA,
            # it would request two for each file
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        if self.control is not None and name.startswith((REFRESH_XATTR, RELEASE_XATTR)):
            if ctx.uid not in (0, os.getuid()):
                raise pyfuse3.FUSEError(errno.EPERM)
            if name == RELEASE_XATTR:
                return json.dumps({"pid": os.getpid(), "held": self.control.release()}).encode()
            return self.control.answer(os.fsdecode(name))
        if name == MOUNT_XATTR and inode == pyfuse3.ROOT_INODE:
            return json.dumps(self._about).encode()
        if name == STATS_XATTR and inode == pyfuse3.ROOT_INODE:
            return json.dumps(self.stats()).encode()
        key = self.inodes.key(inode)
        with self._version_of(inode) as version:
            if name == SOURCE_XATTR:
                info = await version.store.info(key, sized=False)
                if info.kind is Kind.FILE:
                    return bounded(await version.store.locate(key))
            if name == LEFT_OUT_XATTR and (reasons := await version.store.left_out(key)):
                return first_of(reasons)
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    @handler
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """List the attributes that `cp -a` may copy. Those of control and statistics are not listed."""
        key = self.inodes.key(inode)
        with self._version_of(inode) as version:
            left_out = [LEFT_OUT_XATTR] if await version.store.left_out(key) else []
            if inode == pyfuse3.ROOT_INODE:
                return [MOUNT_XATTR, *left_out]
            info = await version.store.info(key, sized=False)
        return [SOURCE_XATTR, *left_out] if info.kind is Kind.FILE else left_out

    # -- versions

    @property
    def store(self) -> Store:
        """The visible store."""
        return self.current.store

    def show(self, version: StoreVersion) -> None:
        """Make `version` the visible one. Open files and directories keep their versions."""
        old, self.current = self.current, version
        self.inodes.renew()
        self._page_versions, self._filled = {}, ()
        old.retired = True
        old.users += 1
        self._retired.append(old)
        self.leave(old)

    def leave(self, version: StoreVersion) -> None:
        """Release one use of a version (a request or a handle). The last release closes a replaced version."""
        version.users -= 1
        if version.retired and not version.users and self.background is not None:
            self.background.start_soon(self._close, version)

    def begin(self, version: StoreVersion, work: Callable[[], Awaitable[None]]) -> None:
        """Start `work` in the background. `version` stays open until it ends."""
        if self.background is not None:
            version.users += 1
            self.background.start_soon(self._within, version, work)

    async def _within(self, version: StoreVersion, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as exc:  # no request waits for it, so it must not end the mount: a damaged index, say
            log.warning("work in the background: %s", internal_error(exc))
            log.debug("where it came from:", exc_info=exc)
        finally:
            self.leave(version)

    async def _close(self, version: StoreVersion) -> None:
        if version.closed:
            return
        try:
            await version.aclose()
        except Exception as exc:  # a failure in a replaced version must not end the mount
            log.warning("closing an older version: %s", exc)
        self._retired.remove(version)

    async def _info(self, key: str, sized: bool = True) -> Info:
        """Return Store.info() of the version that is visible when this returns: retry after a refresh."""
        while True:
            version = self.current
            version.users += 1
            try:
                info = await version.store.info(key, sized)
            except ZarrfsError:
                if version is self.current:
                    raise
            else:
                if version is self.current:
                    return info
            finally:
                self.leave(version)

    @contextlib.contextmanager
    def _version_of(self, inode: int) -> Iterator[StoreVersion]:
        """Yield the version an inode belongs to, and keep it open: the inode's last handle may be closed meanwhile.

        ESTALE if that version was replaced and the file is not open in it. The kernel then looks the name up again.
        """
        version = self._found_version(inode)
        version.users += 1
        try:
            yield version
        finally:
            self.leave(version)

    def _found_version(self, inode: int) -> StoreVersion:
        if not self.inodes.is_old(inode):
            return self.current
        for file in self._files_of(inode):
            if file.version is not None:
                return file.version
        raise pyfuse3.FUSEError(errno.ESTALE)

    # -- handles

    def _handle(self, table: dict[int, T], value: T) -> FileHandleT:
        number, self._next_handle = self._next_handle, self._next_handle + 1
        table[number] = value
        return FileHandleT(number)

    def _add_file(self, file: OpenFile) -> FileHandleT:
        fh = self._handle(self._files, file)
        self._opened.setdefault(file.inode, set()).add(fh)
        return fh

    def _files_of(self, inode: int) -> list[OpenFile]:
        """Return the open files of an inode."""
        return [self._files[fh] for fh in self._opened.get(inode, ())]

    def _close_file(self, file: OpenFile) -> None:
        if file.value is not None:
            if file.descriptor == file.value.fileno():
                file.descriptor = None  # closed with the value
            file.value.close()
        if file.descriptor is not None:
            os.close(file.descriptor)
        if file.version is not None:
            self.leave(file.version)

    # -- parts

    def _keeps_pages(self, inode: int, version: Hashable, changed: int) -> bool:
        """Return whether the pages that the kernel may have of a file are of `version`; None: unknown.

        Two changes in quick succession may have the same time, so the pages of a file that has just `changed` (ns
        since 1970) are dropped at its next open.
        """
        keep = version is not None and self._page_versions.get(inode, version) == version
        self._page_versions[inode] = version if _is_settled(changed) else None
        return keep

    def _key_in(self, inode: int, name: bytes) -> str:
        """Return the key of the entry `name` of a directory; of the inode itself for an empty name."""
        key = self.inodes.key(inode)
        if name in (b"", b"."):
            return key
        return split_key(key)[0] if name == b".." else join_key(key, check_key(os.fsdecode(name)))

    def _send_dots(self, key: str, start_id: int, token: ReaddirToken) -> bool:
        """Send "." and ".." of a directory from offset `start_id` on; return False if the kernel's buffer is full."""
        for offset, (name, above) in enumerate(((b".", key), (b"..", split_key(key)[0])), 1):
            if offset > start_id:
                # peek(), because the kernel counts no lookup for . and ..
                inode = self.inodes.peek(above) or pyfuse3.ROOT_INODE
                entry = self._fill(self._new_entry(), Info("", Kind.DIRECTORY), inode)
                if not pyfuse3.readdir_reply(token, FileNameT(name), entry, offset):
                    return False
        return True

    async def _entries(self, directory: DirectoryHandle, position: int, more: bool) -> list[Listed]:
        """Return entries of the version that is visible when this returns, as DirectoryHandle.entries() does."""
        while True:
            version, old = self.current, directory.version
            version.users += 1
            try:
                found = await directory.entries(version, position, more)
            finally:
                self.leave(version if directory.version is old else old)
            if version is self.current:
                return found
            if more:
                return []

    async def _open(self, version: StoreVersion, file: OpenFile) -> Hashable:
        """Open the value of `file`. Return its version, () if the store never changes.

        ESTALE if another file has taken the inode's name. The kernel then looks the name up again.
        """
        value = file.value = await version.values.open(file.key)
        file.descriptor = value.fileno()
        if version.store.immutable:
            return ()
        if self.inodes.is_other(file.inode, value.info.identity):
            self._close_file(file)
            raise pyfuse3.FUSEError(errno.ESTALE)
        self.inodes.learn(file.inode, value.info.identity)
        return value.version

    async def _begin(self, version: StoreVersion, key: str) -> None:
        """Start key read-ahead at the first read of a file, unless a refresh has replaced its version."""
        if self.background is not None and version.values.remote:
            info = await version.values.info(key, sized=False)
            if version is self.current and (work := version.ahead.opened(key, info.size or 0)):
                self.begin(version, work)

    async def _ask_size(self, key: str) -> None:
        """Find out the size of a value: after a listing with those of its neighbours, else with its first bytes."""
        version, keys = self.current, self._stat_ahead.begin(key)
        if keys:
            self.begin(version, functools.partial(request_sizes, version.store, keys))
        elif keys is None and (await version.values.info(key, sized=False)).size is None:
            await version.values.prefetch([key])

    def _stat_by_handle(self, inode: int) -> Info:
        """Stat a file by one of its handles. ESTALE if no client has it open: the kernel repeats the lookup."""
        for file in self._files_of(inode):
            if file.value is not None and file.descriptor is None:
                return file.value.info
            if file.descriptor is not None:
                status = os.fstat(file.descriptor)
                return Info("", Kind.FILE, status.st_size, stat.S_IMODE(status.st_mode), status.st_mtime_ns,
                            allocated=status.st_blocks * _BLOCK, links=status.st_nlink)  # fmt: skip
        raise pyfuse3.FUSEError(errno.ESTALE)

    def _absent_entry(self) -> EntryAttributes:
        """Return the answer to a lookup of a name that does not exist."""
        entry = EntryAttributes()
        entry.st_ino = InodeT(0)
        entry.entry_timeout = self._negative_timeout
        return entry

    def _new_entry(self) -> EntryAttributes:
        """Return an entry with the fields that all entries of this mount have in common."""
        entry = EntryAttributes()
        entry.st_uid = self._uid
        entry.st_gid = self._gid
        entry.st_blksize = 4096
        entry.entry_timeout = self._attr_timeout
        return entry

    def _fill_next(self, info: Info, inode: int) -> EntryAttributes:
        """Fill the entry that readdir reuses. If only inode and size differ from its last use, set only those."""
        _name, kind, size, mode, mtime_ns, _target, allocated, links, _identity, unreadable = info
        entry, others = self._entry, (kind, mode, mtime_ns, links)
        if size is None or unreadable or allocated is not None or others != self._filled:
            self._filled = others if size is not None and not unreadable else ()
            return self._fill(entry, info, inode)
        if not self.current.sizes_known:
            self.inodes.sizes.shown(inode, size)
        entry.st_ino = InodeT(inode)
        entry.st_size = size
        entry.st_blocks = -(-size // _BLOCK)
        return entry

    def _fill(self, entry: EntryAttributes, info: Info, inode: int) -> EntryAttributes:
        """Set every field that differs between entries, because `entry` may be a reused one."""
        _name, kind, size, _mode, mtime_ns, _target, allocated, links, _identity, unreadable = info
        # the size of an unreadable entry is not that of its bytes, and it may be readable later
        entry.attr_timeout = 0 if size is None or unreadable else self._attr_timeout
        if size is None or not self.current.sizes_known:
            size = self.inodes.sizes.shown(inode, size)
        entry.st_ino = InodeT(inode)
        entry.st_mode = pyfuse3.ModeT(FILE_TYPES[kind] | self.permissions.of(info))
        entry.st_nlink = links
        entry.st_size = size
        entry.st_blocks = -(-(size if allocated is None else allocated) // _BLOCK)
        time_ns = self._started_ns if mtime_ns is None else mtime_ns
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = time_ns
        return entry
