"""The commands of `zarrfs cache` for blocks: list by target, prune, clear, verify. Safe while mounts use them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator

from zarrfs.cache.disk import DamagedBlock, load, parse_record
from zarrfs.cache.diskfiles import BLOBS, Layout, segment_name
from zarrfs.cache.diskindex import Index, IndexRow
from zarrfs.cache.diskspace import Busy, Space, size_of
from zarrfs.errors import UsageError, reason_of

LOCK_PATIENCE = 5.0  # seconds to wait for a writer
BLOBS_SOURCE = "archives"  # the source under which blobs are listed
UNKNOWN = "unknown"  # the source of blocks whose version record was lost
OLD_SOURCE = "an earlier version of zarrfs"


@dataclasses.dataclass
class Target:
    """The cached blocks of one target, in all versions; times in seconds since 1970."""

    source: str = UNKNOWN  # its URL without secrets
    blocks: int = 0
    size: int = 0  # bytes
    used: float = 0.0  # when a segment with its blocks was last read or written, to within a minute
    seen: float = 0.0  # when its server last reported its version; 0.0 if unknown


@dataclasses.dataclass
class Verified:
    """The result of verify(); bytes are those of blocks."""

    checked: int = 0
    bytes: int = 0
    bad: int = 0  # removed
    unreadable: int = 0  # the disk or permissions do not allow reading them


_File = tuple[float, int, str, str]  # time of last use, bytes, directory, name


def targets(directory: str) -> list[Target]:
    """Return the contents of `directory` by target, most recently used first. Raise UsageError if it is unreadable."""
    with _opened(directory) as layout:
        return _by_target(layout, lambda file: True) + _old(layout)


def prune(directory: str, older_than: float, size_max: int | None, dry_run: bool) -> list[Target]:
    """Remove files not used for `older_than` seconds, then the least recently used ones down to `size_max` bytes.

    Segments are removed as a whole. Return the removed blocks (with `dry_run`, those that would be removed) by target.
    Raise UsageError if `directory` cannot be read, or if files in it cannot be removed.
    """
    with _opened(directory) as layout:
        oldest, left = time.time() - older_than, sum(size for _, size, _, _ in _files(layout))
        chosen = set()
        for file in sorted(_files(layout)):
            if file[0] < oldest or (size_max is not None and left > size_max):
                chosen.add(file[2:])
                left -= file[1]
        return _by_target(layout, lambda file: file[2:] in chosen, remove=not dry_run)


def clear(directory: str) -> list[Target]:
    """Remove everything; return the removed blocks by target. Raise UsageError if it cannot be read or removed."""
    with _opened(directory) as layout:
        gone = _by_target(layout, lambda file: True, remove=True)
        with contextlib.suppress(FileNotFoundError):
            os.ftruncate(layout.index(), 0)  # not removed, because locks are on it
        for name in layout.old():
            gone += _old(layout)
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
        return gone


def verify(directory: str, found: Verified | None = None) -> Verified:
    """Read every block, version record and blob, and remove the bad ones. Return the counts.

    The counts are added to `found` during the work. Raise UsageError if `directory` cannot be read.
    """
    found = Verified() if found is None else found
    with _opened(directory) as layout:
        for row in _rows(layout):
            try:
                found.bytes += _verified(layout, row)
            except FileNotFoundError:
                continue  # evicted
            except DamagedBlock:
                found.bad += 1
                _drop(layout, row)
            except OSError as exc:
                found.unreadable += 1
                if exc.errno == errno.EIO:
                    _drop(layout, row)
            found.checked += 1
        for name, _status in layout.blobs():
            try:
                found.bytes += _blob(layout, name)
            except FileNotFoundError:
                continue
            except DamagedBlock:
                found.bad += 1
                layout.remove(BLOBS, name)
            except OSError as exc:
                found.unreadable += 1
                if exc.errno == errno.EIO:
                    layout.remove(BLOBS, name)
            found.checked += 1
    return found


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[Layout]:
    try:
        os.listdir(directory)
        yield Layout(directory, foreign=True)
    except OSError as exc:
        raise UsageError(f"option cache_dir={directory}: {reason_of(exc)}") from None


def _files(layout: Layout) -> Iterator[_File]:
    """Yield every segment and every blob."""
    for number, status in layout.segments():
        yield status.st_mtime, size_of(status), "", segment_name(number)
    for name, status in layout.blobs():
        yield status.st_mtime, size_of(status), BLOBS, name


def _rows(layout: Layout) -> Iterator[IndexRow | bytes]:
    with contextlib.suppress(FileNotFoundError):
        yield from Index(layout.index()).rows()


def _verified(layout: Layout, row: IndexRow | bytes) -> int:
    """Verify the block of a row, and return its length. Raise OSError or DamagedBlock."""
    if isinstance(row, bytes):
        raise DamagedBlock("wrong checksum")
    data, _ = load(layout, row)
    if row.is_record:
        parse_record(bytes(data))
        return 0
    return row.length


def _drop(layout: Layout, row: IndexRow | bytes) -> None:
    with contextlib.suppress(OSError, Busy), Space(layout, 0, 0).locked(LOCK_PATIENCE):
        Index(layout.index()).drop(row)


def _by_target(layout: Layout, chosen: Callable[[_File], bool], remove: bool = False) -> list[Target]:
    """Add up the contents of the `chosen` files by target; with `remove`, remove those files."""
    files = {file[3]: file for file in _files(layout) if chosen(file)}
    found: dict[bytes, Target] = {}
    records: dict[bytes, IndexRow] = {}
    for row in _rows(layout):
        if isinstance(row, bytes):
            continue
        if row.is_record:
            records[row.target] = row
        file = files.get(segment_name(row.segment))
        if file is not None:
            one = found.setdefault(row.target, Target())
            one.size += row.length
            one.blocks += not row.is_record
            one.used = max(one.used, file[0])
    for target, one in found.items():
        with contextlib.suppress(OSError, DamagedBlock, KeyError):
            one.source = parse_record(bytes(load(layout, records[target])[0]))[1]
            one.seen = records[target].start / 1e9
    kept = 0
    for used, size, folder, name in files.values():
        if folder == BLOBS:
            one = found.setdefault(b"", Target(BLOBS_SOURCE))
            one.size, one.blocks, one.used = one.size + size, one.blocks + 1, max(one.used, used)
        if remove and not layout.remove(folder, name) and _is_there(layout, folder, name):
            kept += 1
    if remove and b"" in found:
        with contextlib.suppress(OSError, Busy), Space(layout, 0, 0).locked(LOCK_PATIENCE):
            Space(layout, 0, 0).count_blobs()
    if kept:
        raise PermissionError(errno.EACCES, f"{kept:,} files cannot be removed: permission denied, or read-only")
    return sorted(found.values(), key=lambda one: -max(one.used, one.seen))


def _is_there(layout: Layout, folder: str, name: str) -> bool:
    try:
        os.stat(name, dir_fd=layout.folder(folder), follow_symlinks=False)
    except FileNotFoundError:  # evicted by another process
        return False
    return True


def _old(layout: Layout) -> list[Target]:
    """Return the files of earlier layouts as one target; [] if there are none."""
    found = Target(OLD_SOURCE)
    for name in layout.old():
        for above, _, names in os.walk(os.path.join(layout.directory, name)):
            for one in names:
                with contextlib.suppress(OSError):
                    found.blocks += 1
                    found.size += os.lstat(os.path.join(above, one)).st_blocks * 512
    return [found] if found.blocks else []


def _blob(layout: Layout, name: str) -> int:
    """Compare the hash of a blob with its name, and return its size. Raise OSError or DamagedBlock."""
    try:
        fd = layout.open(BLOBS, name, os.O_RDONLY)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):
            raise DamagedBlock("a symbolic link or a socket") from None
        raise
    with open(fd, "rb") as file:
        algorithm, _, digest = name.partition("-")
        if hashlib.file_digest(file, algorithm).hexdigest() != digest:
            raise DamagedBlock("wrong hash")
        return file.tell()
