"""The upper directory of an overlay: changed entries under the names of their keys, and whiteouts.

Whiteouts follow the OCI image layer specification, "Whiteouts": `.wh.NAME` hides the lower entry NAME, and
`.wh..wh..opq` in a directory hides everything that the lower directory has.

Nothing here follows a symbolic link: links in an upper directory are values, and a link that another program put
there must not redirect a write. Methods block: they make system calls, on a local file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import stat
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from zarrfs.errors import SourceError, reason_of
from zarrfs.store.api import join_key, split_key
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.writing import RESERVED, NewFile, remove_abandoned
from zarrfs.system.beneath import BaseDirectory

PREFIX = ".wh."
OPAQUE = ".wh..wh..opq"
UNFINISHED = f"{RESERVED}.new"  # a directory or link that is being copied up, before it is renamed
RECORD = ".zarrfs-upper"  # in the root of an upper directory: a record of the source and view that it belongs to


def hidden_name(name: str) -> str | None:
    """Return the name that the whiteout `name` hides; None if it is no whiteout, or the opaque marker."""
    return name[len(PREFIX) :] if name.startswith(PREFIX) and name != OPAQUE else None


def reserved(name: str) -> bool:
    """Return whether `name` is reserved in upper directories, and so cannot appear in the merged tree."""
    return name.startswith((PREFIX, RECORD, RESERVED))


def remove_unfinished(directory: int) -> None:
    """Remove the entry UNFINISHED of a directory, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(UNFINISHED, dir_fd=directory)
        except IsADirectoryError:
            os.rmdir(UNFINISHED, dir_fd=directory)


_VERSION = 1
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPAQUE, _PREFIX = os.fsencode(OPAQUE), os.fsencode(PREFIX)
# Errors that mean an absent entry. ENAMETOOLONG: with PREFIX, the name of a whiteout may be too long.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


