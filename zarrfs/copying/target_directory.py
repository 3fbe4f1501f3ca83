"""The directory that a copy writes to. A file appears under its name when it is complete; none is written outside.

Each directory below is opened without following symbolic links (system/beneath.py), and every operation is relative
to its descriptor, so a process that swaps names meanwhile cannot redirect a write. All methods block; several threads
may call them.
"""

from __future__ import annotations

import enum
import errno
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from zarrfs.errors import UsageError, ZarrfsError, reason_of
from zarrfs.store.api import KINDS, Info, Kind, name_rule, ordinary_mode
from zarrfs.store.directory import FIFO
from zarrfs.store.writing import RESERVED, NewFile, remove_abandoned
from zarrfs.system.beneath import BaseDirectory

T = TypeVar("T")
# Errors that every other file would fail with, too.
_FATAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
_RWX = stat.S_IRWXU
_PIECE = 1 << 20
# of a name that was free when its directory was listed
_TAKEN = "its name is taken: the file system folds it into that of another entry, or another process writes there"


class InTheWay(ZarrfsError):
    """An existing entry that the copy may not replace."""


def ends_all(exc: BaseException) -> bool:
    """Return whether a failure prevents every further write, as a full disk does."""
    return isinstance(exc, OSError) and exc.errno in _FATAL


class Existing(enum.Enum):
    """The state of the name of an entry in the destination."""

    NOTHING = "nothing"
    SAME = "same"  # the same kind, size and time: the entry is in place
    OTHER = "other"


class Folder:
    """A directory of the copy, made when its first entry is written."""

    __slots__ = ("failed", "info", "key", "names", "own", "parent", "wanted")

    def __init__(self, key: str, info: Info, parent: Folder | None, own: bool) -> None:
        self.key, self.info, self.parent = key, info, parent
        self.own = own  # whether this run makes it even if it is empty
        self.wanted = False  # whether it, or an entry below it, was selected
        self.failed = False  # whether it cannot be made
        self.names: frozenset[str] | None = None  # of entries that were there before; None: not entered yet

    def want(self) -> None:
        """Mark the directory and its parents as wanted."""
        at: Folder | None = self
        while at is not None and not at.wanted:
            at.wanted = True
            at = at.parent

    def has(self, name: str) -> bool:
        """Return whether there was an entry of this name before. The directory has been opened."""
        return self.names is not None and name in self.names


def broken_rule(name: str) -> str | None:
    """Return the rule that a name, which may come from an untrusted store, breaks; None if it is valid."""
    rule = name_rule(name) or ("a name with a slash" if "/" in name else None)
    if rule is None and name.startswith(RESERVED):
        rule = f"a name that begins with {RESERVED}, which is reserved"
    if rule is None:
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            rule = "a lone surrogate"
    return rule


