"""A cache directory: files of blocks (disk.py), shared by processes and nodes, and bounded in bytes.

    cache_dir/zarrfs-blocks-3/NAME        a block or version record
    cache_dir/zarrfs-blocks-3/NAME.lease  the lease on a block: its holder writes the block into it, and renames it
    cache_dir/zarrfs-blocks-3/.*.tmp      a file without a lease that is being written

A file appears under its name by a rename, so it is whole or absent even if its writer is killed. There is no index
and no lock: a process lists the directory before its first write, and again once it has written an eighth of the free
space that it found, or a 64th of the bound. Nothing here follows a symbolic link below the cache directory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence

from zarrfs.system.beneath import is_local, open_cached
from zarrfs.system.buffers import Buffer, write_parts

BLOCKS = "zarrfs-blocks-3"
BACK_OFF = 30.0  # seconds without writes and leases after a failed write
TOUCH = 60.0  # seconds: the precision of the time at which a file was last used
FULL = (errno.ENOSPC, errno.EDQUOT)
LEFT = 1 << 30  # bytes of the disk that stay free; a tenth of a small one
_KEPT = re.compile(r"[0-9a-f]{32}")
_LEASE = ".lease"
_PASSING = re.compile(r"[0-9a-f]{32}\.lease|\..*\.tmp")
_ABANDONED = 3600.0  # seconds after which a lease or a temporary file was left by a killed process
_OTHERS = 8 << 20  # bytes that other processes may write while one looks through the directory
_FREED = 1 << 30  # bytes that are evicted at most beyond the needed ones

_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # O_NONBLOCK: do not wait at a FIFO
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Handle(int):
    """A descriptor that is closed when no reference to it is left, so never while a thread uses it."""

    __slots__ = ()

    def __del__(self) -> None:
        os.close(self)


class CacheDirectory:
    """The files below `path`, of at most `size` bytes as du(1) counts them. Thread-safe; methods raise OSError.

    PermissionError for a directory private to another user, because root would trust data that this user can change.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path, self._size = path, size
        self._reserve = max(size // 16, min(_OTHERS, size // 4))
        self.local = False  # on a file system that never waits for a server
        self._mode = 0o700  # of BLOCKS: the users who may write to the cache directory may also write below it
        self._opened: Handle | None = None
        self._lock = threading.Lock()  # held while the directory is looked through
        self._budget = 0  # bytes that may be written before that
        self._scratch, self._numbers = f".{secrets.token_hex(6)}", itertools.count()

    def fits(self, size: int) -> bool:
        """Return whether a file of `size` bytes may be kept at all."""
        return size <= self._size // 2

    def open(self, name: str) -> int:
        """Open the file `name` for reading, and return its descriptor."""
        return os.open(name, os.O_RDONLY | _FILE, dir_fd=self._root())

    def open_now(self, name: str) -> int:
        """Open a file for reading. Raise BlockingIOError if that would wait."""
        root = self._opened
        if root is None or not self.local:
            raise BlockingIOError(errno.EAGAIN, "may have to wait for a server")
        return open_cached(name, os.O_RDONLY | _FILE, root)

    def write(self, name: str, parts: Sequence[Buffer], lease: Handle | None = None) -> None:
        """Write a file, and replace one of the same name. Evict others if space is short.

        `lease`: write into this file of create_lease(), and end the lease. Do nothing if it was removed.
        """
        size = sum(map(len, parts))
        self._make_room(size)
        try:
            self._write(name, parts, lease)
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            self._make_room(size, full=True)  # other data fill the disk, or a quota is used up
            self._write(name, parts)

    def touch(self, name: str) -> None:
        """Mark a file as used now, if its owner may."""
        with contextlib.suppress(OSError):
            os.utime(name, dir_fd=self._root(), follow_symlinks=False)

    def remove(self, name: str) -> bool:
        """Remove a file, or an empty directory in its place. Return False if that fails; never raise."""
        with contextlib.suppress(OSError):
            try:
                os.unlink(name, dir_fd=self._root())
            except IsADirectoryError:
                os.rmdir(name, dir_fd=self._root())
            return True
        return False

    def close(self) -> None:
        """Close the directory; it is opened again when needed."""
        self._opened = None

    # -- leases

    def create_lease(self, name: str, patience: float) -> Handle | None:
        """Create the lease on a block, for write(); None if another process holds it.

        A lease that is older than `patience` seconds is replaced. The clock is that of the file system: those of nodes
        differ.
        """
        root, lease = self._root(make=True), name + _LEASE
        for _ in range(2):
            with contextlib.suppress(FileExistsError):
                return Handle(self._create(root, lease))
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                os.utime(root)
                age = os.fstat(root).st_mtime - os.stat(lease, dir_fd=root, follow_symlinks=False).st_mtime
                if abs(age) <= patience:  # an older one may be from the future, if a clock was set back
                    return None
                self.remove(lease)
        return None

    def remove_lease(self, name: str) -> None:
        """Remove the lease on a block, if there is one."""
        self.remove(name + _LEASE)

    # -- room

    def _make_room(self, size: int, full: bool = False) -> None:
        """Evict the least recently used files until `size` more bytes fit. `full`: the system has refused to write."""
        count = -(-size // 4096) * 4096 + 512  # with the entry of the directory
        with self._lock:
            if count <= self._budget and not full:
                self._budget -= count
                return
            root = self._root(make=True)
            total, files, now = os.fstat(root).st_blocks * 512, [], time.time()
            for name, status in self._entries():
                taken = max(status.st_size, status.st_blocks * 512)
                if _PASSING.fullmatch(name) and now - status.st_mtime > _ABANDONED and self.remove(name):
                    continue
                total += taken
                if _KEPT.fullmatch(name):
                    files.append((status.st_mtime_ns, taken, name))
            disk = os.fstatvfs(root)
            free = disk.f_bavail * disk.f_frsize - min(LEFT, disk.f_blocks * disk.f_frsize // 10)
            room = min(self._size - self._reserve - total, free)
            if room < count or full:
                wanted = count + min(self._size // 10, _FREED)
                for _, taken, name in sorted(files):
                    if room >= wanted and not full:
                        break
                    if self.remove(name):
                        room, full = room + taken, False
            if room < count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._budget = min(room // 8, self._size // 64) - count

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        own = Handle(os.open(".", _DIRECTORY, dir_fd=self._root()))  # with an offset of its own
        with os.scandir(own) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False)

    # -- files

    def _write(self, name: str, parts: Sequence[Buffer], lease: Handle | None = None) -> None:
        root = self._root(make=True)
        scratch = f"{self._scratch}{next(self._numbers):x}.tmp" if lease is None else name + _LEASE
        file = Handle(self._create(root, scratch)) if lease is None else lease
        try:
            write_parts(file, parts)
            if not self.local:
                os.close(os.dup(file))  # NFS sends the data at a close(2), and reports a full disk then
            if lease is None or not _is_removed(lease):
                os.rename(scratch, name, src_dir_fd=root, dst_dir_fd=root)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch, dir_fd=root)
            raise

    def _create(self, root: Handle, name: str) -> int:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, self._mode & 0o600, dir_fd=root)
        if self._mode & 0o077:
            os.fchmod(file, self._mode & 0o666)
        return file

    def _root(self, make: bool = False) -> Handle:
        """Return the open directory BLOCKS; with `make`, create it if it is missing or was removed."""
        found = self._opened
        if found is None or (make and _is_removed(found)):
            found = self._opened = self._open_root(make)
        return found

    def _open_root(self, make: bool) -> Handle:
        path = os.path.join(self.path, BLOCKS)
        if make and not os.path.lexists(path):
            _make_private_directory(self.path)
            shared = os.stat(self.path).st_mode
            mode = 0o700 | (0o070 if shared & stat.S_IWGRP else 0) | (0o007 if shared & stat.S_IWOTH else 0)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode)
                made = Handle(os.open(path, _DIRECTORY))
                os.fchmod(made, mode | os.fstat(made).st_mode & stat.S_ISGID)  # regardless of the umask
        root = Handle(os.open(path, _DIRECTORY))
        status = os.fstat(root)
        if status.st_uid not in (0, os.geteuid()) and not status.st_mode & 0o022:
            raise PermissionError(errno.EACCES, f"{BLOCKS} in it belongs to user {status.st_uid} alone")
        self._mode = status.st_mode & 0o777
        self.local = is_local(root)
        return root


def _is_removed(file: int) -> bool:
    """Return whether an open file or directory was removed. On NFS, one that another node has removed is stale."""
    try:
        return not os.fstat(file).st_nlink
    except OSError:
        return True


def _make_private_directory(path: str) -> None:
    """Create a directory with mode 0700, and missing ones above it with mode 0755, which os.makedirs() cannot set."""
    path = os.path.abspath(path)
    missing, above = [path], os.path.dirname(path)
    while not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, 0o700 if place == path else 0o755)
