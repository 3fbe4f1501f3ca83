"""Operations on a tree of files, and snapshots to compare a mount with a plain directory after the same operations."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
NOREPLACE, EXCHANGE = 1, 2  # flags of renameat2
NOW, OMIT = (1 << 30) - 1, (1 << 30) - 2  # UTIME_NOW, UTIME_OMIT
OLD = 1_600_000_000 * 10**9  # times before this were set by utimensat or come from the lower store

Outcome = tuple[str, object]


def attempt(call: Callable[[], object]) -> Outcome:
    """Return the result of a call, or the name of its errno."""
    try:
        return "done", call()
    except OSError as exc:
        return "failed", errno.errorcode[exc.errno or 0]


def checked(status: int) -> None:
    """Raise OSError if a call of a libc function failed."""
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Tree:
    """One of the two trees. Keys are relative paths; the caller numbers the handles."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.handles: dict[int, int] = {}

    def path(self, key: str) -> str:
        return os.path.join(self.root, key)

    # -- names

    def mkdir(self, key: str, mode: int) -> None:
        os.mkdir(self.path(key), mode)

    def rmdir(self, key: str) -> None:
        os.rmdir(self.path(key))

    def unlink(self, key: str) -> None:
        os.unlink(self.path(key))

    def symlink(self, target: str, key: str) -> None:
        os.symlink(target, self.path(key))

    def link(self, key: str, new: str) -> None:
        os.link(self.path(key), self.path(new), follow_symlinks=False)

    def mknod(self, key: str, kind: int) -> None:
        os.mknod(self.path(key), kind | 0o640)

    def rename(self, key: str, new: str, flags: int) -> None:
        source, target = os.fsencode(self.path(key)), os.fsencode(self.path(new))
        checked(LIBC.renameat2(AT_FDCWD, source, AT_FDCWD, target, flags))

    # -- attributes

    def chmod(self, key: str, mode: int) -> None:
        os.chmod(self.path(key), mode)

    def chown(self, key: str, uid: int, gid: int) -> None:
        os.chown(self.path(key), uid, gid, follow_symlinks=False)

    def utimens(self, key: str, mtime: int) -> None:
        """Set the modification time (ns since the epoch, or NOW) or, with OMIT, only the access time."""
        own = (0, mtime) if mtime in (NOW, OMIT) else divmod(mtime, 10**9)
        times = (ctypes.c_long * 4)(7, 7, *own) if mtime == OMIT else (ctypes.c_long * 4)(0, OMIT, *own)
        checked(LIBC.utimensat(AT_FDCWD, os.fsencode(self.path(key)), times, 0x100))  # AT_SYMLINK_NOFOLLOW

    def look(self, key: str) -> object:
        """Return the mode of a path and the names in it, following symbolic links."""
        status = os.stat(self.path(key))
        names = sorted(os.listdir(self.path(key))) if stat.S_ISDIR(status.st_mode) else []
        return status.st_mode, names

    # -- bytes by name

    def write(self, key: str, flags: int, mode: int, offset: int, data: bytes) -> int:
        descriptor = os.open(self.path(key), flags | os.O_WRONLY | os.O_NONBLOCK, mode)
        try:
            return os.write(descriptor, data) if flags & os.O_APPEND else os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)

    def truncate(self, key: str, size: int) -> None:
        """Truncate to a different size: with the same size, POSIX requires no new times, and FUSE sets none."""
        path = self.path(key)
        os.truncate(path, size + (os.stat(path).st_size == size))

    # -- bytes by handle

    def open(self, handle: int, key: str, flags: int) -> None:
        self.handles[handle] = os.open(self.path(key), flags | os.O_NONBLOCK, 0o644)

    def close(self, handle: int) -> None:
        os.close(self.handles.pop(handle))

    def pread(self, handle: int, offset: int, length: int) -> bytes:
        return os.pread(self.handles[handle], length, offset)

    def pwrite(self, handle: int, offset: int, data: bytes) -> int:
        return os.pwrite(self.handles[handle], data, offset)

    def append(self, handle: int, data: bytes) -> int:
        return os.pwrite(self.handles[handle], data, os.fstat(self.handles[handle]).st_size)

    def ftruncate(self, handle: int, size: int) -> None:
        os.ftruncate(self.handles[handle], size)

    def fchmod(self, handle: int, mode: int) -> None:
        os.fchmod(self.handles[handle], mode)

    def fsync(self, handle: int) -> None:
        os.fsync(self.handles[handle])

    def map_write(self, handle: int, offset: int, data: bytes) -> bool:
        """Write through shared memory and return True, or False if the file is not long enough."""
        status = os.fstat(self.handles[handle])
        if not stat.S_ISREG(status.st_mode) or status.st_size < offset + len(data):
            return False
        with mmap.mmap(self.handles[handle], offset + len(data), mmap.MAP_SHARED) as memory:
            memory[offset:] = data
            memory.flush()
        return True

    def fstat(self, handle: int) -> object:
        status = os.fstat(self.handles[handle])
        linked = 0 if stat.S_ISDIR(status.st_mode) else status.st_nlink
        return status.st_mode, status.st_uid, linked, 0 if stat.S_ISDIR(status.st_mode) else status.st_size

    def names(self, handle: int) -> list[str]:
        return sorted(os.listdir(self.handles[handle]))

    def create_at(self, handle: int, name: str) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        os.close(os.open(name, flags, 0o600, dir_fd=self.handles[handle]))

    def unlink_at(self, handle: int, name: str) -> None:
        os.unlink(name, dir_fd=self.handles[handle])


