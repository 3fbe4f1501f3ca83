"""The cache directory of indexes: which indexes are trusted, and which may be removed.

An index is called DIGEST.SHA256.index. DIGEST is a hash of the document, the options that shape its index, and the
version of the layout; SHA256 is the hash of the index file itself. An index is not used if it belongs to another user
than this one or root, if others may write it, or if its content does not match its name.

Hashing a large document and its index at every mount would take longer than everything else. Each user therefore has
notes STAMP.UID.known of verified indexes. STAMP identifies a version of a document (a local one by its attributes from
stat(2), including ctime) and the options. The note holds the name of the index and its attributes from stat(2) when it
was verified. A small index is hashed in any case, so it need not be synced to disk before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from zarrfs.config.options import Options
from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.store.indexfile import add_notes, read_notes

_INDEX_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})\.index")
_SCRATCH_NAME = re.compile(r"\.zarrfs-.*\.tmp")  # files that are being written, and lock files
_MEMORY = "/dev/shm"
_OWN = "zarrfs-index-"  # prefix of a temporary directory with one index
_FORGOTTEN = 3600.0  # seconds: an older one was left by a killed process
_SMALL = 1 << 20  # bytes: a smaller index is hashed at each use instead of synced to disk once
_swept = set[str]()  # directories that this process has swept
_ABANDONED = 86_400.0  # seconds: an older temporary file was left by a killed writer


class IndexCache:
    """The directory of indexes: index_dir=, else one in the user's cache directory.

    If the latter cannot be used, new() makes a `temporary` directory instead. With cache=none it always does so, in
    memory if there is room, and no index is found or remembered.
    """

    def __init__(self, options: Options) -> None:
        self.temporary = False
        self._keeps = options.cache != "none"
        self._memory = None if self._keeps else memory_directory()
        self._asked = options.index_dir is not None
        self.directory = _directory(options)
        self._problem: str | None = None
        if not self._keeps:
            return
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self._problem = unsafe(self.directory)
            if not os.access(self.directory, os.W_OK):
                self._problem = "not writable"
        except OSError as exc:
            self._problem = f"cannot be made: {reason_of(exc)}"

    def recall(self, stamp: str) -> tuple[str, dict[str, str]] | None:
        """Return (path, notes) of the index that remember() noted for `stamp`.

        Return None if none was noted, or if the index has changed since.
        """
        if not self._keeps:
            return None
        for user in dict.fromkeys((os.geteuid(), 0)):
            known = self._note(stamp, user)
            try:
                with _own_file(known) as file:
                    name, seen = json.load(file)
                if not _INDEX_NAME.fullmatch(name) or _stat_of(path := os.path.join(self.directory, name)) != seen:
                    continue
                if os.path.getsize(path) < _SMALL and not verified(path):
                    continue
                notes = read_notes(path)
            except (OSError, ValueError, TypeError, SourceError):
                continue
            with contextlib.suppress(OSError):
                os.utime(known)  # the time of its last use
            return path, notes
        return None

    def remember(self, stamp: str, path: str) -> None:
        """Note that the document with the stamp `stamp` has the verified index `path`.

        Errors are ignored: they only cost time at the next mount.
        """
        if self.temporary or not stamp:
            return
        with contextlib.suppress(OSError):
            note = json.dumps([os.path.basename(path), _stat_of(path)])
            self._write(self._note(stamp, os.geteuid()), note.encode(), 0o644)  # safe with any umask: see _is_safe()

    def _note(self, stamp: str, user: int) -> str:
        """Return the path of a user's note.

        Each user has their own, because in a directory with the sticky bit no user can replace another's file.
        """
        return os.path.join(self.directory, f"{stamp}.{user}.known")

    def find(self, digest: str) -> tuple[str, dict[str, str]] | None:
        """Return (path, notes) of a trusted index for `digest`; remove those that are not trusted."""
        for path in self._candidates(digest):
            if verified(path):
                with contextlib.suppress(SourceError):
                    return path, read_notes(path)
            with contextlib.suppress(OSError):
                if os.lstat(path).st_uid == os.geteuid() or os.geteuid() == 0:  # another owner may trust it
                    os.unlink(path)
        return None

    @contextlib.contextmanager
    def new(self) -> Iterator[str]:
        """Provide a path to write an index to, and remove the file on exit unless keep() has renamed it.

        Raise UsageError if index_dir= is set but cannot be used.
        """
        if self._problem is not None and self._asked:
            raise UsageError(f"option index_dir={self.directory}: {self._problem}")
        if self._problem is not None or not self._keeps:
            if self._memory is not None:
                _sweep_memory(self._memory)
            self.directory, self.temporary = tempfile.mkdtemp(prefix=_OWN, dir=self._memory), True
        self._sweep()
        scratch = os.path.join(self.directory, f".zarrfs-{secrets.token_hex(8)}.tmp")
        try:
            yield scratch
        except BaseException:
            if self.temporary:
                shutil.rmtree(self.directory, ignore_errors=True)
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(scratch)

    def leave_memory(self) -> bool:
        """Write further indexes to a disk, because memory is full; return False if they were not in memory."""
        was, self._memory = self._memory, None
        return was is not None

    def documents(self) -> str | None:
        """Return the directory for copies of fetched documents; None for the system's temporary directory."""
        if not self._keeps:
            return self._memory
        return self.directory if os.path.isdir(self.directory) else None

    def lock_path(self, name: str) -> str | None:
        """Return the path of the lock file for the document with this stamp or digest; None if no index is kept."""
        if not self._keeps or self._problem is not None:
            return None
        return os.path.join(self.directory, f".zarrfs-{name}.tmp")

    def keep(self, scratch: str, digest: str) -> str:
        """Rename a finished index to its final name; return its path. Raise OSError or sqlite3.Error."""
        try:
            return self._rename(scratch, digest)
        except PermissionError:
            # Another user's index of this name cannot be replaced, because the directory has the sticky bit. The salt
            # gives this index another hash and so another name.
            add_notes(scratch, [("salt", secrets.token_hex(8))])
            return self._rename(scratch, digest)

    def _rename(self, scratch: str, digest: str) -> str:
        with open(scratch, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
            if file.tell() >= _SMALL:
                os.fsync(file.fileno())
        path = os.path.join(self.directory, f"{digest}.{content}.index")
        os.rename(scratch, path)
        return path

    def _write(self, path: str, data: bytes, mode: int) -> None:
        """Write a small file atomically, by a rename."""
        scratch = os.path.join(self.directory, f".zarrfs-{secrets.token_hex(8)}.tmp")
        try:
            with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
            os.rename(scratch, path)
        except BaseException:
            os.unlink(scratch)
            raise

    def _candidates(self, digest: str) -> list[str]:
        """Return the paths of all indexes named for `digest`."""
        if not self._keeps:
            return []
        try:
            names = os.listdir(self.directory)
        except OSError:
            return []
        found = [name for name in names if name.startswith(f"{digest}.") and _INDEX_NAME.fullmatch(name)]
        return [os.path.join(self.directory, name) for name in found]

    def _sweep(self) -> None:
        """Remove the temporary files of killed writers, once per process and directory."""
        if self.directory in _swept:
            return
        _swept.add(self.directory)
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # a file of another user
                    if _SCRATCH_NAME.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > _ABANDONED:
                        os.unlink(entry.path)


def _directory(options: Options) -> str:
    return os.path.abspath(options.index_dir) if options.index_dir else usual_directory()


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
    """Return why other users could replace an index between its verification and its use; None if they cannot.

    A group that may write the directory is trusted (docs/security.md).
    """
    status = os.stat(directory)
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, who could replace its files"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return "may be written by any user, who could replace its files: chmod o-w, or +t"
    return None


def memory_directory() -> str | None:
    """Return a writable directory whose files are in memory, not on a disk; None if there is none."""
    from zarrfs.system.mounts import mount_at

    with contextlib.suppress(OSError):
        found = mount_at(_MEMORY)
        if found is not None and found.fstype in ("tmpfs", "ramfs") and os.access(_MEMORY, os.W_OK | os.X_OK):
            return _MEMORY
    return None


def _sweep_memory(place: str) -> None:
    """Remove the directories that killed processes left in memory; a live process needs its own for seconds only."""
    with os.scandir(place) as entries:
        left = [entry for entry in entries if entry.name.startswith(_OWN) and entry.is_dir(follow_symlinks=False)]
    for entry in left:
        with contextlib.suppress(OSError):
            with os.scandir(entry.path) as files:
                times = {file.name: file.stat(follow_symlinks=False).st_mtime for file in files}
            status = entry.stat(follow_symlinks=False)
            ours = all(_INDEX_NAME.fullmatch(name) or _SCRATCH_NAME.fullmatch(name) for name in times)
            old = time.time() - max([status.st_mtime, *times.values()]) > _FORGOTTEN
            if ours and old and status.st_uid == os.geteuid():
                for name in times:
                    os.unlink(os.path.join(entry.path, name))
                os.rmdir(entry.path)


def verified(path: str) -> bool:
    """Return whether a file is trusted: its owner and mode are right, and its content matches its name."""
    try:
        with _own_file(path) as file:
            return _matches(path, file)
    except OSError:
        return False


def _is_safe(status: os.stat_result) -> bool:
    """Return whether a file is regular, and only its owner may write it."""
    return stat.S_ISREG(status.st_mode) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _matches(path: str, file: Any) -> bool:
    """Return whether a file has the SHA-256 in its name."""
    return hashlib.file_digest(file, "sha256").hexdigest() == path.rsplit(".", 2)[1]


@contextlib.contextmanager
def _own_file(path: str) -> Iterator[Any]:
    """Open a regular file that belongs to this user or root and that only its owner may write; else raise OSError."""
    with open(path, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0) or not _is_safe(status):
            raise PermissionError(path)
        yield file


def _open(path: str, flags: int) -> int:
    """Open a file of unknown origin: neither follow a link nor wait for the writer of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _stat_of(path: str) -> list[int]:
    """Return attributes of which at least one changes with the file, as no program can set the ctime."""
    status = os.lstat(path)
    return [status.st_ino, status.st_uid, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
