"""Where something goes that a user has named: looked at before, written beside it, and put there when it is whole."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from typing import NamedTuple

from zarrfs.errors import SourceError, UsageError
from zarrfs.store.staging import lock
from zarrfs.system.renaming import EXCHANGE, rename

_DOCUMENT = ".zmetadata"
_RECORD_FILE = re.compile(r"refs\.[0-9]+\.parq")
_DIRECTORIES = {"parquet": "a Parquet set", "directory": "what is to be written"}


class Placement(NamedTuple):
    """What is written has the path `new`; `own` are paths of ours that were not there, or will not be."""

    new: str
    own: tuple[str, ...]


@contextlib.contextmanager
def placed(shown: str, form: str, replace: bool, sync: bool = True) -> Iterator[Placement]:
    """Somewhere to write a file, or a directory ("parquet", "directory"), which then becomes `shown`, at once.

    It is on the disk then, unless a file is not to be (`sync`). Leaving the block with an exception leaves nothing
    behind. UsageError as check_destination(), SourceError where writing fails.
    """
    path = os.path.realpath(shown)
    check_destination(shown, form, replace)
    directory, name = os.path.split(path)
    name = os.fsdecode(os.fsencode(name)[:200])  # a name has up to 255 bytes
    held = -1
    try:
        _remove_abandoned(directory, name)
        work, held = _work_directory(directory, name)
        new, old = os.path.join(work, "new"), os.path.join(work, "old")
        yield Placement(new, (path, work))
        if form == "directory":
            sync_file_system(work)  # of what is in it, links are not ours to follow, and not all may be opened
            _make_writable(path)
        elif sync:
            _sync_all(new)
        check_destination(shown, form, replace)  # it may have taken long
        _rename(new, path, old)
        if sync:
            _sync(directory)
        if form == "directory":
            remove_tree(old)
        else:
            _remove_set(old)
    except (OSError, sqlite3.Error) as exc:  # SQLite has its own: a full disk, a value over 1 GB
        raise SourceError(shown, f"cannot be written: {getattr(exc, 'strerror', None) or exc}") from exc
    finally:
        if held >= 0:
            if not os.path.lexists(old):
                with contextlib.suppress(OSError):
                    remove_tree(work)
            os.close(held)
    if os.path.lexists(old):
        raise SourceError(shown, f"is written; what came into the old directory meanwhile is in {old}")


def _work_directory(directory: str, name: str) -> tuple[str, int]:
    """A new directory for what is to be called `name`, and a descriptor with its lock, which says that we live."""
    while True:
        work = os.path.join(directory, f".{name}.{secrets.token_hex(8)}.tmp")
        os.mkdir(work, 0o700)
        with contextlib.suppress(FileNotFoundError):  # whoever removes what was abandoned was quicker than our lock
            held = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if lock(held) is not False and os.fstat(held).st_nlink:
                return work, held
            os.close(held)


def _remove_abandoned(directory: str, name: str) -> None:
    """Remove what killed commands have left of the same name, but where one had put away what was there before."""
    form = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}\.tmp")
    for entry in filter(form.fullmatch, os.listdir(directory)):
        work = os.path.join(directory, entry)
        with contextlib.suppress(OSError):
            held = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(held)
                ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
                if ours and lock(held) and all(name.startswith("new") for name in os.listdir(held)):
                    remove_tree(work)
            finally:
                os.close(held)


def check_destination(shown: str, form: str, replace: bool) -> None:
    """UsageError unless `shown` is free, or is to be replaced and is what something of this form may replace.

    A document or zip file replaces any file, an index only an index, a Parquet set only a directory with nothing
    else, and a directory any directory.
    """
    if not shown:
        raise UsageError("an empty name of a file")
    path = os.path.realpath(shown)
    try:
        status = os.stat(shown)  # not `path`: a pipe, which /dev/stdout may lead to, has none
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path)):
            raise UsageError(f"{shown}: no such directory") from None
        if shown.endswith("/") and form not in _DIRECTORIES:
            raise UsageError(f"{shown}: names a directory; {form} is a file") from None
        return
    except OSError as exc:
        raise UsageError(f"{shown}: {(exc.strerror or str(exc)).lower()}") from exc
    if stat.S_ISDIR(status.st_mode):
        if form not in _DIRECTORIES:
            raise UsageError(f"{shown}: is a directory; {form} is a file")
        try:
            if not os.listdir(path):
                return
            if form == "parquet":
                _check_set(shown, path)
        except OSError as exc:
            raise UsageError(f"{shown}: {exc.filename}: {(exc.strerror or str(exc)).lower()}") from exc
    elif form in _DIRECTORIES:
        raise UsageError(f"{shown}: is a file; {_DIRECTORIES[form]} is a directory")
    elif not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{shown}: is no regular file")
    elif form == "index" and not _is_index(path):
        raise UsageError(f"{shown}: is there already, and is no index: it stays")
    if not replace:
        raise UsageError(f"{shown}: is there already; --force replaces it")


def is_utf8(path: str) -> bool:
    """Whether a path, as Python has it, is UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_index(path: str) -> bool:
    """Whether it is an index, of whatever version. Source: the SQLite file format, application id."""
    from zarrfs.store.indexfile import APPLICATION_ID, MAGIC

    try:
        with open(path, "rb") as file:
            head = file.read(72)
    except OSError:
        return False
    return head.startswith(MAGIC) and head[68:72] == APPLICATION_ID.to_bytes(4, "big")


