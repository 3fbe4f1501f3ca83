"""Staging out: saving the changes of a job, from its upper directory or through its mount."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zarrfs.archives.create import create
from zarrfs.archives.pack_tree import CreateOptions, Progress
from zarrfs.errors import MountError, SourceError, UsageError, reason_of
from zarrfs.jobs import records
from zarrfs.jobs.records import Record
from zarrfs.jobs.unstage import at, mount_of
from zarrfs.references.output import archive_form, compressor
from zarrfs.store.destination import placed, sync_file_system
from zarrfs.store.upper import OPAQUE, Upper, hidden_name, reserved
from zarrfs.system import mounts


class Tree(NamedTuple):
    """A tree to save: `base` is the upper directory itself, or the mount that uses it."""

    base: str
    upper: str
    mounted: str = ""  # the mount point of the mount that writes to the upper directory, if there is one


def holds(tree: Tree, path: str) -> str | None:
    """Return the directory of the tree that contains `path`, or None."""
    places = filter(None, (tree.mounted, tree.upper))
    return next((one for one in places if mounts.beneath(os.path.realpath(path), os.path.realpath(one))), None)


class TreeFile(NamedTuple):
    """A regular file of a tree when it was listed."""

    key: str
    size: int  # bytes
    mtime_ns: int


@dataclasses.dataclass
class StageOutReport:
    """Counts of the entries saved so far. The fields are those of the JSON report."""

    files: int = 0
    bytes: int = 0
    skipped: int = 0  # files that an earlier run sent
    links: int = 0  # symbolic links created in a directory
    deleted: list[str] = dataclasses.field(default_factory=list)  # keys of the source; "DIR/": everything in DIR
    failed: list[dict[str, str]] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)  # keys that are neither files nor directories
    empty_directories: list[str] = dataclasses.field(default_factory=list)  # left out, as a URL cannot hold them
    expected_files: int | None = None
    expected_bytes: int | None = None


@contextlib.contextmanager
def opened(dest: str | None, upper: str | None, merged: bool) -> Iterator[Tree]:
    """Open the tree of the source staged at `dest`, or of the directory `upper`, locked against other writers.

    The mount of the source may keep writing to it; its dirty data is flushed first. Raise MountError if nothing is
    staged at `dest`, UsageError without an upper directory or, with `merged`, without a mount, and SourceError if
    another mount writes to the upper directory.
    """
    record = _record(dest, upper)
    path = upper or (record.upper if record is not None else "")
    if not path:
        raise UsageError(f"{dest}: is staged read-only: no changes to keep (stage it with -o upperdir=)")
    mount = None if record is None else mount_of(record)
    if mount is not None and mounts.is_dead(mount.mountpoint):  # a dead mount has no dirty data
        mount = None
    if merged and (record is None or mount is None):
        raise UsageError("--merged needs a staged mount; `zarrfs commit SOURCE --upperdir DIR` needs none")
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
    tree: Tree, output: str, options: CreateOptions, replace: bool, progress: Progress, warn: Callable[[str], None],
) -> None:  # fmt: skip
    """Write a tree as the archive `output`, which appears when it is complete. Raises the errors of create().

    Raise UsageError if the archive or its blobs would be in the tree.
    """
    for name, path in (("--output", output), ("--blobs", options.blobs)):
        if path is not None and (source := holds(tree, path)) is not None:
            raise UsageError(f"{name} {path}: lies in {source}, which is to be archived")
    form = archive_form(output)
    options = dataclasses.replace(options, leave_out=_is_ours)
    with placed(output, "archive", replace) as place, open(place.new, "xb") as raw:
        with compressor(raw, form) as file:
            create(tree.base, ["."], file, options, progress, warn)
        raw.flush()


def files(tree: Tree, report: StageOutReport, links: bool, keep_going: bool = False) -> Iterator[TreeFile]:
    """Yield the files of a tree, sorted by name; add empty directories and other entries to the report.

    Symbolic links count as other entries unless `links` is set. Raise SourceError for an entry that cannot be read;
    with `keep_going` it is added to `report.failed` instead.
    """
    pending = [""]
    while pending:
        key = pending.pop()
        path = os.path.join(tree.base, key)
        try:
            status = os.lstat(path)
            names = sorted(os.listdir(path), reverse=True) if stat.S_ISDIR(status.st_mode) else []
        except OSError as exc:
            reason = reason_of(exc)
            if not keep_going:
                raise SourceError(tree.base, reason, key or None) from exc
            report.failed.append({"key": key, "reason": reason})
            continue
        if stat.S_ISDIR(status.st_mode):
            pending += [f"{key}/{name}" if key else name for name in names if not reserved(name)]
            if key and not names:
                report.empty_directories.append(key)
        elif stat.S_ISREG(status.st_mode):
            yield TreeFile(key, status.st_size, status.st_mtime_ns)
        elif not (links and stat.S_ISLNK(status.st_mode)):
            report.left_out.append(key)


def deleted(upper: str, keep_going: bool = False) -> list[str]:
    """Return the keys of the source that an upper directory hides, sorted; "DIR/" for everything that was in DIR.

    "DIR/" is also returned for a file DIR that was replaced by a directory, because only the source knows whether DIR
    was a file. Raise SourceError for a directory that cannot be read; with `keep_going` such a directory is left out,
    because files() reports it.
    """

    def failed(exc: OSError) -> None:
        if keep_going:
            return
        raise SourceError(upper, reason_of(exc), os.path.relpath(exc.filename, upper)) from exc

    gone = []
    for path, directories, names in os.walk(upper, onerror=failed):
        directories[:] = [name for name in directories if not reserved(name)]  # these may contain staged files
        key = os.path.relpath(path, upper)
        prefix = "" if key == "." else f"{key}/"
        if OPAQUE in names:
            gone.append(prefix)
        for name in names:
            hidden = hidden_name(name)
            if hidden is not None and hidden in directories and not os.path.islink(os.path.join(path, hidden)):
                gone.append(f"{prefix}{hidden}/")
            elif hidden is not None and hidden not in names and hidden not in directories:
                gone.append(prefix + hidden)
    return sorted(gone)


def _is_ours(path: str) -> bool:
    return any(map(reserved, path.split("/")))


def _record(dest: str | None, upper: str | None) -> Record | None:
    """Return the record at `dest`, or of an upper directory, if any. Raise MountError if there is none at `dest`."""
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
        raise SourceError(path, f"cannot be written to the disk: {reason_of(exc)}") from exc
