"""Removing what a copy has written to a directory, and nothing else that is there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct

from zarrfs.copying.destination_journal import STAGING, Spans
from zarrfs.system.beneath import BaseDirectory

_RWX = stat.S_IRWXU
_BTIME = 0x800  # of statx(2): the time of birth is asked for, and told
_MASK, _BORN = struct.Struct("=I"), struct.Struct("=80xqI")  # where its struct has these
_statx = getattr(ctypes.CDLL(None), "statx", None)


def remove_written(path: str, spans: Spans) -> int:
    """Delete the files in the directory `path` that were made, and have last changed, within `spans`.

    With them go empty directories that were made then. Gives how many others there are; no link is followed. A file
    system that tells no time of birth has ctime alone. OSError.
    """
    base = BaseDirectory(path)
    try:
        return _Removal(base, spans).run()
    finally:
        base.close()


class _Removal:
    """One call of remove_written()."""

    def __init__(self, base: BaseDirectory, spans: Spans) -> None:
        self._base, self._spans = base, spans
        self._left = 0
        self._modes: dict[bytes, int] = {}  # of directories that had to be opened up
        self._filled: set[bytes] = set()  # directories that something was in

    def run(self) -> int:
        """Go through all of it, however deep."""
        waiting = [(b"", False)]
        while waiting:
            key, emptied = waiting.pop()
            try:
                if emptied:
                    self._remove_directory(key)
                else:
                    below = self._empty(key)
                    waiting.append((key, True))
                    waiting += [(key + b"/" + name if key else name, False) for name in below]
            except FileNotFoundError:  # somebody else was quicker
                pass
            except (PermissionError, NotADirectoryError):  # another user's; not what it was
                self._left += 1
        return self._left

    def _empty(self, key: bytes) -> list[bytes]:
        """Delete files of a directory; the names of the directories in it."""
        below = []
        directory = self._base.directory(key)
        try:
            here = f"/proc/self/fd/{directory}"
            mode = stat.S_IMODE(os.fstat(directory).st_mode)
            if mode & _RWX != _RWX:
                os.chmod(here, mode | _RWX)
                self._modes[key] = mode
            for entry in os.listdir(here):
                name = os.fsencode(entry)
                if key or name != STAGING:
                    self._filled.add(key)
                    if self._is_directory(directory, name):
                        below.append(name)
        finally:
            os.close(directory)
        return below

    def _is_directory(self, directory: int, name: bytes) -> bool:
        """Whether it is one; else it is deleted if it is ours."""
        try:
            status = os.lstat(name, dir_fd=directory)
            if stat.S_ISDIR(status.st_mode):
                return True
            if self._within(status.st_ctime_ns) and self._within(_born(directory, name), status.st_ctime_ns):
                os.unlink(name, dir_fd=directory)
            else:
                self._left += 1
        except FileNotFoundError:
            pass
        except PermissionError:
            self._left += 1
        return False

    def _remove_directory(self, key: bytes) -> None:
        """Delete an empty directory if it is ours; any other one is as it was."""
        above, _, name = key.rpartition(b"/")
        directory = self._base.directory(above)
        try:
            if key:
                changed = os.lstat(name, dir_fd=directory).st_ctime_ns
                unknown = self._spans[0][0] if self._spans and key in self._filled else changed
                if self._within(_born(directory, name), unknown):
                    with contextlib.suppress(OSError):  # not empty: something else is in it, and stays
                        os.rmdir(name, dir_fd=directory)
                        self._modes.pop(key, None)
            if key in self._modes:
                os.chmod(name or b".", self._modes[key], dir_fd=directory)
        finally:
            os.close(directory)

    def _within(self, time_ns: int | None, unknown: int = 0) -> bool:
        """Whether a time, or one that stands for it where it is unknown, lies in a span."""
        at = unknown if time_ns is None else time_ns
        return any(since <= at <= until for since, until in self._spans)


def _born(directory: int, name: bytes) -> int | None:
    """When a file was made, in ns; None where its file system does not tell. Source: statx(2)."""
    found = ctypes.create_string_buffer(256)
    if _statx is None or _statx(directory, name, 0x100, _BTIME, found):  # AT_SYMLINK_NOFOLLOW
        return None
    if not _MASK.unpack_from(found)[0] & _BTIME:
        return None
    seconds, ns = _BORN.unpack_from(found)
    return int(seconds) * 10**9 + int(ns)
