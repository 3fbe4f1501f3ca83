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
import dataclasses
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
_HEADER_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})\.netcdf")  # headers of view=netcdf
_SCRATCH_NAME = re.compile(r"\.zarrfs-.*\.tmp")  # files that are being written, and lock files
_MEMORY = "/dev/shm"
_OWN = "zarrfs-index-"  # prefix of a temporary directory with one index
_FORGOTTEN = 3600.0  # seconds: an older one was left by a killed process
DAMAGED = "damaged"  # CachedFile.problem: the content does not match the name, or others may write the file
FOREIGN = "of another user"  # the file is sound, but neither ours nor root's; its owner may use it
UNFINISHED = "unfinished"  # the file is being written, or its writer was killed
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


def _problem(path: str) -> str:
    """Return why this user cannot use a file, DAMAGED or FOREIGN; "" if it is trusted."""
    if verified(path):
        return ""
    try:
        owner = os.lstat(path).st_uid
        with open(path, "rb", opener=_open) as file:
            sound = _is_safe(os.fstat(file.fileno())) and _matches(path, file)
    except PermissionError:
        sound = True  # not readable, so not known to be damaged
    except OSError:
        return DAMAGED
    return FOREIGN if sound and owner not in (os.geteuid(), 0) else DAMAGED


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


# -- administration: `zarrfs cache`


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """One file of the cache directory; times are in seconds since 1970."""

    path: str
    size: int  # bytes
    made: float
    used: float  # time of the last use by a mount, as far as known
    kind: str  # of the source: references, archive or icechunk; netcdf: another file; "": useless
    source: str  # the source that it was first made from; "" if unknown
    problem: str = ""  # why the file is useless


def cached_files(options: Options) -> list[CachedFile]:
    """Return the files of the cache, most recently used first. Raise UsageError if the directory cannot be read."""
    directory = _directory(options)
    try:
        names = os.listdir(directory)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and not options.index_dir:  # nothing was mounted yet
            return []
        raise UsageError(f"{'option index_dir=' if options.index_dir else ''}{directory}: {reason_of(exc)}") from None
    used: dict[str, float] = {}
    for _, index, when in _remembered(directory):
        used[index] = max(used.get(index, 0.0), when)
    found = []
    for name in names:
        path = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError):  # another process may be pruning
            if _INDEX_NAME.fullmatch(name):
                found.append(_index(path, used.get(name, 0.0)))
            elif _HEADER_NAME.fullmatch(name):
                status = os.lstat(path)
                found.append(
                    CachedFile(path, status.st_size, status.st_mtime, status.st_mtime, "netcdf", "", _problem(path))
                )
            elif _SCRATCH_NAME.fullmatch(name):
                status = os.lstat(path)
                found.append(CachedFile(path, status.st_size, status.st_mtime, status.st_mtime, "", "", UNFINISHED))
    return sorted(found, key=lambda one: -one.used)


def prune(options: Options, older_than: float, max_size: int | None, dry_run: bool) -> tuple[list[CachedFile], int]:
    """Remove useless files, those not used for `older_than` seconds, and the least recently used beyond `max_size`.

    Return the removed files (with `dry_run`: the files to remove), and the bytes of the files that are left, including
    files that only another user may remove. A mount that uses an index keeps it open until the mount ends.
    """
    now = time.time()
    gone, left = [], 0
    for one in cached_files(options):
        too_much = max_size is not None and left + one.size > max_size
        if one.problem == UNFINISHED:
            old = now - one.made > _ABANDONED
        else:
            old = one.problem not in ("", FOREIGN) or now - one.used > older_than or too_much
        if old:
            gone.append(one)
        else:
            left += one.size
    if not dry_run:
        stay = {one.path for one in gone if not _removed(one.path)}
        left += sum(one.size for one in gone if one.path in stay)
        gone = [one for one in gone if one.path not in stay]
        directory = _directory(options)
        for path, index, _ in _remembered(directory) if os.path.isdir(directory) else ():
            if not os.path.exists(os.path.join(directory, index)):
                with contextlib.suppress(OSError):
                    os.unlink(path)
    return gone, left


def _removed(path: str) -> bool:
    """Remove a file; return False if this user may not."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except PermissionError:
        return False
    return True


def verify(options: Options) -> tuple[int, list[CachedFile]]:
    """Verify every index and header; remove the damaged ones that belong to this user (root: all damaged ones).

    Return the number of files in the cache, without unfinished ones, and the damaged files. A file of another user
    that cannot be read is not verified.
    """
    found = [one for one in cached_files(options) if one.problem != UNFINISHED]
    bad = [one for one in found if one.problem == DAMAGED]
    for one in bad:
        with contextlib.suppress(OSError):
            if os.geteuid() in (0, os.lstat(one.path).st_uid):  # another owner may trust it
                os.unlink(one.path)
    return len(found), bad


def _index(path: str, used: float) -> CachedFile:
    status = os.lstat(path)
    used = max(used, status.st_mtime)
    about: tuple[str, ...] = "", "", _problem(path)
    if not about[2]:
        try:
            notes = read_notes(path)
            about = notes["kind"], notes.get("source", "")
        except SourceError as exc:
            about = "", "", exc.rule
    return CachedFile(path, status.st_size, status.st_mtime, used, *about)


def _remembered(directory: str) -> Iterator[tuple[str, str, float]]:
    """Yield (path, name of the index, time of last use) of every note of IndexCache.remember()."""
    for name in os.listdir(directory):
        if name.endswith(".known"):
            path = os.path.join(directory, name)
            damages = contextlib.suppress(OSError, ValueError, TypeError, IndexError)
            with damages, open(path, "rb", opener=_open) as file:
                index = json.load(file)[0]
                if isinstance(index, str):
                    yield path, index, os.fstat(file.fileno()).st_mtime
