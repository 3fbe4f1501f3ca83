"""The staging directory: values are written there before an atomic rename, trees are moved there to be removed.

It is the directory `.zarrfs-staging` in the base directory. The process that writes a file in it holds a lock (flock)
on the file, so an unlocked file was left behind by a crash, and the next writer removes it. Names with this prefix are
no keys, at any depth.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import threading
import time

RESERVED = ".zarrfs-staging"
_NAME = os.fsencode(RESERVED)
_UNLOCKABLE_AGE = 86_400  # seconds: where locks do not work, an older file is considered to be left behind
_TRIES = 100


class Staging:
    """The staging directory of one base directory, created when first needed. All methods block."""

    def __init__(self, base: int, mode: int = 0o777) -> None:
        """`base`: a descriptor, which the caller closes; `mode`: the permission bits of the staging directory."""
        self._base, self._mode = base, mode
        self._cleaned: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def create(self, near: int | None, mode: int) -> StagedFile:
        """Create an empty, locked file with permission bits `mode` (masked by the umask).

        `near`: another directory to create it in, under a reserved name: for a destination on another file system, to
        which a file in the staging directory cannot be renamed.
        """
        for _ in range(_TRIES):
            directory = self._open() if near is None else os.dup(near)
            try:
                self._clean_once(directory, b"" if near is None else _NAME)
                name = (b"" if near is None else _NAME + b".") + secrets.token_hex(8).encode()
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                descriptor = os.open(name, flags, mode, dir_fd=directory)
            except FileNotFoundError:  # another process removed the empty staging directory
                os.close(directory)
                continue
            except BaseException:
                os.close(directory)
                raise
            staged = StagedFile(directory, name, descriptor)
            if lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                return staged
            staged.discard()  # another process removed it before it was locked
        raise OSError(errno.EBUSY, "the staging directory keeps vanishing")

    def directory(self) -> StagedDirectory:
        """Create an empty, locked directory of mode 0700. For many files, it is cheaper than a create() for each."""
        for _ in range(_TRIES):
            staging, descriptor = self._open(), -1
            name = secrets.token_hex(8).encode()
            try:
                self._clean_once(staging, b"")
                os.mkdir(name, 0o700, dir_fd=staging)
                descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=staging)
            except FileNotFoundError:  # another process removed the staging directory, or the new one
                os.close(staging)
                continue
            except BaseException:
                os.close(staging)
                raise
            staged = StagedDirectory(staging, name, descriptor)
            if lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                return staged
            staged.discard()
        raise OSError(errno.EBUSY, "the staging directory keeps vanishing")

    def remove_tree(self, parent: int, name: bytes) -> None:
        """Remove the tree `name` in the directory `parent`.

        For readers it vanishes atomically, by a rename; if it cannot be renamed, it is removed in place, part by part.
        """
        tree = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            lock(tree)
            staging = self._open()
            try:
                self._clean_once(staging, b"")
                hidden = secrets.token_hex(8).encode()
                os.rename(name, hidden, src_dir_fd=parent, dst_dir_fd=staging)
            except OSError as exc:
                if exc.errno not in (errno.EXDEV, errno.EACCES, errno.EPERM):
                    raise
                shutil.rmtree(name, dir_fd=parent)  # another file system, or no permission
            else:
                shutil.rmtree(hidden, dir_fd=staging)
            finally:
                os.close(staging)
        finally:
            os.close(tree)

    def close(self) -> None:
        """Remove the staging directory if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(_NAME, dir_fd=self._base)

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_NAME, self._mode, dir_fd=self._base)
            with contextlib.suppress(FileNotFoundError):
                return os.open(_NAME, flags, dir_fd=self._base)

    def _clean_once(self, directory: int, prefix: bytes) -> None:
        """Remove entries with `prefix` that crashed processes left in `directory`; only once for each directory."""
        status = os.fstat(directory)
        ident = status.st_dev, status.st_ino
        with self._lock:
            if ident in self._cleaned:
                return
            for entry in os.listdir(directory):
                name = os.fsencode(entry)
                if name.startswith(prefix):
                    remove_abandoned(directory, name)
            self._cleaned.add(ident)


class StagedDirectory:
    """A directory for staged files; `descriptor` is open and locked.

    Processes forked afterwards share the lock.
    """

    def __init__(self, staging: int, name: bytes, descriptor: int) -> None:
        self._staging, self._name, self.descriptor = staging, name, descriptor

    def discard(self) -> None:
        """Remove the directory with its files."""
        if self.descriptor < 0:
            return
        with contextlib.suppress(OSError):
            shutil.rmtree(self._name, dir_fd=self._staging)
        descriptors = self.descriptor, self._staging
        self.descriptor = self._staging = -1
        for descriptor in descriptors:
            os.close(descriptor)


class StagedFile:
    """A file in the staging directory; `descriptor` is open for writing."""

    def __init__(self, directory: int, name: bytes, descriptor: int) -> None:
        self._directory, self._name, self.descriptor = directory, name, descriptor

    def place(self, parent: int, name: bytes) -> None:
        """Rename the file to `name` in the directory `parent`, replacing an existing file."""
        os.rename(self._name, name, src_dir_fd=self._directory, dst_dir_fd=parent)
        self._close()

    def discard(self) -> None:
        """Remove the file unless it was placed."""
        if self.descriptor < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._directory)
        self._close()

    def _close(self) -> None:
        descriptors = self.descriptor, self._directory
        self.descriptor = self._directory = -1
        for descriptor in descriptors:
            os.close(descriptor)


def lock(descriptor: int, timeout: float = 0.0) -> bool | None:
    """Try to lock a file for up to `timeout` seconds; block meanwhile.

    Return whether the lock was acquired, or None if the file system has no locks.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        except OSError:
            return None
        else:
            return True


def remove_abandoned(directory: int, name: bytes) -> None:
    """Remove `name` in `directory` unless a living process holds its lock."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=directory)
    except OSError:
        return
    try:
        status, locked = os.fstat(descriptor), lock(descriptor)
        old = time.time() - max(status.st_mtime, status.st_ctime) > _UNLOCKABLE_AGE
        if locked or (locked is None and old):
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(name, dir_fd=directory)
                else:
                    os.unlink(name, dir_fd=directory)
    finally:
        os.close(descriptor)
