"""Removal of the entries that a copy wrote to a directory, and of no other entries."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct

from zarrfs.copying.destination_journal import STAGING, Spans
from zarrfs.system.beneath import BaseDirectory

_RWX = stat.S_IRWXU
_BTIME = 0x800  # STATX_BTIME of statx(2): the birth time is requested, or in stx_mask was returned
_MASK, _BORN = struct.Struct("=I"), struct.Struct("=80xqI")  # stx_mask and stx_btime in struct statx
_statx = getattr(ctypes.CDLL(None), "statx", None)


def remove_written(path: str, spans: Spans) -> int:
    """Delete the files below the directory `path` whose birth time and ctime are within `spans`.

    Also delete empty directories that were created then. Return the number of other files, which stay. Symbolic links
    are not followed. On a file system without birth times only ctime counts, and a directory that had entries counts
    as created then. Raise OSError.
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
        self._modes: dict[bytes, int] = {}  # original modes of directories that were made writable
        self._filled: set[bytes] = set()  # directories that contained entries

    def run(self) -> int:
        """Walk the whole tree, without recursion, and return how many entries stay."""
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
            except FileNotFoundError:  # another process removed it first
                pass
            except (PermissionError, NotADirectoryError):  # it belongs to another user, or was replaced meanwhile
                self._left += 1
        return self._left

    def _empty(self, key: bytes) -> list[bytes]:
        """Delete the files in a directory that the copy wrote; return the names of its subdirectories."""
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
        """Return whether an entry is a directory; delete any other entry if the copy wrote it."""
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
        """Delete a directory if the copy created it and it is empty; otherwise restore its mode."""
        above, _, name = key.rpartition(b"/")
        directory = self._base.directory(above)
        try:
            if key:
                changed = os.lstat(name, dir_fd=directory).st_ctime_ns
                unknown = self._spans[0][0] if self._spans and key in self._filled else changed
                if self._within(_born(directory, name), unknown):
                    with contextlib.suppress(OSError):  # not empty: it contains other entries
                        os.rmdir(name, dir_fd=directory)
                        self._modes.pop(key, None)
            if key in self._modes:
                os.chmod(name or b".", self._modes[key], dir_fd=directory)
        finally:
            os.close(directory)

    def _within(self, time_ns: int | None, unknown: int = 0) -> bool:
        """Return whether a time, or `unknown` if it is None, is within a span."""
        at = unknown if time_ns is None else time_ns
        return any(since <= at <= until for since, until in self._spans)


def _born(directory: int, name: bytes) -> int | None:
    """Return the birth time of a file, in ns; None if its file system has none. Source: statx(2)."""
    found = ctypes.create_string_buffer(256)
    if _statx is None or _statx(directory, name, 0x100, _BTIME, found):  # AT_SYMLINK_NOFOLLOW
        return None
    if not _MASK.unpack_from(found)[0] & _BTIME:
        return None
    seconds, ns = _BORN.unpack_from(found)
    return int(seconds) * 10**9 + int(ns)