# -- directories in the Parquet layout


def _check_set(shown: str, directory: str) -> None:
    """UsageError unless there is a set, and nothing else: its relative URLs may name files beside it."""
    try:
        with open(os.path.join(directory, _DOCUMENT), "rb") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "record_size" not in found:
        raise UsageError(f"{shown}: holds something else than a reference set: it stays")
    metadata = found.get("metadata")
    arrays = {key.removesuffix("/.zarray") for key in metadata} if isinstance(metadata, dict) else set()
    for key, is_file in _below(directory):
        array, _, name = key.rpartition("/")
        own = key == _DOCUMENT or (array in arrays and _RECORD_FILE.fullmatch(name))
        if not (own and is_file):
            raise UsageError(f"{shown}: holds {key}, which is no part of the reference set: it stays")


def _below(directory: str, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """(relative path, whether it is a regular file) of all below a directory that are no directories themselves."""
    with os.scandir(os.path.join(directory, prefix)) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        key = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _below(directory, f"{key}/")
        else:
            yield key, entry.is_file(follow_symlinks=False)


def _remove_set(directory: str) -> None:
    """Remove the files of a set and its empty directories; what else came in meanwhile stays."""
    for at, _, names in os.walk(directory, topdown=False):
        for name in names:
            if _RECORD_FILE.fullmatch(name) or (name == _DOCUMENT and at == directory):
                os.unlink(os.path.join(at, name))
        with contextlib.suppress(OSError):
            os.rmdir(at)


# -- names


def remove_tree(path: str) -> None:
    """Delete a file, a link itself, or a directory with all below it, whatever its mode; nothing there is fine.

    OSError for what is another user's.
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
    """Let its owner write to a directory: without that it can neither be moved nor emptied."""
    with contextlib.suppress(OSError):  # what really is in the way shows later
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(path, mode | stat.S_IRWXU)


def _rename(new: str, path: str, old: str) -> None:
    """Give what is whole its name; a directory that was there is called `old` afterwards."""
    if not os.path.isdir(path) or not os.listdir(path):
        os.rename(new, path)
        return
    os.rename(new, old)  # from here on nobody takes for abandoned what is there, whichever of the two it is
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
    """Swap two names in one step; False where the kernel or the file system cannot."""
    try:
        rename(os.fsencode(one), os.fsencode(other), EXCHANGE)
    except OSError:
        return False
    return True


def _sync_all(path: str) -> None:
    """Have a file, or a directory and all below it, on the disk."""
    for directory, _, names in os.walk(path):
        for name in names:
            _sync(os.path.join(directory, name))
        _sync(directory)
    if not os.path.isdir(path):
        _sync(path)


def sync_file_system(path: str) -> None:
    """Have all that was written to the file system of `path` on the disk. OSError. Source: syncfs(2)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(descriptor)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
