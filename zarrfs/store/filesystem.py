"""FileSystemStore: the native store of the Zarr v3 specification, and file: URIs.

Source: Zarr v3, "File system store" 1.0 (key translation, the operations, canonical URI); RFC 8089.

Where the specification is silent: a symbolic link is a key of its own (info and listings show the link), get
follows it as long as it stays in the base directory, set and delete replace and remove the link itself;
fifos, sockets and devices are no keys; names that are not UTF-8 are read with surrogateescape.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.errors import (
    AccessDenied,
    InvalidKey,
    IsDirectory,
    NameTooLong,
    NotDirectory,
    NotFound,
    ReadError,
    ReadOnly,
    SourceError,
    StoreError,
    TargetMissing,
)
from zarrfs.store.api import Buffer, Info, Kind, Usage, check_key, join_key, split_key
from zarrfs.store.beneath import BaseDirectory
from zarrfs.store.staging import RESERVED, Staging
from zarrfs.store.uri import file_uri
from zarrfs.transfer.local import read_file

if TYPE_CHECKING:
    from zarrfs.store.indexentries import Entry

log = logging.getLogger("zarrfs.store")

_PAGE = 1000  # entries looked at in one visit to a worker thread
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_ITSELF = os.O_PATH | os.O_NOFOLLOW
_ANSWERS: dict[int, type[StoreError]] = {
    errno.ENOENT: NotFound,
    errno.ENXIO: NotFound,  # a socket, which is no key
    errno.ENOTDIR: NotDirectory,
    errno.EISDIR: IsDirectory,
    errno.ENAMETOOLONG: NameTooLong,
    errno.EROFS: ReadOnly,
}


class FileSystemStore:
    """Keys are the files below the directory `path`; a WritableStore.

    `fsync`: set() returns only when the value is on the disk. Values appear by rename, so that a reader, or
    a crash, sees the old value or the new one. Raises SourceError where `path` is no directory.
    """

    immutable = False

    def __init__(self, path: str, fsync: bool = False) -> None:
        self.path = os.path.abspath(path)
        self._fsync = fsync
        self._parent_flags = _DIRECTORY if fsync else os.O_PATH | os.O_DIRECTORY
        try:
            self._base = BaseDirectory(path)
        except OSError as exc:
            raise SourceError(path, (exc.strerror or str(exc)).lower()) from exc
        self._staging: Staging | None = None

    @property
    def uri(self) -> str:
        """The canonical URI of the store."""
        return file_uri(self.path)

    # -- reading

    async def info(self, key: str, sized: bool = True) -> Info:
        path = _path_of_key(key, root=True)
        with _answers(key):
            try:
                found = self._look(key, path, cached=True)
            except BlockingIOError:
                found = await trio.to_thread.run_sync(self._look, key, path)
        if found is None:
            raise NotFound(key)
        return found

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        descriptor = await self.open_value(key)
        try:
            with _answers(key):
                size = os.fstat(descriptor).st_size
                stop = size if length is None else min(size, start + length)
                return await read_file(descriptor, start, stop - start) if start < stop else b""
        finally:
            os.close(descriptor)

    async def open_value(self, key: str) -> int:
        """As DescriptorStore.open_value."""
        path = _path_of_key(key, root=True)
        with _answers(key):
            try:
                return self._open_value(key, path, cached=True)
            except BlockingIOError:
                return await trio.to_thread.run_sync(self._open_value, key, path)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        path = _path_of_key(prefix, root=True)
        with _answers(prefix):
            directory, names = await trio.to_thread.run_sync(self._open_directory, path, after)
        try:
            for at in range(0, len(names), _PAGE):
                with _answers(prefix):
                    page = await trio.to_thread.run_sync(_look_at, directory, names[at : at + _PAGE], prefix)
                for info in page:
                    yield info
        finally:
            os.close(directory)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """As LocalStore.entries."""
        with _answers(prefix):
            directory, names = self._open_directory(_path_of_key(prefix, root=True), "")
        try:
            for at in range(0, len(names), _PAGE):
                with _answers(prefix):
                    page = _look_at(directory, names[at : at + _PAGE], prefix)
                for name, kind, size, mode, mtime_ns, target, held, *_ in page:
                    yield name, kind.value, size, mode, mtime_ns, held, target, None
        finally:
            os.close(directory)

    def open_file(self, key: str) -> int:
        """As LocalStore.open_file."""
        with _answers(key):
            return self._open_value(key, _path_of_key(key, root=True))

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        with _answers(prefix):
            path = _path_of_key(prefix, root=True)
            first = await trio.to_thread.run_sync(self._children, path)
        stack = [(prefix, iter(first))]
        while stack:
            directory, children = stack[-1]
            for name, below in children:
                key = join_key(directory, name)
                if not below:
                    yield key
                    continue
                try:
                    with _answers(key):
                        found = await trio.to_thread.run_sync(self._children, os.fsencode(key))
                except (NotFound, NotDirectory):
                    continue  # removed since its parent was listed
                stack.append((key, iter(found)))
                break
            else:
                stack.pop()

    async def locate(self, key: str) -> dict[str, Any]:
        info = await self.info(key)
        if info.kind is Kind.DIRECTORY:
            return {}
        return {"url": file_uri(os.path.join(self.path, key))}

    async def usage(self) -> Usage:
        """That of the file system that the base directory is on."""
        with _answers(""):
            status = await trio.to_thread.run_sync(os.fstatvfs, self._base.descriptor)
        unit = status.f_frsize
        return Usage(status.f_blocks * unit, status.f_files, status.f_bavail * unit, status.f_favail)

    # -- writing

    async def set(self, key: str, value: Buffer) -> None:
        """Store `value`, making the directories above it. IsDirectory, NotDirectory, AccessDenied, ...

        OSError for what is nobody's answer: a full disk, a quota, an input/output error.
        """
        path = _path_of_key(key)
        with _answers(key, writing=True):
            await trio.to_thread.run_sync(self._set, path, value)

    async def delete(self, key: str) -> None:
        """Remove a file, a link, or a directory with all below it; NotFound. Parents stay."""
        path = _path_of_key(key)
        with _answers(key, writing=True):
            await trio.to_thread.run_sync(self._delete, path)

    async def aclose(self) -> None:
        if self._staging is not None:
            await trio.to_thread.run_sync(self._staging.close)
        self._base.close()

    # -- in a worker thread, or where the kernel has it cached

    def _look(self, key: str, path: bytes, cached: bool = False) -> Info | None:
        descriptor = self._base.open(path, _ITSELF, cached)
        try:
            status = os.fstat(descriptor)
            target = os.readlink(b"", dir_fd=descriptor) if stat.S_ISLNK(status.st_mode) else None
        finally:
            os.close(descriptor)
        return _info(split_key(key)[1], status, target)

    def _open_value(self, key: str, path: bytes, cached: bool = False) -> int:
        """The descriptor of a regular file, through links."""
        try:
            descriptor = self._base.open(path, os.O_RDONLY, cached)
        except FileNotFoundError:
            if self._is_link(path):
                raise TargetMissing(key, "is a symbolic link that leads nowhere") from None
            raise
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return descriptor
        os.close(descriptor)
        raise IsDirectory(key) if stat.S_ISDIR(status.st_mode) else NotFound(key)

    def _is_link(self, path: bytes) -> bool:
        with contextlib.suppress(OSError):
            descriptor = self._base.open(path, _ITSELF)
            try:
                return stat.S_ISLNK(os.fstat(descriptor).st_mode)
            finally:
                os.close(descriptor)
        return False

    def _open_directory(self, path: bytes, after: str) -> tuple[int, list[str]]:
        """(descriptor, sorted names greater than `after`) of a directory."""
        directory = self._base.open(path, _DIRECTORY)
        try:
            names = [name for name in os.listdir(directory) if name > after and not _reserved(name)]
        except BaseException:
            os.close(directory)
            raise
        names.sort()
        return directory, names

    def _children(self, path: bytes) -> list[tuple[str, bool]]:
        """(name, whether it is a directory) of the keys in a directory, sorted."""
        directory = self._base.open(path, _DIRECTORY)
        try:
            with os.scandir(directory) as entries:
                found = [
                    (entry.name, entry.is_dir(follow_symlinks=False))
                    for entry in entries
                    if not _reserved(entry.name) and _is_key(entry)
                ]
        finally:
            os.close(directory)
        found.sort()
        return found

    def _set(self, path: bytes, value: Buffer) -> None:
        parent_path, _, name = path.rpartition(b"/")
        parent = self._parent(parent_path)
        try:
            try:
                self._replace(parent, name, value, near=None)
            except OSError as exc:
                if exc.errno != errno.EXDEV:
                    raise
                self._replace(parent, name, value, near=parent)  # another file system is mounted there
            if self._fsync:
                os.fsync(parent)
        finally:
            os.close(parent)

    def _replace(self, parent: int, name: bytes, value: Buffer, near: int | None) -> None:
        try:
            old = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            old = 0
        if stat.S_ISDIR(old):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(name))
        staged = self._stage().create(near, 0o666)
        try:
            if stat.S_ISREG(old):  # a value that others may not read stays so
                os.fchmod(staged.descriptor, stat.S_IMODE(old))
            view = memoryview(value).cast("B")
            while view:
                view = view[os.write(staged.descriptor, view) :]
            if self._fsync:
                os.fsync(staged.descriptor)
            staged.place(parent, name)
        finally:
            staged.discard()

    def _delete(self, path: bytes) -> None:
        parent_path, _, name = path.rpartition(b"/")
        parent = self._base.open(parent_path, self._parent_flags)
        try:
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                self._stage().remove_tree(parent, name)
            else:
                os.unlink(name, dir_fd=parent)
            if self._fsync:
                os.fsync(parent)
        finally:
            os.close(parent)

    def _parent(self, path: bytes) -> int:
        """A descriptor of the directory `path`, made with its parents where it is missing."""
        try:
            return self._base.open(path, self._parent_flags)
        except FileNotFoundError:
            if not path:
                raise
        above, _, name = path.rpartition(b"/")
        parent = self._parent(above)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            if self._fsync:
                os.fsync(parent)
        finally:
            os.close(parent)
        return self._base.open(path, self._parent_flags)

    def _stage(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self._base.descriptor)
        return self._staging


def _path_of_key(key: str, root: bool = False) -> bytes:
    """Key to path, relative to the base directory; a key has no other form, so the reverse is os.fsdecode."""
    check_key(key, root)
    if RESERVED in key and any(_reserved(name) for name in key.split("/")):
        if root:
            raise NotFound(key)
        raise InvalidKey(key, f"not a key: {RESERVED} is a reserved name")
    try:
        return os.fsencode(key)
    except UnicodeEncodeError:
        raise InvalidKey(key, "not a key: a lone surrogate") from None


def _reserved(name: str) -> bool:
    return name.startswith(RESERVED)


def _is_key(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink():
        return True
    log.debug("%s: neither a file nor a directory nor a link: not listed", entry.name)
    return False


def _look_at(directory: int, names: list[str], prefix: str) -> list[Info]:
    """What there is under `names` in an open directory; names that have vanished are left out."""
    found = []
    for name in names:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            link = stat.S_ISLNK(status.st_mode)
            info = _info(name, status, os.readlink(os.fsencode(name), dir_fd=directory) if link else None)
        except FileNotFoundError:
            continue
        except OSError as exc:
            if exc.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
                raise
            info = Info(name, Kind.DIRECTORY, 0)  # a mount that has lost its daemon: who enters it is told, no other
        if info is None:
            log.debug("%s: neither a file nor a directory nor a link: not listed", join_key(prefix, name))
        else:
            found.append(info)
    return found


def _info(name: str, status: os.stat_result, target: bytes | None) -> Info | None:
    """The Info of a file, directory or link; None for what is no key."""
    mode, size = stat.S_IMODE(status.st_mode), status.st_size
    if stat.S_ISREG(status.st_mode):
        held = status.st_blocks * 512
        allocated = held if held < size else None
        return Info(
            name, Kind.FILE, size, mode, status.st_mtime_ns, None, allocated, status.st_nlink, status.st_ino
        )
    if stat.S_ISDIR(status.st_mode):
        return Info(name, Kind.DIRECTORY, 0, mode, status.st_mtime_ns, links=status.st_nlink)
    if target is not None:
        text = os.fsdecode(target)
        return Info(name, Kind.SYMLINK, size, mode, status.st_mtime_ns, text, links=status.st_nlink)
    return None


@contextlib.contextmanager
def _answers(key: str, writing: bool = False) -> Iterator[None]:
    """Turns an OSError into the answer or failure that it is. A full disk and the like stay as they are."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as exc:
        code = exc.errno or errno.EIO
        reason = (exc.strerror or str(exc)).lower()
        if code in _ANSWERS:
            raise _ANSWERS[code](key) from exc
        if code == errno.EXDEV:
            raise AccessDenied(key, "a symbolic link leads out of the store") from exc
        if code in (errno.EACCES, errno.EPERM):
            raise AccessDenied(key, reason) from exc
        if writing:
            raise
        failure = ReadError(key, reason)
        if code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # ours, and it may pass
            failure.errno = code
        raise failure from exc
