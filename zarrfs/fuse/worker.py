"""The handlers of one of several processes that answer the same mount (docs/design.md, "One mount, many processes").

Any process may receive any request of the kernel, so a process may have to read, list or release a file or directory
that another process has opened.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    InodeT,
    ReaddirToken,
    RequestContext,
    XAttrNameT,
)

from zarrfs.config.options import Options
from zarrfs.errors import NotDirectory, NotFound, ReadError, StoreError
from zarrfs.fuse.listing import DirectoryHandle
from zarrfs.fuse.operations import OpenFile, Operations, handler
from zarrfs.fuse.shared import (
    CHANGED,
    OPENED,
    PARKED,
    RELEASED,
    USES,
    Handles,
    PageVersions,
    Shared,
    SharedInodes,
    SharedVersions,
    Slot,
    digest,
)
from zarrfs.fuse.versions import StoreVersion
from zarrfs.fuse.xattrs import REFRESH_XATTR, SET_XATTR, STATS_XATTR
from zarrfs.metrics import logs
from zarrfs.store.api import Store, Value

T = TypeVar("T")

log = logging.getLogger(__name__)

_SWEEP = 0.5  # seconds between checks for handles that other processes have released
_OPENED = 256  # after more new handles than this, and than half of the open files, such a check is made earlier
_HELD = 1.0  # seconds between checks for open handles of a replaced version
_FORWARDED = (REFRESH_XATTR, SET_XATTR, STATS_XATTR)

# without @handler: the methods that override them have it themselves
_getattr, _read, _readdir, _getxattr = (
    cast(Any, method).__wrapped__
    for method in (Operations.getattr, Operations.read, Operations.readdir, Operations.getxattr)
)


class WorkerOperations(Operations):
    """The request handlers of one process of a read-only mount. The first process has the number 0.

    `ask` forwards a request for a control attribute to the first process; it is None there. `gather` updates the
    counters of the workers; both are None in workers.
    """

    def __init__(
        self, store: Store, options: Options, about: dict[str, Any], on_ready: Callable[[], None],
        shared: Shared, process: int, generation: int = 1,
    ) -> None:  # fmt: skip
        self._shared, self.process = shared, process
        super().__init__(store, options, about, on_ready)
        self.inodes: SharedInodes = SharedInodes(shared, process, store)
        self.inodes.generation = generation
        self._page_versions = PageVersions(shared.pages)
        self._handles = Handles(shared, process)
        self._generations = {generation: self.current}
        self._prepared: StoreVersion | None = None  # the version of the next generation
        self._opened = 0  # handles opened since the last sweep
        self._latest = SharedVersions(shared.latest)
        store.share_latest_versions(self._latest)
        self.ask: Callable[[str, int], Awaitable[bytes]] | None = None
        self.gather: Callable[[], Awaitable[None]] | None = None
        # adds the counters of the workers to those of the first process, which sets it
        self.totals: Callable[[dict[str, Any]], dict[str, Any]] = lambda own: own

    # -- counters

    @property
    def uses(self) -> int:
        """The number of requests that this process has received, except those that do not count as use."""
        return self._shared.cell(self.process, USES)

    @uses.setter
    def uses(self, number: int) -> None:
        self._shared.put(self.process, USES, number)

    @property
    def all_uses(self) -> int:
        return self._shared.total(USES)

    @property
    def open_handles(self) -> int:
        """The number of open files and directories, of all processes."""
        return max(0, self._shared.total(OPENED) - self._shared.total(RELEASED))

    @property
    def working(self) -> bool:
        """Return whether requests, or work of a version in the background, are in flight."""
        return bool(self._retired) or self.current.users > len(self._files) + len(self._directories)

    @property
    def idle(self) -> bool:
        """Return whether this process is parked, with no request in flight and nothing open."""
        self._sweep()
        parked = self._shared.cell(self.process, PARKED)
        return bool(parked) and not (self.working or self._files or self._directories)

    def own_stats(self) -> dict[str, Any]:
        """Return the counters of this process alone, except open_files: the first process reports that of all."""
        found = super().stats()
        if self.process:
            found["open_files"] = 0
        return found

    def stats(self) -> dict[str, Any]:
        """Return the counters of the mount."""
        return self.totals(self.own_stats())

    # -- names and attributes

    @handler
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        try:
            return cast(EntryAttributes, await _getattr(self, inode, ctx))
        except (NotFound, NotDirectory, pyfuse3.FUSEError):
            if not await self._fetch_handles(inode):  # a file that lost its name may be open in another process
                raise
        return cast(EntryAttributes, await _getattr(self, inode, ctx))

    @handler
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        if name.startswith(_FORWARDED):  # the first process answers control attributes
            if self.ask is not None:
                return await self.ask(os.fsdecode(name), ctx.uid)
            if name == STATS_XATTR and self.gather is not None:
                await self.gather()
        return cast(bytes, await _getxattr(self, inode, name, ctx))

    async def control_answer(self, name: str, uid: int) -> bytes:
        """Return the value of a control attribute for another process. Raise FUSEError as getxattr() does."""
        encoded = os.fsencode(name)
        if encoded == STATS_XATTR:
            if self.gather is not None:
                await self.gather()
            return json.dumps(self.stats()).encode()
        if encoded.startswith((REFRESH_XATTR, SET_XATTR)) and self.control is not None:
            if uid not in (0, os.getuid()):
                raise pyfuse3.FUSEError(errno.EPERM)
            return self.control.answer(name)
        raise pyfuse3.FUSEError(pyfuse3.ENOATTR)

    # -- directories

    @handler
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        directory = self._directories.get(fh)
        if directory is None:
            slot = self._slot(fh)
            version = self._at(slot.generation)
            directory = DirectoryHandle(version, self.inodes.key(slot.inode), self.inodes)
            directory.old = version is not self.current
            version.users += 1
            self._directories[fh] = directory
        directory.resume(*self._handles.place(fh))  # where the process that answered last has stopped
        await _readdir(self, fh, start_id, token)
        if (place := directory.place) is not None:
            self._handles.put_place(fh, *place)

    @handler
    async def releasedir(self, fh: FileHandleT) -> None:
        self._release_handle(fh)
        directory = self._directories.pop(fh, None)
        if directory is not None:
            await self._close_directory(fh, directory)

    # -- files

    @handler
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        if fh not in self._files:  # another process has opened it
            try:
                await self._reopen(fh)
            except StoreError as exc:  # the file existed at open(); for ENOENT a Zarr reader would return fill values
                raise ReadError(exc.key, "removed while open") from exc
        return cast(bytes, await _read(self, fh, off, size))

    @handler
    async def release(self, fh: FileHandleT) -> None:
        self._release_handle(fh)
        file = self._files.pop(fh, None)
        if file is not None:
            self._close_file(file)
            self._handles.free(fh)

    # -- versions

    def visible(self) -> StoreVersion:
        """Return the visible version, which is the same in all processes of the mount.

        Switch to the prepared version if a refresh has made it visible. End this process if it has none.
        """
        if self._shared.visible[0] != self.inodes.generation:
            version, self._prepared = self._prepared, None
            if version is None:  # the refresh did not wait for this process, which must not answer requests any more
                log.error("worker %d (process %d) ends: it has not opened the version that a refresh shows",
                          self.process, os.getpid())  # fmt: skip
                logs.finish()
                os._exit(1)
            self.show(version)
            self.begin(version, version.get_ready)
        return self.current

    def note_change(self, version: StoreVersion) -> None:
        super().note_change(version)
        if version is self.current:  # the first process, which refreshes, reads this cell
            self._shared.put(self.process, CHANGED, self.inodes.generation)

    @property
    def changed(self) -> bool:
        """Return whether a read of the visible version has found a changed target, in any process."""
        generation, processes = self.inodes.generation, range(self._shared.processes)
        return any(self._shared.cell(process, CHANGED) == generation for process in processes)

    def prepare(self, version: StoreVersion) -> None:
        """Store the version of the next generation; close an earlier one that did not become visible."""
        self.visible()  # the earlier one may have become visible since the last request
        version.store.share_latest_versions(self._latest)
        unused, self._prepared = self._prepared, version
        if unused is not None and self.background is not None:
            self.background.start_soon(unused.aclose)

    def show(self, version: StoreVersion) -> None:
        old, generation, pages = self.current, self.inodes.generation, self._page_versions
        old.users += 1  # until keep() uses it: otherwise super().show() would begin to close it
        super().show(version)
        self.inodes.store = version.store
        self._page_versions = pages  # shared by all processes; super().show() has replaced it
        self._generations[generation + 1] = version
        self.keep_open(generation, old)
        self.leave(old)

    def keep_open(self, generation: int, version: StoreVersion) -> None:
        """Keep a replaced version open as long as any process has an open handle of it."""
        self._generations[generation] = version
        self.begin(version, functools.partial(self._while_held, generation))

    def add_replaced(self, generation: int, version: StoreVersion) -> None:
        """Add a replaced version of which other processes have open handles, and keep it open."""
        version.store.share_latest_versions(self._latest)
        version.retire()
        self._retired.append(version)
        self.keep_open(generation, version)

    async def _while_held(self, generation: int) -> None:
        await trio.sleep(_HELD)  # after that no process opens another handle of it: see Operations.open()
        while self.has_handles(generation):  # noqa: ASYNC110  (other processes close them)
            await trio.sleep(_HELD)
        del self._generations[generation]

    def has_handles(self, generation: int) -> bool:
        """Return whether any process has an open handle of a generation or of an earlier one."""
        return self._handles.holds(generation)

    async def sweep(self) -> None:
        """Close files and directories that other processes have released, again and again until cancelled."""
        while True:
            await trio.sleep(_SWEEP)
            self.visible()  # so that a process without requests also closes a replaced version
            self._sweep()

    # -- parts

    def _sweep(self) -> None:
        self._opened = 0
        is_open = self._handles.is_open
        for handle in [handle for handle in self._files if not is_open(handle)]:
            self._close_file(self._files.pop(handle))
            self._handles.free(handle)
        for handle in [handle for handle in self._directories if not is_open(handle)]:
            directory = self._directories.pop(handle)
            if self.background is not None:
                self.background.start_soon(self._close_directory, handle, directory)
        self._handles.reclaim()

    async def _close_directory(self, handle: int, directory: DirectoryHandle) -> None:
        try:
            await directory.close()
        finally:
            self._handles.free(handle)
            self.leave(directory.version)

    def _release_handle(self, handle: int) -> None:
        self._shared.add(self.process, RELEASED)
        self._handles.release(handle)

    def _handle(self, table: dict[int, T], value: T) -> FileHandleT:
        self._opened += 1
        if self._opened > max(_OPENED, len(self._files) // 2):
            self._sweep()
        generation = self.inodes.generation
        if isinstance(value, OpenFile):
            known = 0 if value.value is None or self.current.store.immutable else _known_version(value.value)
            descriptor = None if known == 0 else value.descriptor
            number = self._handles.take(value.inode, generation, known, descriptor, False)
        else:
            assert isinstance(value, DirectoryHandle)
            inode = self.inodes.peek(value.key) or 0
            number = self._handles.take(inode, generation, 0, None, True)
        if number is None:
            if isinstance(value, OpenFile):
                self._close_file(value)
            elif isinstance(value, DirectoryHandle):
                self.leave(value.version)
            raise pyfuse3.FUSEError(errno.ENFILE)
        self._shared.add(self.process, OPENED)
        table[number] = value
        return FileHandleT(number)

    def _slot(self, handle: int) -> Slot:
        slot = self._handles.get(handle)
        if slot is None:
            raise pyfuse3.FUSEError(errno.EBADF)
        return slot

    def _at(self, generation: int) -> StoreVersion:
        """Return the version of a generation; ESTALE if this process does not have it open."""
        version = self._generations.get(generation)
        if version is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return version

    def _found_version(self, inode: int) -> StoreVersion:
        try:
            return super()._found_version(inode)
        except pyfuse3.FUSEError:
            version = self._generations.get(self.inodes.find(inode).generation)
            if version is None or not any(self._handles.of_inode(inode)):
                raise
            return version

    def _sent_size(self, inode: int, size: int) -> None:
        super()._sent_size(inode, size)
        if size:
            self._shared.sent_size(inode)

    async def _fetch_handles(self, inode: int) -> bool:
        """Open the files of an inode that other processes have open; return whether there were any."""
        found = False
        for handle, _slot in list(self._handles.of_inode(inode)):
            if handle not in self._files and handle not in self._directories:
                await self._reopen(handle)
                found = True
        return found

    async def _reopen(self, handle: int) -> None:
        """Open the file of another process's handle in this process.

        Raise StoreError if the file does not exist, ReadError if the bytes of the handle are not available, and
        FUSEError if the handle was released (EBADF) or this process does not have its version open (ESTALE).
        """
        slot = self._slot(handle)
        version = self._at(slot.generation)
        file = OpenFile(self.inodes.key(slot.inode), slot.inode, None)
        value: Value | None = None
        try:
            value = await version.values.open(file.key)
        except StoreError:
            if slot.descriptor < 0:
                raise
        if value is not None and self._is_same(slot, value, version.store.immutable):
            file.value, file.descriptor = value, value.fileno()
        else:
            if value is not None:
                value.close()
            file.descriptor = _opened_elsewhere(slot)
            if file.descriptor is None:
                raise ReadError(file.key, "was replaced since it was opened, by a worker that is gone")
        if handle in self._files or not self._handles.is_open(handle):  # opened by another read, or released
            self._close_file(file)
            return
        version.users += 1
        file.version = version
        self._files[handle] = file

    def _is_same(self, slot: Slot, value: Value, immutable: bool) -> bool:
        """Return whether a value may be read for a handle: its reads return the same bytes, or stale=reread is set."""
        if immutable or self._options.stale == "reread" or slot.version == _known_version(value):
            return True
        if slot.descriptor < 0 or not os.path.exists(f"/proc/{slot.pid}/fd/{slot.descriptor}"):
            return False
        descriptor = value.fileno()
        if descriptor is None:
            return False
        # The file was changed in place, and the process that opened it reads the new bytes, too. Its open descriptor
        # keeps the inode number from being reused.
        status = os.fstat(descriptor)
        return (status.st_dev, status.st_ino) == (slot.device, slot.number)


def _known_version(value: Value) -> int:
    """Return the digest of what a value's reads depend on (Value.pinned); never 0."""
    return digest(value.pinned) or 1


def _opened_elsewhere(slot: Slot) -> int | None:
    """Return a new descriptor of the local file that another process has open for a handle; None if it has none."""
    if slot.descriptor < 0:
        return None
    try:
        descriptor = os.open(f"/proc/{slot.pid}/fd/{slot.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (slot.device, slot.number):
        os.close(descriptor)
        return None
    return descriptor