class TargetDirectory:
    """The directory `path`, made if it is missing. With `overwrite`, entries that differ are replaced.

    Raise UsageError if it cannot be used.
    """

    def __init__(self, path: str, root: Info, overwrite: bool) -> None:
        self.path, self._overwrite = path, overwrite
        try:
            self._root_made = self._make(0o777 if root.mode is None else root.mode & 0o777 | _RWX, root.mode is None)
            self._base = BaseDirectory(path)
        except NotADirectoryError:
            raise UsageError(f"{path}: is a file; name a directory, or one to be made") from None
        except OSError as exc:
            if os.path.islink(path):
                raise UsageError(f"{path}: is a symbolic link that leads nowhere") from None
            raise UsageError(f"{path}: {reason_of(exc)}") from exc

    def _make(self, mode: int, masked: bool) -> bool:
        """Make the directory with its final mode, which a run that goes on after a kill recognises."""
        umask = os.umask(0)
        try:
            os.mkdir(self.path, mode & ~umask if masked else mode)
        except FileExistsError:
            return False
        finally:
            os.umask(umask)
        return True

    def close(self) -> None:
        """Close the directory."""
        self._base.close()

    # -- directories

    def enter(self, folder: Folder) -> int:
        """Return an O_PATH descriptor of `folder`, whose parent has been entered; the first time, make it or list it.

        Raise OSError, InTheWay.
        """
        above = folder.parent
        if folder.names is not None or above is None:
            found = self._base.directory(os.fsencode(folder.key))
        else:
            within = self._base.directory(os.fsencode(above.key))
            try:
                found = self._make_in(within, above, folder)
            finally:
                os.close(within)
        if folder.names is None:
            try:
                names = _permitted(folder, found, lambda: os.listdir(f"/proc/self/fd/{found}"))
                remove_abandoned(found)
                folder.names = frozenset(names)
            except BaseException:
                os.close(found)
                raise
        return found

    def _make_in(self, within: int, above: Folder, folder: Folder) -> int:
        """Open a directory in the open directory `within`; make it first if it is missing."""
        name = os.fsencode(folder.info.name)
        # without a mode in the store, the umask decides; otherwise finish() sets it
        mode = 0o777 if folder.info.mode is None else 0o700
        try:
            _permitted(above, within, lambda: os.mkdir(name, mode, dir_fd=within))
        except FileExistsError:
            if not above.has(folder.info.name) and folder.info.name not in os.listdir(f"/proc/self/fd/{within}"):
                raise InTheWay(_TAKEN) from None
        try:
            return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        except NotADirectoryError:
            if not self._overwrite:
                raise InTheWay("exists already, and is not a directory: see --overwrite") from None
        _permitted(above, within, lambda: os.unlink(name, dir_fd=within))
        return self._make_in(within, above, folder)

    def finish(self, directory: int, folder: Folder) -> None:
        """Set the mode and time of a complete directory. Raise OSError."""
        status, info = os.fstat(directory), folder.info
        if folder.parent is None and (info.mode is None or not (self._root_made or _recognised(status, info))):
            return
        here = f"/proc/self/fd/{directory}"
        if info.mtime_ns is not None:
            os.utime(here, ns=(info.mtime_ns, info.mtime_ns))
        if info.mode is not None and info.mode != stat.S_IMODE(status.st_mode):
            os.chmod(here, info.mode)

    # -- entries

    def compare(self, directory: int, folder: Folder, info: Info) -> Existing:
        """Compare the existing entry. Raise InTheWay if it differs and may not be replaced."""
        if not folder.has(info.name):
            return Existing.NOTHING
        try:
            status = os.stat(info.name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return Existing.NOTHING
        if _same(directory, status, info) and not (self._overwrite and _other_mode(status, info)):
            return Existing.SAME
        if stat.S_ISDIR(status.st_mode):
            raise InTheWay("a directory is there already: remove it first")
        if not self._overwrite and _known(info):
            raise InTheWay("is there already, and differs: see --overwrite")
        return Existing.OTHER

    def place(self, written: NewFile, directory: int, folder: Folder, info: Info, there: Existing) -> None:
        """Give a complete file its mode, time and name, unless the entry there has its bytes. Raise OSError, InTheWay.
        """
        other = there is Existing.OTHER
        if other and not _known(info):
            if _same_bytes(written.descriptor, directory, info.name):
                return
            if not self._overwrite:
                raise InTheWay("is there already, and differs: see --overwrite")
        if info.mode is not None:
            os.fchmod(written.descriptor, ordinary_mode(info))
        if info.mtime_ns is not None:
            os.utime(written.descriptor, ns=(info.mtime_ns, info.mtime_ns))
        name = os.fsencode(info.name)
        try:
            _permitted(folder, directory, lambda: written.place(directory, name, replace=other))
        except FileExistsError:
            raise InTheWay(_TAKEN) from None

    def make_special(self, directory: int, folder: Folder, info: Info, there: Existing) -> None:
        """Make a symbolic link or a FIFO. Raise OSError, InTheWay."""
        name = os.fsencode(info.name)

        def make() -> None:
            if there is Existing.OTHER:
                os.unlink(name, dir_fd=directory)
            if info.kind is Kind.SYMLINK:
                os.symlink(os.fsencode(info.target or ""), name, dir_fd=directory)
            else:
                os.mkfifo(name, 0o600, dir_fd=directory)

        try:
            _permitted(folder, directory, make)
        except FileExistsError:
            raise InTheWay(_TAKEN) from None

    def dress_special(self, directory: int, info: Info) -> None:
        """Set the time of a symbolic link, and the mode and time of a FIFO. Raise OSError."""
        if info.kind is Kind.FILE and info.mode is not None:
            found = os.open(info.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:  # chmod(2) would follow a link that has taken the name
                os.chmod(f"/proc/self/fd/{found}", info.mode)
            finally:
                os.close(found)
        if info.mtime_ns is not None:
            os.utime(info.name, ns=(info.mtime_ns, info.mtime_ns), dir_fd=directory, follow_symlinks=False)


def create(directory: int, folder: Folder, info: Info) -> NewFile:
    """Return a new file for an entry in `folder`. Raise OSError."""
    mode = 0o666 if info.mode is None else 0o600
    return _permitted(folder, directory, lambda: NewFile(directory, mode))


def _permitted(folder: Folder | None, directory: int, change: Callable[[], T]) -> T:
    """Call `change`; if `folder` forbids it by a mode that the source has, too, make it writable until finish()."""
    try:
        return change()
    except PermissionError:
        mode = None if folder is None else folder.info.mode
        if mode is None or mode & _RWX == _RWX:
            raise
        if os.fstat(directory).st_mode & 0o777 == mode & 0o777:  # else another thread has made it writable
            os.chmod(f"/proc/self/fd/{directory}", mode & 0o777 | _RWX)
        return change()


def is_special(info: Info) -> bool:
    """Return whether an entry is a symbolic link or a FIFO, which has no bytes to copy."""
    return info.kind is Kind.SYMLINK or info.unreadable == FIFO


def _known(info: Info) -> bool:
    """Return whether size and time are known, so that a file with the same ones counts as the same."""
    return is_special(info) or (info.size is not None and info.mtime_ns is not None)


def _same(directory: int, status: os.stat_result, info: Info) -> bool:
    if info.unreadable == FIFO:
        return stat.S_ISFIFO(status.st_mode)
    if KINDS.get(stat.S_IFMT(status.st_mode)) is not info.kind:
        return False
    if info.kind is Kind.SYMLINK:
        return os.readlink(info.name, dir_fd=directory) == (info.target or "")
    if not _known(info) or status.st_size != info.size or info.mtime_ns is None:
        return False
    time = status.st_mtime_ns
    # some file systems keep whole seconds
    return time == info.mtime_ns or (time % 10**9 == 0 and time // 10**9 == info.mtime_ns // 10**9)


def _recognised(status: os.stat_result, info: Info) -> bool:
    """Return whether the destination itself may be what a killed run made: else it is the user's, and stays."""
    mode = (info.mode or 0) & 0o777
    return status.st_uid == os.geteuid() and status.st_mode & 0o777 in (mode, mode | _RWX)


def _other_mode(status: os.stat_result, info: Info) -> bool:
    return info.kind is Kind.FILE and info.mode is not None and stat.S_IMODE(status.st_mode) != ordinary_mode(info)


def _same_bytes(written: int, directory: int, name: str) -> bool:
    """Return whether an existing regular file has the bytes of a new one, whose time the source does not know."""
    try:
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return False
    try:
        one, other = os.fstat(written), os.fstat(found)
        if not stat.S_ISREG(other.st_mode) or one.st_size != other.st_size:
            return False
        return all(
            os.pread(written, _PIECE, at) == os.pread(found, _PIECE, at) for at in range(0, one.st_size, _PIECE)
        )
    finally:
        os.close(found)
