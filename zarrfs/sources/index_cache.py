"""The cache directory of indexes: one of the user's own, in which each version of a document has one index.

An index is called KEY.index. KEY is a hash of the document's version, the options that shape its index, and the
version of the layout. The version of a document is its content; a hard link stands for the attributes of a local one
from stat(2), including ctime, or for the ETag of one behind a URL. A process that compiles a document holds a lock on
KEY.lock, which the kernel releases with the process; others wait for its index. An index that is unused for a month is
removed when another one is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator

from zarrfs.errors import SourceError, reason_of
from zarrfs.store.indexfile import read_notes

_OURS = (".index", ".lock", ".tmp", ".known", ".names", ".netcdf")  # some of them from earlier versions
_UNUSED = 30 * 86_400.0  # seconds after which an index is removed
WAIT = 300.0  # seconds to wait for another process that compiles the same document
_PAUSE = 0.05  # seconds between attempts to lock
_swept = set[str]()  # directories that this process has swept

Index = tuple[str, dict[str, str]]  # the path of an index, and its notes


class IndexCache:
    """The directory of indexes, in the user's cache directory.

    If it cannot be used, new() makes a `temporary` directory instead.
    """

    def __init__(self) -> None:
        self.temporary = False
        self.directory = usual_directory()
        self._problem: str | None = None
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self._problem = unsafe(self.directory)
        except OSError as exc:
            self._problem = f"cannot be made: {reason_of(exc)}"

    def find(self, key: str) -> Index | None:
        """Return the index of the document with this key; None if there is none."""
        path = os.path.join(self.directory, f"{key}.index")
        if self._problem is not None or not os.path.exists(path):
            return None
        try:
            notes = read_notes(path)
            os.utime(path)  # the time of its last use
        except (OSError, SourceError):  # damaged, or just removed
            return None
        return path, notes

    @contextlib.contextmanager
    def locked(self, key: str, deadline: float) -> Iterator[Index | None]:
        """Provide the index of a document, or None, with a lock: the caller then compiles it.

        Until `deadline` (time.monotonic()), wait for another process that compiles it. After it, or if the file cannot
        be locked, go on without a lock.
        """
        if (found := self.find(key)) is not None or self._problem is not None:
            yield found
            return
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                path = os.path.join(self.directory, f"{key}.lock")
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        stack.callback(_remove, path)  # a waiting process finds the index, or compiles
                        break
                    except BlockingIOError:
                        time.sleep(_PAUSE)
            yield self.find(key)

    @contextlib.contextmanager
    def new(self, source: str) -> Iterator[str]:
        """Provide a path to write an index to, and remove the file on exit unless keep() has renamed it.

        Raise SourceError if the index of `source` cannot be written.
        """
        scratch = ""
        try:
            if self._problem is not None:
                self.directory, self.temporary = tempfile.mkdtemp(prefix="zarrfs-index-"), True
            self._sweep()
            scratch = os.path.join(self.directory, f".zarrfs-{secrets.token_hex(8)}.tmp")
            yield scratch
        except BaseException as exc:
            if self.temporary:
                shutil.rmtree(self.directory, ignore_errors=True)
            if isinstance(exc, OSError | sqlite3.Error):  # SQLite has its own: a full disk, a value over 1 GB
                reason = getattr(exc, "strerror", None) or str(exc)
                raise SourceError(source, f"cannot write its index in {self.directory}: {reason}") from exc
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(scratch)

    def keep(self, scratch: str, key: str) -> str:
        """Rename a finished index to its final name; return its path. Raise OSError."""
        path = os.path.join(self.directory, f"{key}.index")
        os.rename(scratch, path)
        return path

    def link(self, key: str, other: str) -> str:
        """Give the index of `key` the key `other`, too, if the file system has hard links; return its path."""
        path, link = (os.path.join(self.directory, f"{name}.index") for name in (key, other))
        if key == other or self.temporary:
            return path
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)  # a damaged one
            os.link(path, link)
        except OSError:
            return path
        return link

    def documents(self) -> str | None:
        """Return the directory for copies of fetched documents; None for the system's temporary directory."""
        return None if self._problem is not None else self.directory

    def _sweep(self) -> None:
        """Remove files that are unused for a month, once per process and directory."""
        if self.directory in _swept:
            return
        _swept.add(self.directory)
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.name.endswith(_OURS) and time.time() - entry.stat().st_mtime > _UNUSED:
                        os.unlink(entry.path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def usual_directory() -> str:
    """Return the directory of this user's indexes.

    For root it is the system's cache directory, because mount helpers and systemd units have no HOME; but not if
    XDG_CACHE_HOME is set, or if root cannot write there, as in a user namespace.
    """
    if os.geteuid() == 0 and "XDG_CACHE_HOME" not in os.environ and os.access("/var/cache", os.W_OK):
        return "/var/cache/zarrfs/index"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification: a relative path is ignored
        cache = os.path.join("/", os.path.expanduser("~/.cache"))  # "/~" if the user has no home: it cannot be made
    return os.path.join(cache, "zarrfs", "index")


def unsafe(directory: str) -> str | None:
    """Return why other users could replace the indexes in a directory; None if they cannot."""
    status = os.stat(directory)
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "may be written by other users: chmod go-w"
    return None if os.access(directory, os.W_OK) else "not writable"
