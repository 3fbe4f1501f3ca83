"""pyfuse3.Operations: lookup, getattr, readdir, read ... as calls on a Store, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import stat
import time
from collections.abc import Callable, Coroutine, Sequence
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

from zarrfs.errors import NotFound, ReadError, to_errno
from zarrfs.fuse.inodes import InodeTable
from zarrfs.fuse.listing import DirectoryHandle
from zarrfs.fuse.pagecache import PUSHED, READ_AHEAD, Pusher
from zarrfs.options import Options
from zarrfs.store.api import (
    Buffer,
    DescriptorStore,
    Info,
    Kind,
    PartialStore,
    PrefetchStore,
    Store,
    check_key,
    join_key,
    split_key,
)
from zarrfs.store.readahead import KeyReadAhead
from zarrfs.store.recording import Recorder
from zarrfs.transfer.local import read_file

P = ParamSpec("P")
T = TypeVar("T")

SOURCE_XATTR = b"user.zarrfs.source"
MOUNT_XATTR = b"user.zarrfs.mount"
LEFT_OUT_XATTR = b"user.zarrfs.left_out"
STATS_XATTR = b"user.zarrfs.stats"  # answered, but not listed: cp -a must not carry it away
_XATTR_SIZE = 2048  # fits every file system that `cp -a` or `rsync -X` may carry it to
_DAY = 86_400.0
_TYPES = {Kind.FILE: stat.S_IFREG, Kind.DIRECTORY: stat.S_IFDIR, Kind.SYMLINK: stat.S_IFLNK}
_BLOCK = 512  # the unit of st_blocks


def handler(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let nothing but FUSEError out of a request handler: anything else would end the whole mount."""
    operation = cast(Any, method).__name__

    @functools.wraps(method)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except Exception as exc:
            key = ""
            with contextlib.suppress(Exception):
                key = cast(Operations, args[0]).describe(operation, *args[1:3])
            raise pyfuse3.FUSEError(to_errno(exc, operation, key)) from None

    return wrapped


@dataclasses.dataclass(slots=True)
class OpenFile:
    """An open file."""

    key: str
    inode: int
    descriptor: int | None  # of a value that is a file: held, so that it stays one version
    begun: bool = False  # some of it was read
    upper: bool = False  # of a writable mount: the descriptor is that of a file in the upper directory


