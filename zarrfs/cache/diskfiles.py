"""The files of the disk cache: their names, their permissions, and how they are opened.

    cache_dir/zarrfs-blocks-2/          LAYOUT; directories of other versions have other names and are not used
      index                             the place of every block (diskindex.py); locks are on bytes of this file
      8c1f09a2b4d7e653.segment          blocks, one after the other; only its end ever changes
    cache_dir/blobs/sha1-9f3c...        a blob of an archive (RFC 10), as in a directory of blobs: without a header
    cache_dir/blobs/.zarrfs-cache       a mark: zarrfs has made this directory; any other one is left alone

Nothing here follows a symbolic link below the cache directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator

from zarrfs.system.beneath import is_local, is_shared, open_cached

LAYOUT = "zarrfs-blocks-2"
OLD_LAYOUTS = ("zarrfs-blocks-1",)  # a file for each block
INDEX = "index"
_READ_ONLY = "index, read-only"  # a key of Layout._open, not the name of a file
SEGMENT = re.compile(r"[0-9a-f]{16}\.segment")
BLOB = re.compile(r"sha1-[0-9a-f]{40}|sha256-[0-9a-f]{64}")
BLOBS = "../blobs"  # from LAYOUT
BLOBS_MARK = ".zarrfs-cache"
TEMPORARY = re.compile(r"\..*\.tmp")
_SLOW = 0.25  # seconds: if an open takes longer, only threads open files from then on
TOUCH = 60.0  # seconds: the precision of the time at which a file was last used

_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # O_NONBLOCK: do not wait at a FIFO
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def hash_of(*parts: str | int) -> bytes:
    """Return a hash of `parts`, in this order; 16 bytes."""
    text = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else b"%d" % part for part in parts]
    return hashlib.blake2b(b"".join(b"%d:%s" % (len(part), part) for part in text), digest_size=16).digest()


def is_removed(file: int) -> bool:
    """Return whether an open file or directory was removed. On NFS, one that another node has removed is stale."""
    try:
        return not os.fstat(file).st_nlink
    except OSError as exc:
        if exc.errno != errno.ESTALE:
            raise
        return True


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"{number:016x}.segment"


class Handle(int):
    """A descriptor that is closed when no reference to it is left, so never while a thread uses it.

    As the argument of a call it stays open until the call returns, even if Layout.forget() runs in another thread.
    """

    __slots__ = ()

    def __del__(self) -> None:
        os.close(self)


def make_private_directory(path: str) -> None:
    """Create a directory with mode 0700, and missing ones above it with mode 0755, which os.makedirs() cannot set."""
    path = os.path.abspath(path)
    missing, above = [path], os.path.dirname(path)
    while not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, 0o700 if place == path else 0o755)


class Layout:
    """The directory LAYOUT in a cache directory, that of blobs, and the index, each kept open after its first use.

    Methods raise OSError: FileNotFoundError if a file or directory does not exist yet; PermissionError for a
    directory private to another user, because root would trust data that this user can change.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._open: dict[str, Handle] = {}  # by name; "" is LAYOUT itself
        self._mode = 0o700  # of directories: the users who may write to the cache directory may also write below it
        self.local = False  # on a file system that never waits for a server
        self.shared = True  # with other nodes, which see written data only after a sync
        self._scratch = f".{secrets.token_hex(6)}"
        self._numbers = itertools.count()

    def folder(self, name: str = "", make: bool = False) -> Handle:
        """Return the open directory LAYOUT or BLOBS; with `make`, create a missing one."""
        found = self._open.get(name)
        if found is None:
            found = self._open_blobs(make) if name else self._open_root(make)
            found = self._open.setdefault(name, found)  # another thread may have opened it meanwhile
        return found

    def index(self, make: bool = False) -> Handle:
        """Return the index, open for reading and writing; without `make`, only for reading if writing is refused."""
        found = self._open.get(INDEX)
        if found is not None:
            return found
        try:
            return self._open.setdefault(INDEX, self._open_index(os.O_RDWR | (os.O_CREAT if make else 0), make))
        except OSError as exc:
            if make or exc.errno not in (errno.EROFS, errno.EACCES):
                raise
        found = self._open.get(_READ_ONLY)
        return found or self._open.setdefault(_READ_ONLY, self._open_index(os.O_RDONLY))

    def is_gone(self) -> bool:
        """Return whether an open file or directory was removed. If so, forget all open ones."""
        if not any(is_removed(handle) for handle in list(self._open.values())):
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Forget the open descriptors; they are opened again when needed."""
        self._open = {}

    def open(self, folder: str, name: str, flags: int, make: bool = False) -> int:
        """Return a descriptor of the file `name`; a new file gets the mode that belongs to its directory."""
        directory = self.folder(folder, make)
        fd = os.open(name, flags | _FILE, self._mode & 0o600, dir_fd=directory)
        if flags & os.O_CREAT and self._mode & 0o077:
            with contextlib.suppress(PermissionError):  # another user has created it
                os.fchmod(fd, self._mode & 0o666)
        return fd

    def open_now(self, name: str) -> int:
        """Open a file in LAYOUT for reading. Raise BlockingIOError if that would wait."""
        root = self._open.get("")
        if root is None or not self.local:
            raise BlockingIOError(errno.EAGAIN, "may have to wait for a server")
        began = time.monotonic()
        try:
            return open_cached(name, os.O_RDONLY | _FILE, root)
        finally:  # a virus scanner, for example, may delay each open
            self.local = time.monotonic() - began < _SLOW

    def scratch(self) -> str:
        """Return a name for a file that is being written."""
        return f"{self._scratch}{next(self._numbers):x}.tmp"

    def touch(self, folder: str, name: str) -> None:
        """Mark a file as used now."""
        os.utime(name, dir_fd=self.folder(folder), follow_symlinks=False)

    def remove(self, folder: str, name: str) -> bool:
        """Remove a file, or an empty directory in its place. Return False if that fails; never raise."""
        try:
            try:
                os.unlink(name, dir_fd=self.folder(folder))
            except IsADirectoryError:
                os.rmdir(name, dir_fd=self.folder(folder))
        except OSError:
            return False
        return True

    def entries(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield (name, lstat) of a directory as ".", and of its entries, except those removed meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            directory = self.folder(folder)  # a directory of blobs only if zarrfs has made it
            own = Handle(os.open(".", _DIRECTORY, dir_fd=directory))  # a descriptor with its own offset
            yield ".", os.fstat(own)
            with os.scandir(own) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.name, entry.stat(follow_symlinks=False)

    def segments(self) -> Iterator[tuple[int, os.stat_result]]:
        """Yield (number, lstat) of every segment."""
        for name, status in self.entries(""):
            if SEGMENT.fullmatch(name):
                yield int(name[:16], 16), status

    def blobs(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield (name, lstat) of every blob."""
        for name, status in self.entries(BLOBS):
            if BLOB.fullmatch(name):
                yield name, status

    def old(self) -> list[str]:
        """Return the names of the directories of earlier layouts in the cache directory."""
        return [name for name in OLD_LAYOUTS if os.path.isdir(os.path.join(self.directory, name))]

    def _open_index(self, flags: int, make: bool = False) -> Handle:
        found = Handle(self.open("", INDEX, flags, make))
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "the index is not a file")
        return found

    def _open_root(self, make: bool) -> Handle:
        path = os.path.join(self.directory, LAYOUT)
        try:
            root = Handle(os.open(path, _DIRECTORY))
        except FileNotFoundError:
            if not make:
                raise
            make_private_directory(self.directory)
            shared = os.stat(self.directory).st_mode
            mode = 0o700 | (0o070 if shared & stat.S_IWGRP else 0) | (0o007 if shared & stat.S_IWOTH else 0)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode)
                _set_mode(Handle(os.open(path, _DIRECTORY)), mode)
            root = Handle(os.open(path, _DIRECTORY))
        status = os.fstat(root)
        if status.st_uid not in (0, os.geteuid()) and not status.st_mode & 0o022:
            raise PermissionError(errno.EACCES, f"{LAYOUT} in it belongs to user {status.st_uid} alone")
        self._mode = status.st_mode & 0o777
        self.local, self.shared = is_local(root), is_shared(root)
        return root

    def _open_blobs(self, make: bool) -> Handle:
        """Return the directory of blobs. FileNotFoundError, with `make` FileExistsError, if zarrfs has not made it."""
        root = self.folder("", make)
        scratch = f"../{self._scratch}{next(self._numbers):x}.blobs"  # unique, as several threads may make one
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(scratch, self._mode, dir_fd=root)
                made = Handle(os.open(scratch, _DIRECTORY, dir_fd=root))
                _set_mode(made, self._mode)
                os.close(os.open(BLOBS_MARK, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=made))
            try:
                os.stat(BLOBS, dir_fd=root, follow_symlinks=False)
            except FileNotFoundError:
                with contextlib.suppress(OSError):  # another process was faster
                    os.rename(scratch, BLOBS, src_dir_fd=root, dst_dir_fd=root)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{scratch}/{BLOBS_MARK}", dir_fd=root)
                os.rmdir(scratch, dir_fd=root)
        try:
            found = Handle(os.open(BLOBS, _DIRECTORY, dir_fd=root))
            os.stat(BLOBS_MARK, dir_fd=found, follow_symlinks=False)
        except OSError as exc:
            code = errno.EEXIST if make else errno.ENOENT
            raise OSError(code, "blobs in it is something else, and is left alone") from exc
        return found


def _set_mode(made: Handle, mode: int) -> None:
    """Set the permission bits of a new directory, regardless of the umask. Keep its set-group-ID bit."""
    os.fchmod(made, mode | os.fstat(made).st_mode & stat.S_ISGID)
