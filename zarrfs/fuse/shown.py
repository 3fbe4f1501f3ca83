"""What is shown: versions of a source, what is open of each, and how every handler is wrapped.

A refresh puts a new version in the place of the one that is shown. What is open goes on in its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import FileHandleT

from zarrfs.errors import TargetChanged, ZarrfsError, to_errno
from zarrfs.fuse.counted import Counted
from zarrfs.fuse.inodes import InodeTable
from zarrfs.fuse.listing import DirectoryHandle
from zarrfs.fuse.versions import Version
from zarrfs.metrics import process
from zarrfs.store.api import Info, Store, Value, join_key

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("zarrfs")

_ROOMY = 4  # older versions that keep blocks in memory: those that were read last
_LOOKS = ("statfs", "getxattr", "listxattr")  # who watches a mount does not use it


def handler(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let nothing but FUSEError out of a request handler: anything else would end the whole mount."""
    operation = cast(Any, method).__name__
    use = operation not in _LOOKS

    @functools.wraps(method)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        operations = cast(ShownOperations, args[0])
        operations.uses += use
        version = operations.current
        version.users += 1
        try:
            return await method(*args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except Exception as exc:
            version.changed = version.changed or isinstance(exc, TargetChanged)
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
    descriptor: int | None  # of the file that is read, if it is one: in place of the value
    begun: bool = False  # some of it was read
    upper: bool = False  # of a writable mount: the descriptor is that of a file in the upper directory
    version: Version | None = None  # which it was opened in; None: there is but one
    value: Value | None = None  # None: a file of the upper directory


class ShownOperations(pyfuse3.Operations):
    """The versions of what a mount shows, and what is open."""

    def __init__(self, version: Version) -> None:
        super().__init__()
        self.current = version
        self._retired: list[Version] = []  # that are in use
        self._roomy: list[Version] = []  # of these, read last at the end
        self._counted = Counted()
        self.uses = 0  # requests of who uses the mount
        self.counters: dict[str, int] = {"lookup": 0, "readdir": 0, "open": 0, "read": 0, "bytes": 0}
        self.background: trio.Nursery | None = None  # for work that no request waits for
        self.inodes = InodeTable()
        self._versions: dict[int, Hashable] = {}  # of the pages that the kernel may have, by inode
        self._files: dict[int, OpenFile] = {}
        self._directories: dict[int, DirectoryHandle] = {}
        self._next_handle = 1
        self._filled: tuple[object, ...] = ()  # of the entry that readdir uses again, apart from inode and size

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
        own = {"inodes": len(self.inodes), "open_files": self.open_handles, **self.counters}
        older = [version.stats() for version in self._retired]
        return {**own, **process.stats(), **self._counted.added_to(self.current.stats(), older)}

    async def aclose(self) -> None:
        """Close all versions."""
        for version in [*self._retired, self.current]:
            await version.aclose()

    # -- versions

    @property
    def unsynced(self) -> int | None:
        """How many files were written that nobody has asked to be synced; None where nothing can be written."""
        return None

    @property
    def versions(self) -> list[Version]:
        """What is shown, and all before that is still in use."""
        return [self.current, *self._retired]

    @property
    def store(self) -> Store:
        """What is shown."""
        return self.current.store

    def show(self, version: Version) -> None:
        """Let all that is opened from now on be of `version`; what is open stays what it is."""
        old, self.current = self.current, version
        self.inodes.renew()
        self._versions, self._filled = {}, ()
        for directory in self._directories.values():
            directory.old = True
        old.retire()
        old.users += 1
        self._retired.append(old)
        self.leave(old)

    def _read_old(self, version: Version) -> None:
        """An older version is read: it may keep blocks; of more than _ROOMY, the one read longest ago no more."""
        if version.roomy:
            self._roomy.remove(version)
        else:
            version.give_room(True)
        self._roomy.append(version)
        if len(self._roomy) > _ROOMY:
            self._roomy.pop(0).give_room(False)

    def leave(self, version: Version) -> None:
        """A request is answered, or a handle closed: a version that was shown before may be in use no more."""
        version.users -= 1
        if version.retired and not version.users and self.background is not None:
            self.background.start_soon(self._close, version)

    def begin(self, version: Version, work: Callable[[], Awaitable[None]]) -> None:
        """Start `work` in the background, which uses `version` until it has ended."""
        if self.background is not None:
            version.users += 1
            self.background.start_soon(self._within, version, work)

    async def _within(self, version: Version, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        finally:
            self.leave(version)

    async def _close(self, version: Version) -> None:
        if version.closed:
            return
        if version in self._roomy:
            self._roomy.remove(version)
        try:
            await version.aclose()
        except Exception as exc:  # of a source that is shown no more: the mount goes on
            log.warning("closing an older version: %s", exc)
        self._counted.add(version.stats())
        self._retired.remove(version)

    async def _info(self, key: str, sized: bool = True) -> Info:
        """As Store.info, of the version that is shown when this returns."""
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
    def _version_of(self, inode: int) -> Iterator[Version]:
        """The version that an inode is of, in use meanwhile: who has it open may close it.

        ESTALE for an older one that nobody has open: look its name up again.
        """
        version = self._found_version(inode)
        version.users += 1
        try:
            yield version
        finally:
            self.leave(version)

    def _found_version(self, inode: int) -> Version:
        if not self.inodes.is_old(inode):
            return self.current
        for file in self._files.values():
            if file.inode == inode and file.version is not None:
                return file.version
        raise pyfuse3.FUSEError(errno.ESTALE)

    # -- handles

    def _handle(self, table: dict[int, T], value: T) -> FileHandleT:
        number, self._next_handle = self._next_handle, self._next_handle + 1
        table[number] = value
        return FileHandleT(number)

    def _released(self, file: OpenFile) -> None:
        if file.value is not None:
            if file.descriptor == file.value.fileno():
                file.descriptor = None
            file.value.close()
        if file.descriptor is not None:
            os.close(file.descriptor)
        if file.version is not None:
            self.leave(file.version)
