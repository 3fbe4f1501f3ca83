"""Files that get their names when they are complete.

A file is written without a name (O_TMPFILE), and linked when it is complete: a killed process leaves nothing. It has a
temporary name, with the prefix `.zarrfs-staging`, for an instant if it replaces another file, and all the time on a
file system without O_TMPFILE, such as NFS. Names with this prefix are no keys, at any depth. Those of killed processes
are removed by remove_abandoned().
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time

from zarrfs.system.beneath import BaseDirectory
from zarrfs.system.renaming import NOREPLACE, rename

RESERVED = ".zarrfs-staging"
_TEMPORARY = f"{RESERVED}."
_ABANDONED = 86_400  # seconds since a temporary file was last changed: its process has ended
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
# Errors of link(2) after which rename(2) may succeed, such as on a FUSE file system without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EXDEV)


class NewFile:
    """A new file, open for reading and writing, that place() gives its name. Methods block.

    `directory`: a descriptor of a directory on the file system of the file. Raise OSError.
    """

    __slots__ = ("_directory", "_name", "descriptor")

    def __init__(self, directory: int, mode: int = 0o666) -> None:
        self._directory, self._name = -1, b""
        try:
            self.descriptor = os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=directory)
        except OSError as exc:
            if exc.errno == errno.EPERM and not os.fstat(directory).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the directory was removed") from exc
            if exc.errno not in _NO_TMPFILE:
                raise
            self._name = _temporary()
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self.descriptor = os.open(self._name, flags, mode, dir_fd=directory)
            self._directory = os.dup(directory)

    def place(self, directory: int, name: bytes, replace: bool = True) -> None:
        """Name the file `name` in `directory`, on the same file system, and close it.

        Raise FileExistsError unless `replace`, if the name is taken; and OSError: then close() the file.
        """
        if self._name:
            os.close(self.descriptor)  # a network file system may report here that it is full
            self.descriptor = -1
            _rename(self._name, self._directory, name, directory, replace)
            self._name = b""
        else:
            self._link(directory, name, replace)
        self.close()

    def _link(self, directory: int, name: bytes, replace: bool) -> None:
        own = f"/proc/self/fd/{self.descriptor}"
        try:
            os.link(own, name, dst_dir_fd=directory, follow_symlinks=True)
        except FileExistsError:
            if not replace:
                raise
        else:
            return
        temporary = _temporary()
        os.link(own, temporary, dst_dir_fd=directory, follow_symlinks=True)
        try:
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(temporary, dir_fd=directory)
            raise

    def close(self) -> None:
        """Close the file, and remove it unless it was placed. A second call does nothing."""
        if self._name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._directory)
        for descriptor in (self.descriptor, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor, self._directory, self._name = -1, -1, b""


def place_below(new: NewFile, base: BaseDirectory, path: bytes) -> None:
    """Give a file its path below `base`, in place of a file there, whose permissions it takes; make directories.

    No link is followed. Raise OSError; IsADirectoryError if there is a directory.
    """
    above, _, name = path.rpartition(b"/")
    directory = _made(base, above)
    try:
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):  # a private value stays private
                os.fchmod(new.descriptor, mode & 0o777)
        new.place(directory, name)
    finally:
        os.close(directory)


def remove_below(base: BaseDirectory, path: bytes) -> None:
    """Remove a file, a link, or a directory with everything in it. Raise OSError."""
    above, _, name = path.rpartition(b"/")
    directory = base.directory(above)
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=directory)
    finally:
        os.close(directory)


def _made(base: BaseDirectory, path: bytes) -> int:
    """Open the directory `path`; make it, and those above it, if they are missing."""
    missing: list[bytes] = []
    while True:
        try:
            directory = base.directory(path)
            break
        except FileNotFoundError:
            if not path:
                raise
        path, _, name = path.rpartition(b"/")
        missing.append(name)
    for name in reversed(missing):
        above = directory
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=above)
            directory = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        finally:
            os.close(above)
    return directory


def remove_abandoned(directory: int) -> None:
    """Remove the temporary files in `directory` that killed processes left a day ago or earlier."""
    for name in os.listdir(f"/proc/self/fd/{directory}"):
        if name.startswith(_TEMPORARY):
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if time.time() - max(status.st_mtime, status.st_ctime) > _ABANDONED:
                    os.unlink(name, dir_fd=directory)


def _temporary() -> bytes:
    return os.fsencode(_TEMPORARY + secrets.token_hex(8))


def _rename(old: bytes, above: int, name: bytes, directory: int, replace: bool) -> None:
    """Rename a file; unless `replace`, with RENAME_NOREPLACE, or a hard link where that is missing (NFS)."""
    if replace:
        os.rename(old, name, src_dir_fd=above, dst_dir_fd=directory)
        return
    try:
        rename(old, name, NOREPLACE, above, directory)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    else:
        return
    try:
        os.link(old, name, src_dir_fd=above, dst_dir_fd=directory, follow_symlinks=False)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        os.rename(old, name, src_dir_fd=above, dst_dir_fd=directory)
    else:
        os.unlink(old, dir_fd=above)
