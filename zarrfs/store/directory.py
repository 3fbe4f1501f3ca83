"""FileSystemStore: the native store of the Zarr v3 specification, and file: URIs.

Source: Zarr v3, "File system store" 1.0 (key translation, the operations, canonical URI); RFC 8089.

Where the specification is silent: a symbolic link is shown as a link or as its target (see Links); get follows it,
out of the base directory only to allowed directories; set replaces, and delete removes, the link itself. A FIFO,
socket or device is a key whose value cannot be read, and is never opened. Names that are not UTF-8 are decoded with
surrogateescape.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import trio

from zarrfs.errors import (
    AccessDenied,
    InvalidKey,
    IsDirectory,
    NameTooLong,
    NotDirectory,
    NotFound,
    ReadError,
    SourceError,
    StoreError,
    TargetMissing,
    reason_of,
)
from zarrfs.store.api import (
    Info,
    Kind,
    Usage,
    Value,
    WritableStore,
    check_key,
    join_key,
    split_key,
)
from zarrfs.store.uri import file_uri
from zarrfs.store.values import FileValue
from zarrfs.store.writing import RESERVED, NewFile, place_below, remove_below
from zarrfs.system.beneath import BaseDirectory, open_cached, reopen
from zarrfs.system.buffers import Buffer, write_all

_PAGE = 1000  # entries for each call in a worker thread
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_ITSELF = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
FIFO = "is a FIFO, which is not opened"  # Info.unreadable of a FIFO
_LEADS_BACK = "leads to a directory that it lies in"
_ANSWERS: dict[int, type[StoreError]] = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotDirectory,
    errno.EISDIR: IsDirectory,
    errno.ENAMETOOLONG: NameTooLong,
}


class Links(enum.Enum):
    """The way in which a store shows symbolic links."""

    KEEP = "keep"  # as links
    FOLLOW = "follow"  # as their targets; a dangling link as an unreadable file
    FOLLOW_OUT = "follow out"  # links out of the base directory as FOLLOW, the others as KEEP


class FileSystemStore(WritableStore):
    """A store of the files below the directory `path`.

    `allowed`: real paths of directories outside of the base directory that links may lead to. Raise SourceError if
    `path` is no directory.
    """

    immutable = False
    sizes_known = True

    def __init__(self, path: str, links: Links = Links.KEEP, allowed: Sequence[str] = ()) -> None:
        self.path = os.path.abspath(path)
        self._links, self._allowed = links, allowed
        self.has_links = links is not Links.FOLLOW
        try:
            self._base = BaseDirectory(path)
        except OSError as exc:
            raise SourceError(path, reason_of(exc)) from exc

    async def info(self, key: str, sized: bool = True) -> Info:
        path = _path_of_key(key)
        with answers(key):
            found = self._look_cached(key, path)
            return await trio.to_thread.run_sync(self._look, key, path) if found is None else found

    async def open(self, key: str) -> Value:
        path = _path_of_key(key)
        with answers(key):
            descriptor = self._open_cached(path)
            if descriptor is None:
                descriptor = await trio.to_thread.run_sync(self._open_value, key, path)
            return _LocalValue(key, descriptor)

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        path = _path_of_key(prefix)
        with answers(prefix):
            directory, names = await trio.to_thread.run_sync(self._open_directory, path, after)
        try:
            for at in range(0, len(names), _PAGE):
                with answers(prefix):
                    page = await trio.to_thread.run_sync(self._look_at, directory, names[at : at + _PAGE], prefix)
                for info in page:
                    yield info
        finally:
            os.close(directory)

    def open_file(self, key: str) -> int:
        """Open a value in any thread; the caller closes the descriptor. Raise StoreError or ReadError."""
        path = _path_of_key(key)
        with answers(key):
            return self._open_value(key, path)

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        info = await self.info(key)
        if info.kind is Kind.DIRECTORY:
            return {}
        path = os.path.join(self.path, key)
        return {"url": file_uri(path) if shown else path}

    async def usage(self) -> Usage:
        """Return the usage of the file system that holds the base directory."""
        with answers(""):
            status = await trio.to_thread.run_sync(os.fstatvfs, self._base.descriptor)
        unit = status.f_frsize
        return Usage(status.f_blocks * unit, status.f_files, status.f_bavail * unit, status.f_favail)

    async def set(self, key: str, value: Buffer, mode: int | None = None) -> None:
        """Store a value; see WritableStore. `mode`: permission bits of a new file; else the umask decides."""
        path = _path_of_key(check_key(key))
        with writing(key):
            await trio.to_thread.run_sync(self._set, path, value, mode)

    async def delete(self, key: str) -> None:
        path = _path_of_key(check_key(key))
        with writing(key):
            await trio.to_thread.run_sync(remove_below, self._base, path)

    def _set(self, path: bytes, value: Buffer, mode: int | None) -> None:
        with contextlib.closing(NewFile(self._base.descriptor)) as new:
            if mode is not None:
                os.fchmod(new.descriptor, mode)
            write_all(new.descriptor, value, 0)
            place_below(new, self._base, path)

    def close(self) -> None:
        """Close the base directory."""
        self._base.close()

    async def aclose(self) -> None:
        self.close()

    # -- on the event loop: None means that it takes a worker thread

    def _look_cached(self, key: str, path: bytes) -> Info | None:
        """Stat an entry, if the dentry cache has it; not the target of every link. Raise OSError if it is absent."""
        try:
            status, target = _stat_and_close(self._base.find(path, self._allowed, nofollow=True, cached=True))
            followed = target is not None and self._links is not Links.KEEP
            if target is not None and self._links is Links.FOLLOW:
                status, target = _stat_and_close(self._base.find(path, self._allowed, cached=True))
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR) and self._is_below_no_link(path):
                raise
            return None
        if followed and (target is not None or stat.S_ISDIR(status.st_mode)):
            return None
        return info_of(split_key(key)[1], status, target)

    def _is_below_no_link(self, path: bytes) -> bool:
        """Return whether the dentry cache shows that `path` is absent, and not because of a link above it."""
        try:
            os.close(open_cached(os.fsdecode(path), _ITSELF, self._base.descriptor))
        except OSError as exc:
            return exc.errno in (errno.ENOENT, errno.ENOTDIR)
        return False

    def _open_cached(self, path: bytes) -> int | None:
        """Open a regular file, if the dentry cache has it."""
        try:
            found = self._base.find(path, self._allowed, cached=True)
            try:
                return reopen(found, os.O_RDONLY) if stat.S_ISREG(os.fstat(found).st_mode) else None
            finally:
                os.close(found)
        except OSError:
            return None

    # -- in a worker thread

    def _look(self, key: str, path: bytes) -> Info:
        try:
            descriptor = self._base.find(path, self._allowed, nofollow=True)
        except (FileNotFoundError, NotADirectoryError):
            self._check_parents(path)
            raise
        status, target = _stat_and_close(descriptor)
        name = split_key(key)[1]
        if target is not None and self._links is not Links.KEEP:
            return self._follow(name, path, status, target)
        return info_of(name, status, target)

    def _follow(self, name: str, path: bytes, link: os.stat_result, target: bytes) -> Info:
        """Stat the target of a link, or the link itself if it is shown as one."""
        try:
            if self._links is Links.FOLLOW_OUT and self._stays(path):
                return info_of(name, link, target)
            descriptor = self._base.find(path, self._allowed)
            try:
                status = os.fstat(descriptor)
                if stat.S_ISDIR(status.st_mode) and self._is_above(status, path):
                    raise OSError(errno.ELOOP, _LEADS_BACK)
            finally:
                os.close(descriptor)
        except OSError as exc:
            return _unreadable(name, link, _why_not_followed(target, exc), len(target))
        return info_of(name, status, None)

    def _stays(self, path: bytes) -> bool:
        """Return whether a link stays in the base directory, dangling or not."""
        try:
            os.close(self._base.open(path, os.O_PATH))
        except OSError as exc:
            return exc.errno != errno.EXDEV
        return True

    def _is_above(self, directory: os.stat_result, path: bytes) -> bool:
        """Return whether a directory is an ancestor of `path`, so that a walk into it would never end."""
        while path:
            path = path.rpartition(b"/")[0]
            descriptor = self._base.find(path, self._allowed)
            try:
                if os.path.samestat(directory, os.fstat(descriptor)):
                    return True
            finally:
                os.close(descriptor)
        return False

    def _open_value(self, key: str, path: bytes) -> int:
        """Open a regular file, following links. Other kinds are never opened: opening a FIFO has side effects."""
        try:
            found = self._base.find(path, self._allowed)
        except OSError as exc:
            with contextlib.suppress(OSError):
                if (target := self._target_of_link(path)) is not None:
                    failure = TargetMissing if exc.errno == errno.ENOENT else ReadError
                    raise failure(key, _why_not_followed(target, exc)) from exc
            if exc.errno in (errno.ENOENT, errno.ENOTDIR):
                self._check_parents(path)
            raise
        try:
            status = os.fstat(found)
            if stat.S_ISREG(status.st_mode):
                return reopen(found, os.O_RDONLY, wait=True)
        finally:
            os.close(found)
        if stat.S_ISDIR(status.st_mode):
            if self._links is not Links.KEEP and self._is_above(status, path):
                raise ReadError(key, f"is a symbolic link that {_LEADS_BACK}")
            raise IsDirectory(key)
        raise ReadError(key, not_opened(status))

    def _check_base(self) -> None:
        """Raise ReadError if the base directory was removed, because then every name in it would seem absent."""
        status = os.fstat(self._base.descriptor)
        if status.st_nlink:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(status, os.stat(self.path)):  # some FUSE file systems report no link count
                return
        raise ReadError(self.path, "was removed, or replaced by another directory, since it was opened: open it anew")

    def _check_parents(self, path: bytes) -> None:
        """Raise ReadError if a name is absent because a link above it cannot be followed, or the base was removed."""
        self._check_base()
        while b"/" in path:
            path = path.rpartition(b"/")[0]
            try:
                target = self._target_of_link(path)
                if target is None:
                    return
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return  # the error of the name itself is more specific
            try:
                os.close(self._base.find(path, self._allowed))
            except OSError as exc:
                raise ReadError(os.fsdecode(path), _why_not_followed(target, exc)) from exc
            return

    def _target_of_link(self, path: bytes) -> bytes | None:
        """Return the target of a symbolic link; None for other kinds of entries. Raise OSError."""
        return _stat_and_close(self._base.find(path, self._allowed, nofollow=True))[1]

    def _look_at(self, directory: int, names: list[str], prefix: str) -> list[Info]:
        """Stat `names` in an open directory; leave out names that have vanished.

        One that cannot be examined has the type that the directory gives, and an error for its own readers.
        """
        found = []
        for name in names:
            try:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                target = None
                if stat.S_ISLNK(status.st_mode):
                    target = os.readlink(os.fsencode(name), dir_fd=directory)
            except FileNotFoundError:
                continue
            except OSError as exc:  # such as the mount point of a daemon that has died, or of another user
                with os.scandir(directory) as entries:
                    above = any(entry.name == name and entry.is_dir(follow_symlinks=False) for entry in entries)
                why = reason_of(exc)
                found.append(Info(name, Kind.DIRECTORY) if above else Info(name, Kind.FILE, 1, unreadable=why))
                continue
            if target is None or self._links is Links.KEEP:
                found.append(info_of(name, status, target))
            else:
                found.append(self._follow(name, os.fsencode(join_key(prefix, name)), status, target))
        return found

    def _open_directory(self, path: bytes, after: str) -> tuple[int, list[str]]:
        """Open a directory; return (descriptor, sorted names greater than `after`)."""
        directory = self._open_listed(path)
        try:
            return directory, sorted(name for name in os.listdir(directory) if name > after and not _reserved(name))
        except BaseException:
            os.close(directory)
            raise

    def _open_listed(self, path: bytes) -> int:
        """Open the directory `path` for listing."""
        self._check_base()
        try:
            return self._base.open(path, _DIRECTORY)
        except OSError as exc:
            if exc.errno not in (errno.EXDEV, errno.ENOENT, errno.ENOTDIR):
                raise
        try:
            found = self._base.find(path, self._allowed)
        except (FileNotFoundError, NotADirectoryError):
            self._check_parents(path + b"/.")
            raise
        try:
            return os.open(b".", _DIRECTORY | os.O_CLOEXEC, dir_fd=found)
        finally:
            os.close(found)


def _path_of_key(key: str) -> bytes:
    """Return the path of a key, relative to the base directory; os.fsdecode() is the inverse."""
    check_key(key, root=True)
    if RESERVED in key and any(_reserved(name) for name in key.split("/")):
        raise NotFound(key)
    try:
        return os.fsencode(key)
    except UnicodeEncodeError:
        raise InvalidKey(key, "not a key: a lone surrogate") from None


def _stat_and_close(descriptor: int) -> tuple[os.stat_result, bytes | None]:
    """Return (status, target of a symbolic link) for an O_PATH descriptor, and close it."""
    try:
        status = os.fstat(descriptor)
        return status, os.readlink(b"", dir_fd=descriptor) if stat.S_ISLNK(status.st_mode) else None
    finally:
        os.close(descriptor)


def _reserved(name: str) -> bool:
    return name.startswith(RESERVED)


def _identity(status: os.stat_result) -> int:
    """Hash st_ino and st_dev of a file: files of two file systems, such as snapshots, may have the same st_ino."""
    return (status.st_ino + status.st_dev * 0x9E3779B97F4A7C15) & (1 << 64) - 1


def info_of(name: str, status: os.stat_result, target: bytes | None) -> Info:
    """Return the entry of a file, a directory, a link to `target`, or of an unreadable special file."""
    mode, size = stat.S_IMODE(status.st_mode), status.st_size
    if stat.S_ISREG(status.st_mode):
        held = status.st_blocks * 512
        allocated = held if held < size else None
        return Info(
            name, Kind.FILE, size, mode, status.st_mtime_ns, None, allocated, status.st_nlink, _identity(status)
        )
    if stat.S_ISDIR(status.st_mode):
        return Info(name, Kind.DIRECTORY, 0, mode, status.st_mtime_ns, links=status.st_nlink)
    if target is not None:
        text = os.fsdecode(target)
        return Info(name, Kind.SYMLINK, size, mode, status.st_mtime_ns, text, links=status.st_nlink)
    found = _unreadable(name, status, not_opened(status))
    return found._replace(mode=mode) if stat.S_ISFIFO(status.st_mode) else found


def _unreadable(name: str, status: os.stat_result, why: str, size: int = 1) -> Info:
    """Return the entry of an unreadable file, which is listed as a regular one.

    Its size is not 0, because tar(1) stores an empty file without opening it, and so would not report the error.
    """
    return Info(name, Kind.FILE, max(size, 1), 0o444, status.st_mtime_ns, identity=_identity(status), unreadable=why)


def not_opened(status: os.stat_result) -> str:
    """Return the reason why a FIFO, socket or device cannot be read."""
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return f"is {kinds.get(stat.S_IFMT(status.st_mode), 'no regular file')}, which is not opened"


def _why_not_followed(target: bytes, exc: OSError) -> str:
    """Return the reason why a link cannot be followed, with a remedy if there is one."""
    text = os.fsdecode(target)
    if exc.errno == errno.ENOENT:
        fetched = " (git annex get fetches it)" if ".git/annex/objects/" in text else ""
        return f"is a symbolic link to {text}, which is not there{fetched}"
    return f"is a symbolic link to {text}: {exc.strerror or exc}"


@contextlib.contextmanager
def answers(key: str) -> Iterator[None]:
    """Turn an OSError into the matching StoreError or ReadError."""
    try:
        yield
    except OSError as exc:
        code = exc.errno or errno.EIO
        reason = reason_of(exc)
        if code in _ANSWERS:
            raise _ANSWERS[code](key) from exc
        if code == errno.EXDEV:
            raise ReadError(key, f"lies behind a symbolic link that {exc.strerror}") from exc
        if code in (errno.EACCES, errno.EPERM):
            raise AccessDenied(key, reason) from exc
        unreadable = ReadError(key, reason)
        if code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # a lack of resources, perhaps temporary: not EIO
            unreadable.errno = code
        raise unreadable from exc


@contextlib.contextmanager
def writing(key: str) -> Iterator[None]:
    """Turn an OSError into the StoreError that it is an answer for; others, such as of a full disk, name the key."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _ANSWERS:
            raise _ANSWERS[exc.errno](key) from exc
        raise OSError(exc.errno, exc.strerror, key) from exc


class _LocalValue(FileValue):
    __slots__ = ("_key",)

    def __init__(self, key: str, descriptor: int) -> None:
        super().__init__(descriptor, lambda status: info_of(split_key(key)[1], status, None))
        self._key = key

    async def read(self, start: int, length: int) -> Buffer:
        with answers(self._key):
            return await super().read(start, length)
