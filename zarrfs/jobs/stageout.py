"""Keeping what a job has written: its upper directory, or all that its mount shows."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zarrfs.archives.create import Making, Progress, create
from zarrfs.archives.dump_writer import MAIN
from zarrfs.errors import MountError, SourceError, UsageError
from zarrfs.jobs import nodelocal, records
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import at, mount_of
from zarrfs.references.output import DUMP, archive_form, compressor
from zarrfs.store.destination import placed, sync_file_system
from zarrfs.store.upper import OPAQUE, Upper, hidden_name, reserved
from zarrfs.system import mounts


class Tree(NamedTuple):
    """What is to be kept: the directory `base`, which is the upper itself or the mount over it."""

    base: str
    upper: str
    mounted: str = ""  # where the upper is written through, if it is


def holds(tree: Tree, path: str) -> str | None:
    """The directory of the tree that `path` lies in, if it does."""
    places = filter(None, (tree.mounted, tree.upper))
    return next((one for one in places if nodelocal.beneath(os.path.realpath(path), os.path.realpath(one))), None)


class File(NamedTuple):
    """A regular file of a tree, as it was seen."""

    key: str
    size: int  # bytes
    mtime_ns: int


@dataclasses.dataclass
class Kept:
    """What was kept so far; ready for JSON as a report."""

    files: int = 0
    bytes: int = 0
    skipped: int = 0  # files that an earlier run had sent
    links: int = 0  # symbolic links that were made in a directory
    deleted: list[str] = dataclasses.field(default_factory=list)  # of the source; "DIR/" all that was in DIR
    failed: list[dict[str, str]] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)  # what is neither a file nor a directory
    empty_directories: list[str] = dataclasses.field(default_factory=list)  # that a URL cannot have
    expected_files: int | None = None
    expected_bytes: int | None = None


@contextlib.contextmanager
def opened(dest: str | None, upper: str | None, merged: bool) -> Iterator[Tree]:
    """The tree of what is staged at `dest`, or of the directory `upper`; nobody else writes to it inside.

    A mount on record may: what it has in memory is on the disk first. UsageError for what has no upper or no mount,
    SourceError where another mount writes to it.
    """
    record = _record(dest, upper)
    path = upper or (record.upper if record is not None else "")
    if not path:
        raise UsageError(f"{dest}: is staged read-only, and has nothing to keep (no -o upperdir=)")
    mount = None if record is None else mount_of(record)
    if mount is not None and mounts.is_dead(mount.mountpoint):  # it has no more in memory
        mount = None
    if merged and (record is None or mount is None):
        raise UsageError("--merged: for what is staged and mounted; zarrfs commit SOURCE --upperdir does it without")
    opened_upper = Upper(path)
    try:
        if record is not None and mount is not None:
            _sync(mount.mountpoint)
            _sync(path)
        else:
            opened_upper.lock(False)
        place = "" if mount is None else mount.mountpoint
        yield Tree(place if merged else path, path, place)
    finally:
        opened_upper.close()


def archive(
    tree: Tree, output: str, making: Making, replace: bool, progress: Progress, warn: Callable[[str], None],
    begun: Callable[[], None],
) -> None:  # fmt: skip
    """Write a tree as the archive `output`, which appears whole. UsageError, SourceError, and `begun`, as create()."""
    for name, path in (("-o", output), ("--blobs", making.blobs)):
        if path is not None and (source := holds(tree, path)) is not None:
            raise UsageError(f"{name} {path}: lies in {source}, which is to be archived")
    form = archive_form(output, dumps=True)
    making = dataclasses.replace(making, leave_out=_is_ours, dump=MAIN if form == DUMP else None)
    with placed(output, "archive", replace) as place, open(place.new, "xb") as raw:
        with compressor(raw, form) as file:
            create(tree.base, ["."], file, making, progress, warn, begun)
        raw.flush()


def files(tree: Tree, kept: Kept, links: bool, keep_going: bool = False) -> Iterator[File]:
    """Every file of a tree, by name; what is empty, or of another type, is noted: links, too, unless they can be kept.

    SourceError for what cannot be looked at; with `keep_going` that is in `kept.failed`.
    """
    pending = [""]
    while pending:
        key = pending.pop()
        path = os.path.join(tree.base, key)
        try:
            status = os.lstat(path)
            names = sorted(os.listdir(path), reverse=True) if stat.S_ISDIR(status.st_mode) else []
        except OSError as exc:
            reason = (exc.strerror or str(exc)).lower()
            if not keep_going:
                raise SourceError(tree.base, reason, key or None) from exc
            kept.failed.append({"key": key, "reason": reason})
            continue
        if stat.S_ISDIR(status.st_mode):
            pending += [f"{key}/{name}" if key else name for name in names if not reserved(name)]
            if key and not names:
                kept.empty_directories.append(key)
        elif stat.S_ISREG(status.st_mode):
            yield File(key, status.st_size, status.st_mtime_ns)
        elif not (links and stat.S_ISLNK(status.st_mode)):
            kept.left_out.append(key)


def deleted(upper: str, keep_going: bool = False) -> list[str]:
    """The keys of the source that an upper hides, in order; "DIR/" where it hides all that was in DIR.

    SourceError for a directory that cannot be read; with `keep_going` it is left out, and files() has told of it.
    """

    def failed(exc: OSError) -> None:
        if keep_going:
            return
        raise SourceError(upper, (exc.strerror or str(exc)).lower(), os.path.relpath(exc.filename, upper)) from exc

    gone = []
    for path, directories, names in os.walk(upper, onerror=failed):
        directories[:] = [name for name in directories if not reserved(name)]  # they may hold what is to vanish
        key = os.path.relpath(path, upper)
        prefix = "" if key == "." else f"{key}/"
        if OPAQUE in names:
            gone.append(prefix)
        for name in names:
            hidden = hidden_name(name)
            if hidden is not None and not os.path.lexists(os.path.join(path, hidden)):
                gone.append(prefix + hidden)
    return sorted(gone)


def _is_ours(path: str) -> bool:
    return any(map(reserved, path.split("/")))


def _record(dest: str | None, upper: str | None) -> Record | None:
    """The record of what is staged. MountError where there is none at `dest`."""
    found = records.found()
    if dest is None:
        return next((record for record in found if record.upper and record.upper == upper), None)
    there = at(dest, found)
    if not there:
        raise MountError(f"{dest}: nothing is staged there (--upperdir names the directory with the changes)")
    return there[0]


def _sync(path: str) -> None:
    try:
        sync_file_system(path)
    except OSError as exc:
        raise SourceError(path, f"cannot be written to the disk: {(exc.strerror or str(exc)).lower()}") from exc


def as_json(kept: Kept) -> dict[str, Any]:
    """A report, ready for JSON."""
    return dataclasses.asdict(kept)
