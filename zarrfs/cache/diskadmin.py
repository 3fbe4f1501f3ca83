"""`zarrfs cache` on blocks: list them by target, prune, clear, verify. Safe while mounts use them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator

from zarrfs.cache.disk import parse_record
from zarrfs.cache.diskfiles import BLOB, RECORD, Damaged, Layout
from zarrfs.cache.diskspace import Ages, Space
from zarrfs.errors import UsageError

LOCK_PATIENCE = 5.0  # seconds to wait for another process that scans
BLOBS_SOURCE = "archives"  # what blobs are of
UNKNOWN = "unknown"  # the source of blocks whose version record has gone, or that are damaged


@dataclasses.dataclass
class Target:
    """The cached blocks of one target, all its versions; times in seconds since 1970."""

    source: str = UNKNOWN  # its URL without secrets
    blocks: int = 0  # files
    size: int = 0  # bytes on the disk
    used: float = 0.0  # when one of its blocks was last read, within a minute
    seen: float = 0.0  # when its server was last asked for its version; 0.0 if nobody knows


@dataclasses.dataclass
class Verified:
    """The result of verify(); bytes are those of blocks, without headers."""

    checked: int = 0
    bytes: int = 0
    bad: int = 0  # removed
    unreadable: int = 0  # the disk or its permissions refuse them


def targets(directory: str) -> list[Target]:
    """Return the contents of `directory` by target, most recently used first. UsageError if it cannot be read."""
    return _by_target(_layout(directory), lambda _name, _status: True)


def prune(directory: str, older_than: float, size_max: int | None, dry_run: bool) -> list[Target]:
    """Remove what was not used for `older_than` seconds, and then the least used over `size_max` bytes.

    Returns what is (with `dry_run`: would be) removed, by target. UsageError if `directory` cannot be read.
    """
    layout = _layout(directory)
    oldest, ages, total = int((time.time() - older_than) * 1e9), Ages(), 0
    for _name, status in _kept(layout):
        if status.st_mtime_ns >= oldest:
            total += status.st_blocks * 512
            ages.add(status.st_mtime_ns, status.st_blocks * 512)
    excess = total - size_max if size_max is not None else 0
    before = ages.before(excess) if excess > 0 else 0

    def goes(_name: str, status: os.stat_result) -> bool:
        nonlocal excess
        if status.st_mtime_ns < oldest:
            return True
        if excess <= 0 or status.st_mtime_ns >= before:
            return False
        excess -= status.st_blocks * 512
        return True

    gone = _by_target(layout, goes, remove=not dry_run)
    if gone and not dry_run:
        _recount(layout)
    return gone


def clear(directory: str) -> list[Target]:
    """Remove everything; returns what that was, by target. UsageError if `directory` cannot be read."""
    layout = _layout(directory)
    gone = _by_target(layout, lambda _name, _status: True, remove=True)
    if gone:
        _recount(layout)
    return gone


def verify(directory: str) -> Verified:
    """Read every block and every version record, and remove the bad ones. UsageError if `directory` cannot be read."""
    layout, found = _layout(directory), Verified()
    for name, _status in _kept(layout):
        try:
            if name.endswith(RECORD):
                parse_record(layout.load_record(name)[0], name)
            else:
                blob = BLOB.fullmatch(name)
                found.bytes += _blob(layout, name) if blob else len(layout.load(name, touch=False).data)
        except FileNotFoundError:
            continue  # another process tidies up, too
        except Damaged:
            found.bad += 1
            layout.remove(name)
        except OSError as exc:
            found.unreadable += 1
            if exc.errno == errno.EIO:
                layout.remove(name)
        found.checked += 1
    return found


def _layout(directory: str) -> Layout:
    try:
        os.listdir(directory)
    except OSError as exc:
        raise UsageError(f"option cache_dir={directory}: {(exc.strerror or str(exc)).lower()}") from None
    return Layout(directory)


def _kept(layout: Layout) -> Iterator[tuple[str, os.stat_result]]:
    """layout.kept(), where there may be nothing yet."""
    try:
        yield from layout.kept()
    except OSError as exc:
        raise UsageError(f"option cache_dir={layout.directory}: {(exc.strerror or str(exc)).lower()}") from None


def _by_target(layout: Layout, chosen: Callable[[str, os.stat_result], bool], remove: bool = False) -> list[Target]:
    """The files that are `chosen`, summed up by target; with `remove` they are removed on the way."""
    found: dict[bytes, Target] = {}
    for name, status in _kept(layout):
        if not chosen(name, status):
            continue
        record, key = name.endswith(RECORD), b""
        with contextlib.suppress(OSError, Damaged):
            if BLOB.fullmatch(name):
                key = b"blobs"
            else:
                key = bytes.fromhex(name.removesuffix(RECORD)) if record else layout.target(name)
        if key not in found:
            found[key] = _about(layout, key)
        if remove:
            layout.remove(name)
        one = found[key]
        one.size += status.st_blocks * 512
        if not record:
            one.blocks += 1
            one.used = max(one.used, status.st_mtime)
    return sorted(found.values(), key=lambda one: -max(one.used, one.seen))


def _about(layout: Layout, key: bytes) -> Target:
    """A target with that hash, as far as its version record tells; or all blobs."""
    if key == b"blobs":
        return Target(BLOBS_SOURCE)
    name = key.hex() + RECORD
    try:
        text, seen = layout.load_record(name)
        return Target(parse_record(text, name)[1], seen=seen)
    except (OSError, Damaged):
        return Target()


def _blob(layout: Layout, name: str) -> int:
    """The size of a blob, once its hash is found to be its name. OSError, Damaged."""
    with open(layout.blob(name), "rb") as file:
        algorithm, _, digest = name.partition("-")
        if hashlib.file_digest(file, algorithm).hexdigest() != digest:
            raise Damaged("wrong hash")
        return file.tell()


def _recount(layout: Layout) -> None:
    """Let other processes know of the room; where that fails, they find out when they need it."""
    with contextlib.suppress(OSError):
        Space(layout, 0, 0).recount(LOCK_PATIENCE)
