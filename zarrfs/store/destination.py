"""Output paths that a user names: check them, write to a temporary directory beside them, rename when complete."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from typing import NamedTuple

from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.store.writing import lock
from zarrfs.system.renaming import EXCHANGE, rename

_UNFINISHED = "new"  # prefix of names in a temporary directory


class Placement(NamedTuple):
    """The path `new` to write to; `own`: the output path and its temporary directory, which are no input."""

    new: str
    own: tuple[str, ...]


@contextlib.contextmanager
def placed(shown: str, form: str, replace: bool, sync: bool = True) -> Iterator[Placement]:
    """Provide a path for a new file, or directory (form "directory"), and rename it to `shown` at the end.

    The result is synced to disk, except that a file is not if `sync` is False. If the block raises an exception, the
    new file or directory is removed. Raise UsageError as check_destination(), and SourceError if writing fails.
    """
    path = os.path.realpath(shown)
    check_destination(shown, form, replace)
    directory, name = os.path.split(path)
    name = os.fsdecode(os.fsencode(name)[:200])  # so that the temporary name has at most 255 bytes
    held = -1
    try:
        _remove_abandoned(directory, name)
        work, held = _work_directory(directory, name)
        new, old = os.path.join(work, "new"), os.path.join(work, "old")
        yield Placement(new, (path, work))
        if form == "directory":
            sync_file_system(work)  # not each file: links must not be followed, and modes may forbid opening
            _make_writable(path)
        elif sync:
            _sync_all(new)
        check_destination(shown, form, replace)  # again, because writing may have taken long
        _rename(new, path, old)
        if sync:
            sync_path(directory)
        if form == "directory":
            remove_tree(old)
    except (OSError, sqlite3.Error) as exc:  # SQLite raises its own: a full disk, a value over 1 GB
        raise SourceError(shown, f"cannot be written: {getattr(exc, 'strerror', None) or exc}") from exc
    finally:
        if held >= 0:
            if not os.path.lexists(old):
                with contextlib.suppress(OSError):
                    remove_tree(work)
            os.close(held)


def _work_directory(directory: str, name: str) -> tuple[str, int]:
    """Create a temporary directory for `name`; return its path, and a descriptor that holds its lock."""
    while True:
        work = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")
        try:
            os.mkdir(work, 0o700)
            with contextlib.suppress(FileNotFoundError):  # another command removed it before it was locked
                held = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if lock(held) is not False and os.fstat(held).st_nlink:
                    return work, held
                os.close(held)
        except BaseException:  # also Ctrl-C: the caller does not know the directory yet
            with contextlib.suppress(OSError):
                os.rmdir(work)
            raise


def _remove_abandoned(directory: str, name: str) -> None:
    """Remove temporary directories that killed commands left for `name`, unless they hold a replaced directory."""
    form = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp")
    for entry in filter(form.fullmatch, os.listdir(directory)):
        work = os.path.join(directory, entry)
        with contextlib.suppress(OSError):
            held = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(held)
                ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
                if ours and lock(held) and all(name.startswith(_UNFINISHED) for name in os.listdir(held)):
                    remove_tree(work)
            finally:
                os.close(held)


def check_destination(shown: str, form: str, replace: bool) -> None:
    """Raise UsageError unless `shown` is free, or `replace` is set and `form` may replace the existing entry.

    A document or zip file replaces any file, a directory any directory. An empty directory counts as free.
    """
    if not shown:
        raise UsageError("an empty name of a file")
    path = os.path.realpath(shown)
    try:
        status = os.stat(shown)  # not `path`: /dev/stdout may be a pipe, which has no path
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path)):
            raise UsageError(f"{shown}: no such directory") from None
        if shown.endswith("/") and form != "directory":
            raise UsageError(f"{shown}: names a directory; {form} is a file") from None
        return
    except OSError as exc:
        raise UsageError(f"{shown}: {reason_of(exc)}") from exc
    if stat.S_ISDIR(status.st_mode):
        if form != "directory":
            raise UsageError(f"{shown}: is a directory; {form} is a file")
        try:
            if not os.listdir(path):
                return
        except OSError as exc:
            raise UsageError(f"{shown}: {exc.filename}: {reason_of(exc)}") from exc
    elif form == "directory":
        raise UsageError(f"{shown}: is a file; what is to be written is a directory")
    elif not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{shown}: is no regular file")
    if not replace:
        raise UsageError(f"{shown}: already exists; --force replaces it")


def is_utf8(path: str) -> bool:
    """Return whether a path, decoded by os.fsdecode(), is UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- names


def remove_tree(path: str) -> None:
    """Delete a file, a symbolic link itself, or a directory with everything below it; do nothing if it is absent.

    Directories need not be writable. Raise OSError, for example for entries of another user.
    """
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    _make_writable(path)
    for at, names, _ in os.walk(path):
        for name in names:
            _make_writable(os.path.join(at, name))
    shutil.rmtree(path)


def _make_writable(path: str) -> None:
    """Make a directory writable for its owner: otherwise it can neither be moved nor emptied."""
    with contextlib.suppress(OSError):  # the rename or removal that follows reports the failure
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(path, mode | stat.S_IRWXU)


def _rename(new: str, path: str, old: str) -> None:
    """Rename `new` to `path`; a directory that it replaces, unless empty, is renamed to `old`."""
    if not os.path.isdir(path) or not os.listdir(path):
        os.rename(new, path)
        return
    os.rename(new, old)  # from here on _remove_abandoned() keeps the temporary directory
    if _exchange(old, path):
        return
    os.rename(old, new)
    os.rename(path, old)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(old, path)
        raise


def _exchange(one: str, other: str) -> bool:
    """Swap two names atomically; return False if the kernel or the file system cannot."""
    try:
        rename(os.fsencode(one), os.fsencode(other), EXCHANGE)
    except OSError:
        return False
    return True


def _sync_all(path: str) -> None:
    """Sync a file, or a directory and everything below it, to disk."""
    for directory, _, names in os.walk(path):
        for name in names:
            sync_path(os.path.join(directory, name))
        sync_path(directory)
    if not os.path.isdir(path):
        sync_path(path)


def sync_file_system(path: str) -> None:
    """Sync the file system that holds `path` to disk. Raise OSError. Source: syncfs(2)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(descriptor)


def sync_path(path: str) -> None:
    """Sync a file, or the names in a directory, to disk. Raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