class Operations(pyfuse3.Operations):
    """The handlers of one mount.

    Attributes come from Store.info and Store.list_dir, bytes from Store.get. Owner is who mounts, or
    uid= and gid=; permission bits are those of the store, or file_mode= and dir_mode=, less umask=.
    """

    supports_dot_lookup = True
    may_push = True  # pages that the kernel has not asked for: nobody else changes them

    def __init__(
        self,
        store: Store,
        options: Options,
        about: dict[str, Any],
        on_ready: Callable[[], None],
        values: Store | None = None,
    ) -> None:
        """`values`: where an open file is read, if not in `store`."""
        super().__init__()
        self.store = store
        self._values = values or store
        self.inodes = InodeTable()
        self.started = trio.Event()
        self.counters: dict[str, int] = {"lookup": 0, "readdir": 0, "open": 0, "read": 0, "bytes": 0}
        self._options = options
        self._about = about
        self._on_ready = on_ready
        self._uid = os.getuid() if options.uid is None else options.uid
        self._gid = os.getgid() if options.gid is None else options.gid
        self._started_ns = time.time_ns()
        self._permissions = {
            Kind.FILE: options.file_mode, Kind.DIRECTORY: options.dir_mode, Kind.SYMLINK: 0o777,
        }  # fmt: skip
        timeout = _DAY if store.immutable else 1.0
        self._attr_timeout = timeout if options.attr_timeout is None else options.attr_timeout
        self._entry_timeout = self._attr_timeout if options.entry_timeout is None else options.entry_timeout
        self._negative_timeout = (
            self._entry_timeout if options.negative_timeout is None else options.negative_timeout
        )
        self.background: trio.Nursery | None = None  # for work that no request waits for
        self.pusher: Pusher | None = None  # set where pages are to be pushed ahead
        self.recorder: Recorder | None = None  # set where what is read is to be noted
        self._ahead = KeyReadAhead(self._values, options.prefetch)
        self._prefetching = self._values if isinstance(self._values, PrefetchStore) else None
        self._descriptors = self._values if isinstance(self._values, DescriptorStore) else None
        self._versions: dict[int, tuple[int, ...]] = {}  # of the pages that the kernel may have, by inode
        self._files: dict[int, OpenFile] = {}
        self._directories: dict[int, DirectoryHandle] = {}
        self._next_handle = 1
        self._mask = ~options.umask
        self._entry = self._new_entry()  # for readdir, whose replies are copied at once
        self._filled: tuple[object, ...] = ()  # what _entry shows apart from inode and size

    def init(self) -> None:
        """The kernel is about to send requests: the mount answers."""
        self.started.set()
        self._on_ready()

    def describe(self, operation: str, number: Any, name: Any = b"") -> str:
        """The key that a request is about, for the log; `number` is its inode or handle."""
        if operation == "lookup":
            return join_key(self.inodes.key(number), os.fsdecode(name))
        if operation in ("read", "release"):
            return self._files[number].key
        if operation in ("readdir", "releasedir"):
            return self._directories[number].key
        return self.inodes.key(number)

    @property
    def open_handles(self) -> int:
        """How many files and directories are open."""
        return len(self._files) + len(self._directories)

    def stats(self) -> dict[str, Any]:
        """What `zarrfs stats` shows: counters of requests, and those of the store."""
        of_store: Callable[[], dict[str, Any]] = getattr(self.store, "stats", dict)  # where a store counts
        own = {"inodes": len(self.inodes), "open_files": self.open_handles, **self.counters}
        return {**own, "read_ahead": self._ahead.stats(), **of_store()}

    async def aclose(self) -> None:
        """End what goes on in the background."""
        await self._ahead.aclose()

    # -- names and attributes

    @handler
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """The entry `name` of a directory; an absent one is answered so that the kernel remembers it."""
        self.counters["lookup"] += 1
        prefix = self.inodes.key(parent_inode)
        if name == b".":
            key = prefix
        elif name == b"..":
            key = split_key(prefix)[0]
        else:
            key = check_key(join_key(prefix, os.fsdecode(name)))
        try:
            # without asking targets: the kernel holds the directory meanwhile, and a target may lie in it
            info = await self.store.info(key, sized=False)
        except NotFound:
            entry = EntryAttributes()
            entry.st_ino = InodeT(0)
            entry.entry_timeout = self._negative_timeout
            return entry
        return self._fill(self._new_entry(), info, self.inodes.lookup(key, info.kind, info.identity))

    @handler
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """The attributes of an inode."""
        key, identity = self.inodes.key(inode), self.inodes.identity(inode)
        try:
            info = await self.store.info(key)
        except NotFound:
            info = self._held(inode)
        else:
            if identity not in (None, info.identity):  # another file has taken the name
                info = self._held(inode)
        return self._fill(self._new_entry(), info, inode)

    @handler
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        """The target of a symbolic link."""
        info = await self.store.info(self.inodes.key(inode), sized=False)
        if info.target is None:
            raise pyfuse3.FUSEError(errno.EINVAL)
        return os.fsencode(info.target)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """The kernel drops inodes."""
        try:
            for inode, lookups in inode_list:
                if self.inodes.forget(inode, lookups):
                    self._versions.pop(inode, None)
        except Exception as exc:  # no request waits, so there is nobody to tell but the log
            to_errno(exc, "forget")

    # -- directories

    @handler
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Open a directory."""
        handle = DirectoryHandle(self.store, self.inodes.key(inode), self.inodes)
        return self._handle(self._directories, handle)

    @handler
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Send entries with attributes from offset `start_id` on until the kernel's buffer is full."""
        self.counters["readdir"] += 1
        directory, first = self._directories[fh], start_id
        while start_id < 2:
            name = b"." if start_id == 0 else b".."
            key = directory.key if start_id == 0 else split_key(directory.key)[0]
            # the kernel counts no lookup for these two
            inode = self.inodes.peek(key) or pyfuse3.ROOT_INODE
            entry = self._fill(self._new_entry(), Info("", Kind.DIRECTORY), inode)
            if not pyfuse3.readdir_reply(token, name, entry, start_id + 1):
                return
            start_id += 1
        while piece := await directory.entries(start_id - 2, start_id > first):
            for name, info, inode in piece:
                entry = self._fill_next(info, inode)
                start_id += 1
                if not pyfuse3.readdir_reply(token, name, entry, start_id):
                    directory.sent(start_id - 3)
                    if self.background is not None and directory.wants_more:
                        self.background.start_soon(directory.prepare)
                    return
            directory.sent(start_id - 2)

    @handler
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close a directory."""
        await self._directories.pop(fh).close()

    # -- files

    @handler
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """Open a file for reading; pages that the kernel has stay valid unless the value is another one."""
        self.counters["open"] += 1
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EROFS)
        key = self.inodes.key(inode)
        descriptor, version = await self._open(key, self.inodes.identity(inode))
        keep = version is not None and self._versions.get(inode, version) == version
        if version is not None and not self.store.immutable:
            self._versions[inode] = version
        return FileInfo(fh=self._handle(self._files, OpenFile(key, inode, descriptor)), keep_cache=keep)

    @handler
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """[off, off + size) of a file, cut at its end."""
        file = self._files[fh]
        data: Buffer
        try:
            if not file.begun:
                file.begun = True
                await self._begin(file.key)
            if file.descriptor is not None:
                data = await read_file(file.descriptor, off, size)
            else:
                data = await self._values.get(file.key, off, size)
        except NotFound:  # it was there when it was opened: to a Zarr reader ENOENT would be the fill value
            raise ReadError(file.key, "removed while open") from None
        if self.pusher is not None and off == 0 and size >= READ_AHEAD:
            info = await self.store.info(file.key)
            if size < (info.size or 0) <= PUSHED:
                await self.pusher.rest(file.key, file.inode, size, info.size or 0)
        if self.recorder is not None:
            self.recorder.read(file.key, off, off + len(data))
        self.counters["read"] += 1
        self.counters["bytes"] += len(data)
        return cast(bytes, data)  # pyfuse3 takes any buffer

    @handler
    async def release(self, fh: FileHandleT) -> None:
        """Close a file."""
        file = self._files.pop(fh)
        if file.descriptor is not None:
            os.close(file.descriptor)

    # -- the rest

    @handler
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Bytes and entries of the source; nothing is free in what cannot be written."""
        usage = await self.store.usage()
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
        """user.zarrfs.source of a file, left_out of a directory; mount and stats of the root."""
        if not name.startswith(b"user."):
            # "not supported here", not "absent": ls then asks once a mount and not twice a file
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        key = self.inodes.key(inode)
        if name == MOUNT_XATTR and inode == pyfuse3.ROOT_INODE:
            return json.dumps(self._about).encode()
        if name == STATS_XATTR and inode == pyfuse3.ROOT_INODE:
            return json.dumps(self.stats()).encode()
        if name == SOURCE_XATTR:
            info = await self.store.info(key, sized=False)
            if info.kind is Kind.FILE:
                return _bounded(await self.store.locate(key))
        if name == LEFT_OUT_XATTR and (reasons := await self._left_out(key)):
            return _first_of(reasons)
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    @handler
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """The names that getxattr answers."""
        key = self.inodes.key(inode)
        left_out = [LEFT_OUT_XATTR] if await self._left_out(key) else []
        if inode == pyfuse3.ROOT_INODE:
            return [MOUNT_XATTR, *left_out]
        info = await self.store.info(key, sized=False)
        return [SOURCE_XATTR] if info.kind is Kind.FILE else left_out

    # -- parts

    async def _left_out(self, key: str) -> dict[str, str]:
        return await self.store.left_out(key) if isinstance(self.store, PartialStore) else {}

    def _handle(self, table: dict[int, T], value: T) -> FileHandleT:
        number, self._next_handle = self._next_handle, self._next_handle + 1
        table[number] = value
        return FileHandleT(number)

    async def _open(self, key: str, identity: int | None) -> tuple[int | None, tuple[int, ...] | None]:
        """(descriptor or None, what tells versions of the value apart, or None where nothing does).

        ESTALE where another file than `identity` has taken the name: the kernel then looks it up again.
        """
        if self.store.immutable:
            return None, ()
        if self._descriptors is None:
            info = await self._values.info(key)
            known = info.size is not None and info.mtime_ns is not None
            return None, (info.size or 0, info.mtime_ns or 0) if known else None
        descriptor = await self._descriptors.open_value(key)
        status = os.fstat(descriptor)
        if identity not in (None, status.st_ino):
            os.close(descriptor)
            raise pyfuse3.FUSEError(errno.ESTALE)
        return descriptor, (
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
        )  # fmt: skip

    async def _begin(self, key: str) -> None:
        """The first read of a file: what is read next may be fetched ahead."""
        if self.background is not None and self._prefetching is not None and self._prefetching.remote:
            info = await self._values.info(key, sized=False)
            if self._ahead.opened(key, info.size or 0):
                self.background.start_soon(self._ahead.advance)

    def _held(self, inode: int) -> Info:
        """The attributes of a file that has lost its name, from a descriptor of it; NotFound without one."""
        for file in self._files.values():
            if file.inode == inode and file.descriptor is not None:
                status = os.fstat(file.descriptor)
                return Info("", Kind.FILE, status.st_size, stat.S_IMODE(status.st_mode), status.st_mtime_ns,
                            allocated=status.st_blocks * _BLOCK, links=status.st_nlink)  # fmt: skip
        raise NotFound(self.inodes.key(inode))

    def _new_entry(self) -> EntryAttributes:
        """An entry with what all entries of this mount have in common."""
        entry = EntryAttributes()
        entry.st_uid = self._uid
        entry.st_gid = self._gid
        entry.st_blksize = 4096
        entry.entry_timeout = self._entry_timeout
        return entry

    def _fill_next(self, info: Info, inode: int) -> EntryAttributes:
        """The entry of readdir, filled; its neighbours mostly differ in inode and size alone."""
        _name, kind, size, mode, mtime_ns, _target, allocated, links, _identity = info
        entry, others = self._entry, (kind, mode, mtime_ns, links)
        if size is None or allocated is not None or others != self._filled:
            self._filled = others if size is not None else ()
            return self._fill(entry, info, inode)
        entry.st_ino = InodeT(inode)
        entry.st_size = size
        entry.st_blocks = -(-size // _BLOCK)
        return entry

    def _fill(self, entry: EntryAttributes, info: Info, inode: int) -> EntryAttributes:
        """Write what differs from entry to entry, all of it: `entry` may have been used before."""
        _name, kind, size, mode, mtime_ns, _target, allocated, links, _identity = info
        permissions = self._permissions[kind]
        if permissions is None:
            permissions = (0o555 if kind is Kind.DIRECTORY else 0o444) if mode is None else mode
        if size is None:  # stat asks again, and only then the target is asked for its size
            size, entry.attr_timeout = 0, 0
        else:
            entry.attr_timeout = self._attr_timeout
        entry.st_ino = InodeT(inode)
        entry.st_mode = pyfuse3.ModeT(_TYPES[kind] | (permissions & self._mask))
        entry.st_nlink = links
        entry.st_size = size
        entry.st_blocks = -(-(size if allocated is None else allocated) // _BLOCK)
        time_ns = self._started_ns if mtime_ns is None else mtime_ns
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = time_ns
        return entry


def _bounded(value: dict[str, Any]) -> bytes:
    """JSON of at most _XATTR_SIZE bytes: a long list of regions gives way to their number."""
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) > _XATTR_SIZE and "regions" in value:
        value = {"regions": value["regions"][:4], "count": len(value["regions"])}
        text = json.dumps(value, separators=(",", ":")).encode()
    return text[:_XATTR_SIZE]


def _first_of(reasons: dict[str, str]) -> bytes:
    """JSON of at most _XATTR_SIZE bytes: what does not fit is counted under ""."""
    shown = dict(reasons)
    while True:
        more = len(reasons) - len(shown)
        text = json.dumps(shown | ({"": f"and {more} more"} if more else {})).encode()
        if len(text) <= _XATTR_SIZE or not shown:
            return text
        for path in [*shown][-max(1, len(shown) // 8) :]:
            del shown[path]