# -- comparison


def _walk(directory: str, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            yield prefix + entry.name, entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{prefix}{entry.name}/")


def _content(path: str, status: os.stat_result) -> object:
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(status.st_mode):
        return None
    with open(path, "rb") as file:
        data = file.read()
    assert len(data) == status.st_size, f"{path}: {len(data)} bytes read, {status.st_size} by stat"
    return data


def snapshot(root: Path) -> dict[str, dict[str, object]]:
    """Return everything on which the two trees must agree; for directories, no link counts and times."""
    seen: dict[str, dict[str, object]] = {}
    linked: dict[int, list[str]] = defaultdict(list)
    for key, entry in _walk(str(root)):
        status = entry.stat(follow_symlinks=False)
        assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(status.st_mode), key
        assert entry.is_symlink() == stat.S_ISLNK(status.st_mode), key
        seen[key] = {"mode": oct(status.st_mode), "owner": (status.st_uid, status.st_gid)}
        if stat.S_ISDIR(status.st_mode):
            continue
        seen[key] |= {"links": status.st_nlink, "size": status.st_size, "content": _content(entry.path, status)}
        seen[key]["mtime"] = status.st_mtime_ns if status.st_mtime_ns < OLD else "recent"
        if status.st_nlink > 1:
            linked[status.st_ino].append(key)
    for names in linked.values():
        for key in names:
            seen[key]["same as"] = names
    return seen


def differences(found: dict[str, dict[str, object]], expected: dict[str, dict[str, object]]) -> list[str]:
    """Return one line for each difference."""
    lines = [f"{key}: not there" for key in sorted(expected.keys() - found.keys())]
    lines += [f"{key}: should not be there" for key in sorted(found.keys() - expected.keys())]
    for key in sorted(found.keys() & expected.keys()):
        for name in sorted(found[key].keys() | expected[key].keys()):
            one, other = found[key].get(name), expected[key].get(name)
            if one != other:
                lines.append(f"{key}: {name} is {_brief(one, other)}, not {_brief(other, one)}")
    return lines


def _brief(value: object, other: object) -> str:
    """Format a value for a message; of long bytes, show those at the first difference."""
    if isinstance(value, bytes) and isinstance(other, bytes) and len(value) > 60:
        at = next((n for n, (a, b) in enumerate(itertools.zip_longest(value, other)) if a != b), 0)
        return f"{value[at : at + 20]!r} at {at} of {len(value)}"
    return repr(value)
