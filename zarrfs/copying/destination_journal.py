"""The journal of a copy, the file DIRECTORY/.zarrfs-staging/note: which run is unfinished, and when it wrote entries.

A span is [from, to]: the range of the ctimes, in ns, of the entries that a run wrote. They come from the clock of the
file system, which on a file server may differ from the clock of this node. `to` is 0 while the run is writing, and
after it was killed; in that case the times of its unfinished files tell when it wrote last.

Each share of a copy (--shard) has a journal of its own, note-I-of-N, which stays when the share is complete, because
the share may be run again, on any node. Its spans in "safe" were synced to disk, so their entries are trusted even
after a reboot.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import Any

from zarrfs.config.shares import Share
from zarrfs.store.staging import RESERVED, lock, remove_abandoned

STAGING, NOTE = os.fsencode(RESERVED), b"note"
OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DAMAGED = ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError  # raised by bad notes
_ENDING = 2.0  # seconds: longer than a killed run takes to release its lock
_RUN = re.compile(r"[0-9a-f]{16}")  # names of staging directories of runs
_LARGEST = 1 << 16  # maximum size of a journal, in bytes
_CHANGING = 0.5  # seconds: longer than a run takes to overwrite its journal
_TICK = 3.0  # seconds: the coarsest resolution of file times

Spans = list[list[int]]


def name_of(share: Share | None) -> bytes:
    """Return the name of the journal of a copy, or of a share of a copy."""
    return NOTE if share is None else b"note-%d-of-%d" % (share.index, share.count)


def read(note: int) -> bytes:
    """Return the content of an open journal."""
    return os.pread(note, _LARGEST, 0)


def write(note: int, text: bytes) -> None:
    """Overwrite the content of an open journal. Raise OSError."""
    os.pwrite(note, text, 0)  # before truncating, because overwriting works even on a full disk
    os.ftruncate(note, len(text))


def lock_note(note: int) -> bool:
    """Lock an open journal, and wait for a killed run to end; return False if a run is still writing.

    Return True if the file system has no locks.
    """
    return lock(note, _ENDING) is not False


def changed_now(descriptor: int, after: int = 0) -> int:
    """Touch a file until its ctime is later than `after`, and return that ctime, in ns.

    If `after` is the present time, this blocks for one tick of the file system's clock, at most for _TICK seconds.
    """
    deadline = time.monotonic() + _TICK
    while True:
        os.utime(descriptor)
        now = os.fstat(descriptor).st_ctime_ns
        if now > after or time.monotonic() > deadline:  # the clock may have been set back
            return now
        time.sleep(0.001)


def alone(descriptor: int) -> bool:
    """Return whether a file belongs to this user alone: no other user can write to it, and it has no second name.

    The same for a directory, whose links are not counted.
    """
    status = os.fstat(descriptor)
    links = stat.S_ISDIR(status.st_mode) or status.st_nlink == 1
    return links and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def spans_of(said: dict[str, Any], staging: int) -> Spans:
    """Return the spans of the run that wrote a journal, and of the runs that it resumed; none is open.

    Raise ValueError, TypeError, OverflowError if the journal is damaged.
    """
    spans = [[int(since), int(until)] for since, until in said.get("spans", ())]
    if spans and not spans[-1][1]:
        spans[-1][1] = max(spans[-1][0], _last_change(staging, run_of(said)))
    return spans


def run_of(said: dict[str, Any]) -> str | None:
    """Return the name of the staging directory of a share's last run; None for a copy that is not divided."""
    name = said.get("run")
    return name if isinstance(name, str) and _RUN.fullmatch(name) else None


def _last_change(staging: int, only: str | None) -> int:
    """Return the time, in ns, when a killed run last created or moved a file; 0 if it left no staging directory."""
    found = 0
    for name in os.listdir(f"/proc/self/fd/{staging}") if only is None else (only,):
        with contextlib.suppress(OSError):
            run = os.open(name, OPEN, dir_fd=staging)
            try:
                found = max(found, os.fstat(run).st_ctime_ns)
                for inner in os.listdir(f"/proc/self/fd/{run}"):
                    found = max(found, os.lstat(inner, dir_fd=run).st_ctime_ns)
            finally:
                os.close(run)
    return found


def kept(path: str, mark: str, share: Share | None = None) -> dict[str, Any] | None:
    """Return the journal that runs with `mark` left in the directory `path`, with all spans closed; {} without one.

    Return None while a run (of this share) is writing there, whatever its mark.
    """
    try:
        with _opened(path, share) as (staging, note):
            return _said(staging, note, mark) if lock_note(note) else None
    except OSError:
        return {}


def remove_abandoned_runs(staging: int) -> None:
    """Remove the unfinished files of killed runs."""
    for entry in os.listdir(staging):
        if _RUN.fullmatch(entry):
            remove_abandoned(staging, os.fsencode(entry))


def put(path: str, said: dict[str, Any]) -> None:
    """Write back a journal that was read by kept() and removed by forget().

    Raise OSError; FileExistsError if there is another journal.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.join(path, RESERVED), 0o700)
    staging = os.open(os.path.join(path, RESERVED), OPEN)
    try:
        note = os.open(NOTE, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=staging)
        try:
            write(note, json.dumps(said).encode())
        finally:
            os.close(note)
    finally:
        os.close(staging)


def owned_by_a_share(staging: int, mark: str) -> bool:
    """Return whether another share has created the destination, or found it empty."""
    for name in os.listdir(f"/proc/self/fd/{staging}"):
        with contextlib.suppress(OSError, *DAMAGED):
            if name.startswith("note-") and _of_share(staging, mark, os.fsencode(name)).get("own"):
                return True
    return False


def _of_share(staging: int, mark: str, name: bytes) -> dict[str, Any]:
    """Return the journal of a share; {} if there is none yet, or it has another mark. Raise OSError, DAMAGED.

    The share may just be writing its journal, so a damaged journal is read again until _CHANGING seconds have passed.
    """
    try:
        note = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=staging)
    except FileNotFoundError:
        return {}
    try:
        deadline = time.monotonic() + _CHANGING
        while True:
            text = read(note)
            try:
                said = json.loads(text or b'{"mark": null}')  # empty: the run has just begun
                return said if said["mark"] == mark else {}
            except DAMAGED:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
    finally:
        os.close(note)


def forget(path: str, mark: str, share: Share | None = None) -> bool:
    """Remove the journal of runs with `mark` from the directory `path`; return False while a run of it is writing."""
    with contextlib.suppress(OSError), _opened(path, share) as (staging, note):
        if not lock_note(note):
            return False
        if _said(staging, note, mark):
            remove_abandoned_runs(staging)
            os.unlink(name_of(share), dir_fd=staging)
    with contextlib.suppress(OSError):  # not empty: another run uses it
        os.rmdir(os.path.join(path, RESERVED))
    return True


@contextlib.contextmanager
def _opened(path: str, share: Share | None) -> Iterator[tuple[int, int]]:
    """Open (staging directory, journal) of the directory `path`. Raise OSError, also if they are not ours alone."""
    staging = os.open(os.path.join(path, RESERVED), OPEN)
    try:
        note = os.open(name_of(share), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=staging)
        try:
            if not (alone(staging) and alone(note)):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
            yield staging, note
        finally:
            os.close(note)
    finally:
        os.close(staging)


def _said(staging: int, note: int, mark: str) -> dict[str, Any]:
    """Return the content of an open journal if it has `mark`, else {}."""
    try:
        said = json.loads(read(note))
        return {**said, "spans": spans_of(said, staging)} if said["mark"] == mark else {}
    except DAMAGED:
        return {}