class _Lock:
    """A lock on a directory, held until the object ends. Raise SourceError if another process has one."""

    def __init__(self, path: str, directory: int, exclusive: bool) -> None:
        self._descriptor = -1
        self._descriptor = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "end that first; each has an upper directory of its own"
            holder = _holder(self._descriptor)
            raise SourceError(path, f"is in use by another mount or program{holder}: {remedy}") from None
        except OSError:  # a file system without locks
            pass

    def close(self) -> None:
        """Close the descriptor; the lock ends when all processes that inherited it have done so."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    __del__ = close


# by (st_dev, st_ino): file systems of the Python library that write to one directory share its lock
_exclusive: weakref.WeakValueDictionary[tuple[int, int], _Lock] = weakref.WeakValueDictionary()


def _leave_locks() -> None:
    """Leave the locks to the parent process: the child needs its own."""
    for lock in list(_exclusive.values()):
        lock.close()
    _exclusive.clear()


os.register_at_fork(after_in_child=_leave_locks)


class UpperListing(NamedTuple):
    """The entries of an upper directory, and what it hides of the lower one."""

    statuses: dict[str, os.stat_result]  # lstat by name
    hidden: set[str]  # names with a whiteout
    opaque: bool


class Upper:
    """A directory of changes. `plain`: there is no lower store, and whiteouts have no meaning.

    `over`: the JSON record of the source that the changes belong to; None: do not check it. Raise SourceError if
    `path` is no directory, or the upper directory of another source.
    """

    def __init__(self, path: str, plain: bool = False, over: dict[str, Any] | None = None) -> None:
        self.path = os.path.realpath(path)
        self.plain = plain
        self._over = over
        try:
            self._base = BaseDirectory(self.path)
        except OSError as exc:
            missing = isinstance(exc, FileNotFoundError)
            remedy = f"; make the directory: mkdir {shlex.quote(path)}" if missing else ""
            raise SourceError(path, f"no upper directory: {reason_of(exc)}{remedy}") from exc
        self.files = FileSystemStore(f"/proc/self/fd/{self._base.descriptor}")  # whole values are written through it
        self._lock: _Lock | None = None
        try:
            if not plain and over is not None:
                self._check_record(over)
        except BaseException:
            self.close()
            raise

    # -- locking

    @property
    def locked(self) -> bool:
        """Return whether this object holds a lock."""
        return self._lock is not None

    def lock(self, exclusive: bool) -> None:
        """Lock out writers (with `exclusive`, readers too) of other processes until close() or the end of this one.

        With `exclusive`, also write the record if it is missing. Raise SourceError if another process holds the lock
        (the message names it, if known), or if the directory now belongs to another source, or cannot be written.
        """
        status = os.fstat(self._base.descriptor)
        identity = status.st_dev, status.st_ino
        self._lock = None
        lock = (exclusive and _exclusive.get(identity)) or _Lock(self.path, self._base.descriptor, exclusive)
        if exclusive:
            _exclusive[identity] = lock
            with contextlib.suppress(OSError):  # of another user, or on a read-only file system
                remove_abandoned(self._base.descriptor)
        if not self.plain and self._over is not None:
            self._make_record(self._over, exclusive)
        self._lock = lock

    def _make_record(self, over: dict[str, Any], exclusive: bool) -> None:
        recorded = self._check_record(over)  # again, because another mount may have written the record since
        if exclusive and not recorded:
            try:
                self._write_record({"zarrfs_upper": _VERSION, **over})
            except OSError as exc:
                # a mount of zarrfs raises EINVAL, because RECORD is a reserved name there
                hint = " (it lies in another mount of zarrfs)" if exc.errno == errno.EINVAL else ""
                rule = f"no upper directory: cannot write there: {reason_of(exc)}{hint}"
                raise SourceError(self.path, rule) from exc

    def close(self) -> None:
        """Release the lock and close descriptors."""
        self._lock = None
        self.files.close()
        self._base.close()

    def _write_record(self, record: dict[str, Any]) -> None:
        with contextlib.closing(self.create(0o644)) as new:
            os.write(new.descriptor, json.dumps(record).encode())
            os.fsync(new.descriptor)
            new.place(self._base.descriptor, os.fsencode(RECORD))

    def _check_record(self, over: dict[str, Any]) -> bool:
        """Return whether there is a record.

        Raise SourceError if the directory holds other files, or changes of another source, version or view.
        """
        found = self._record()
        if found is None:
            names = [name for name in os.listdir(self.path) if not name.startswith((RESERVED, RECORD))]
            if names and names != ["lost+found"]:
                rule = f"is neither an upper directory of zarrfs (no {RECORD}) nor empty: it holds {min(names)!r}"
                raise SourceError(self.path, rule)
            return False
        if found.get("source") != over.get("source"):
            raise SourceError(self.path, f"holds changes of {found.get('source')}, not of {over.get('source')}")
        if found.get("fingerprint") != over.get("fingerprint"):
            rule = f"holds changes of another version of {over.get('source')}, which has changed since"
            raise SourceError(self.path, rule)
        if "view" in found and "view" in over and found["view"] != over["view"]:  # older versions recorded no view
            made, asked = (f"with view={one}" if one else "without view=" for one in (found["view"], over["view"]))
            rule = f"holds changes of {found.get('source')} {made}, not {asked}: take another upperdir="
            raise SourceError(self.path, rule)
        return True

    def _record(self) -> dict[str, Any] | None:
        try:
            with open(self.open(RECORD, os.O_RDONLY)) as file:
                found = json.load(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            raise SourceError(self.path, f"{RECORD} cannot be read: {exc}") from exc
        if not isinstance(found, dict) or found.get("zarrfs_upper") != _VERSION:
            raise SourceError(self.path, f"{RECORD} is of another version of zarrfs")
        return found

    # -- files

    def create(self, mode: int) -> NewFile:
        """Return a new file, which has no name yet. Raise OSError."""
        return NewFile(self._base.descriptor, mode)

    @contextlib.contextmanager
    def at(self, key: str) -> Iterator[tuple[int, bytes]]:
        """Yield (descriptor of the directory of `key`, name of the entry there).

        Raise FileNotFoundError or NotADirectoryError.
        """
        parent, _, name = os.fsencode(key).rpartition(b"/")
        directory = self._base.directory(parent)
        try:
            yield directory, name or b"."
        finally:
            os.close(directory)

    def status(self, key: str) -> os.stat_result | None:
        """Return the lstat of an entry; None if there is none."""
        parent, _, name = os.fsencode(key).rpartition(b"/")
        try:
            directory = self._base.directory(parent)
            try:
                return os.stat(name or b".", dir_fd=directory, follow_symlinks=False)
            finally:
                os.close(directory)
        except OSError as exc:
            if exc.errno in _GONE:
                return None
            raise

    def open(self, key: str, flags: int, mode: int = 0) -> int:
        """Open a file or directory; a symbolic link raises ELOOP."""
        with self.at(key) as (directory, name):
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY, mode, dir_fd=directory)

    def readlink(self, key: str) -> str:
        """Return the target of a symbolic link."""
        with self.at(key) as (directory, name):
            return os.fsdecode(os.readlink(name, dir_fd=directory))

    def listing(self, key: str) -> UpperListing | None:
        """List a directory; return None if it does not exist."""
        try:
            descriptor = self.open(key, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            if exc.errno in _GONE:
                return None
            raise
        statuses = {}
        try:
            found = os.listdir(descriptor)
            for name in found:
                if not (name.startswith((RESERVED, RECORD)) if self.plain else reserved(name)):
                    try:
                        statuses[name] = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    except FileNotFoundError:  # removed meanwhile
                        continue
        finally:
            os.close(descriptor)
        if self.plain:
            return UpperListing(statuses, set(), False)
        hidden = {gone for name in found if (gone := hidden_name(name)) is not None}
        return UpperListing(statuses, hidden, OPAQUE in found)

    # -- whiteouts

    def covers(self, key: str, itself: bool = True) -> bool:
        """Return whether the upper directory hides the lower entry `key`.

        Whiteouts, opaque directories, and upper entries above `key` that are not directories hide it; with `itself`,
        also an upper entry at `key` that is no directory.
        """
        names, directory = os.fsencode(key).split(b"/") if key else [], self._base.descriptor
        try:
            for left, name in zip(range(len(names) - 1, -1, -1), names, strict=True):
                if _marked(_OPAQUE, directory) or _marked(_PREFIX + name, directory):
                    return True
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=directory)
                except FileNotFoundError:
                    return False
                except NotADirectoryError:
                    return itself or left > 0
                if directory != self._base.descriptor:
                    os.close(directory)
                directory = below
            return False
        finally:
            if directory != self._base.descriptor:
                os.close(directory)

    def write_whiteout(self, key: str) -> None:
        """Write the whiteout of `key`. The upper directory must have the parent of `key`."""
        os.close(self.open(_beside(key), os.O_WRONLY | os.O_CREAT, 0o644))


def _marked(name: bytes, directory: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError as exc:
        if exc.errno in _GONE:
            return False
        raise


def _beside(key: str) -> str:
    parent, name = split_key(key)
    return join_key(parent, PREFIX + name)


def _holder(descriptor: int) -> str:
    """Return " (process PID)", the holder of a directory's lock; "" if /proc/locks does not show it."""
    status = os.fstat(descriptor)
    inode = rf"[0-9a-f]+:[0-9a-f]+:{status.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks") as file:
        for line in file:
            match = re.search(rf"FLOCK\s+ADVISORY\s+\w+\s+(\d+)\s+{inode}\s", line)
            if match is not None:
                return f" (process {match[1]})"
    return ""
