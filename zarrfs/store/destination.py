"""Output files that a user names: checked, written without a name, and placed when they are complete."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterator
from typing import IO

from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.store.writing import NewFile, remove_abandoned


@contextlib.contextmanager
def placed(shown: str, form: str, replace: bool) -> Iterator[IO[bytes]]:
    """Provide a new file, which is synced to disk and named `shown` at the end, unless the block raises an exception.

    `form`: what it is, for messages. Raise UsageError as check_destination(), and SourceError if writing fails.
    """
    check_destination(shown, form, replace)
    above, name = os.path.split(os.path.realpath(shown))
    try:
        directory = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # of another user
                remove_abandoned(directory)
            with contextlib.closing(NewFile(directory)) as new:
                with open(new.descriptor, "wb", closefd=False) as file:
                    yield file
                os.fsync(new.descriptor)
                check_destination(shown, form, replace)  # again, because writing may have taken long
                new.place(directory, os.fsencode(name), replace)
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as exc:
        raise SourceError(shown, f"cannot be written: {exc.strerror or exc}") from exc


def check_destination(shown: str, form: str, replace: bool) -> None:
    """Raise UsageError unless `shown` is free, or `replace` is set and it is a file."""
    if not shown:
        raise UsageError("an empty name of a file")
    try:
        status = os.stat(shown)
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(os.path.realpath(shown))):
            raise UsageError(f"{shown}: no such directory") from None
        if shown.endswith("/"):
            raise UsageError(f"{shown}: names a directory; {form} is a file") from None
        return
    except OSError as exc:
        raise UsageError(f"{shown}: {reason_of(exc)}") from exc
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{shown}: is a directory; {form} is a file")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{shown}: is not a regular file")
    if not replace:
        raise UsageError(f"{shown}: already exists; --force replaces it")


def is_utf8(path: str) -> bool:
    """Return whether a path, decoded by os.fsdecode(), is UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def sync_file_system(path: str) -> None:
    """Sync the file system that holds `path` to disk. Raise OSError. Source: syncfs(2)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(descriptor)
