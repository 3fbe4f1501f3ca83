"""The journal of a copy, the file DIRECTORY/.zarrfs-staging/note: which run is unfinished, and when it wrote.

A span is [from, to], the times of change (ctime, in ns) of written entries, by the clock of their file system, which
on a server may differ from ours. `to` is 0 while a run goes on, or after it was killed: its unfinished files then show
when it wrote last.

Each share of a copy (--shard) has a journal of its own, note-I-of-N, which stays when the share is complete: it may be
run again, on any node. Its spans in "safe" were synced to disk, so they are believed also after another boot.
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
_ENDING = 2.0  # seconds: longer than the processes of a killed run, which hold its lock too, take to end
_RUN = re.compile(r"[0-9a-f]{16}")  # names of the runs' directories
_LARGEST = 1 << 16  # bytes
_CHANGING = 0.5  # seconds: longer than a run takes to replace its journal
_TICK = 3.0  # seconds: the coarsest resolution of file times

Spans = list[list[int]]


def name_of(share: Share | None) -> bytes:
    """Return the name of the journal of a copy, or of a share of one."""
    return NOTE if share is None else b"note-%d-of-%d" % (share.index, share.count)


def read(note: int) -> bytes:
    """Return the content of an open note."""
    return os.pread(note, _LARGEST, 0)


def write(note: int, text: bytes) -> None:
    """Replace the content of an open note. OSError."""
    os.pwrite(note, text, 0)  # before truncating: even a full disk has room in place
    os.ftruncate(note, len(text))


def lock_note(note: int) -> bool:
    """Lock an open note, waiting for a killed run to end; return False while a run is writing, True without locks."""
    return lock(note, _ENDING) is not False


def changed_now(descriptor: int, after: int = 0) -> int:
    """Touch a file until its ctime is later than `after`, and return that, in ns; waits for one clock tick."""
    deadline = time.monotonic() + _TICK
    while True:
        os.utime(descriptor)
        now = os.fstat(descriptor).st_ctime_ns
        if now > after or time.monotonic() > deadline:  # the deadline passes if a clock was set back
            return now
        time.sleep(0.001)


def alone(descriptor: int) -> bool:
    """Return whether a file or directory is ours, has one name, and is writable by no other user."""
    status = os.fstat(descriptor)
    links = stat.S_ISDIR(status.st_mode) or status.st_nlink == 1
    return links and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def spans_of(said: dict[str, Any], staging: int) -> Spans:
    """Return the spans of a note's run and of those that it resumed. ValueError, TypeError, OverflowError."""
    spans = [[int(since), int(until)] for since, until in said.get("spans", ())]
    if spans and not spans[-1][1]:
        spans[-1][1] = max(spans[-1][0], _last_change(staging, run_of(said)))
    return spans


def run_of(said: dict[str, Any]) -> str | None:
    """Return the name of the staging directory of a share's last run; None for copies that are not divided."""
    name = said.get("run")
    return name if isinstance(name, str) and _RUN.fullmatch(name) else None


def _last_change(staging: int, only: str | None) -> int:
    """Return when a killed run created or moved a file last, in ns; 0 if it left none."""
    found = 0
    for name in os.listdir(f"/proc/self/fd/{staging}") if only is None else (only,):
        with contextlib.suppress(OSError):
            run = os.open(name, OPEN, dir_fd=staging)
            try:
                found = max(found, os.fstat(run).st_ctime_ns)
                for inner in os.listdir(f"/proc/self/fd/{run}"):  # of its processes, and files
                    found = max(found, os.lstat(inner, dir_fd=run).st_ctime_ns)
            finally:
                os.close(run)
    return found


def kept(path: str, mark: str, share: Share | None = None) -> dict[str, Any] | None:
    """Read the note that runs with `mark` left in the directory `path`, with all spans closed; {} if there is none.

    Returns None while a run is writing there, also one with the same mark.
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
    """Write back a note that was read by kept() and removed by forget(), unless there is another one. OSError."""
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


def complete_listing(staging: int, mark: str, share: Share) -> list[Any] | None:
    """Return what a complete run of another share has divided; None if there is none. `staging`: a descriptor.

    OSError, or one of DAMAGED, if its journal cannot be read.
    """
    found = _of_share(staging, mark, name_of(share)).get("listing")
    return found if isinstance(found, list) else None


def owned_by_a_share(staging: int, mark: str) -> bool:
    """Return whether another share has made the directory, or found it empty."""
    for name in os.listdir(f"/proc/self/fd/{staging}"):
        with contextlib.suppress(OSError, *DAMAGED):
            if name.startswith("note-") and (said := _of_share(staging, mark, os.fsencode(name))):
                return bool(said.get("own"))
    return False


def _of_share(staging: int, mark: str, name: bytes) -> dict[str, Any]:
    """Return the journal of a share; {} if there is none yet, or it has another mark. OSError, DAMAGED.

    It may be changing: one that is damaged is read again for a while.
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
                said = json.loads(text or b'{"mark": null}')  # empty: its run has just begun
                return said if said["mark"] == mark else {}
            except DAMAGED:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
    finally:
        os.close(note)


def forget(path: str, mark: str, share: Share | None = None) -> bool:
    """Remove the note of runs with `mark` from the directory `path`; return False while a run is writing there."""
    with contextlib.suppress(OSError), _opened(path, share) as (staging, note):
        if not lock_note(note):
            return False
        if _said(staging, note, mark):
            remove_abandoned_runs(staging)
            os.unlink(name_of(share), dir_fd=staging)
    with contextlib.suppress(OSError):  # another process has files in it
        os.rmdir(os.path.join(path, RESERVED))
    return True


@contextlib.contextmanager
def _opened(path: str, share: Share | None) -> Iterator[tuple[int, int]]:
    """Open (staging directory, note) of the directory `path`. OSError, also if they are not ours alone."""
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
    """Return the content of an open note if it has `mark`, else {}."""
    try:
        said = json.loads(read(note))
        return {**said, "spans": spans_of(said, staging)} if said["mark"] == mark else {}
    except DAMAGED:
        return {}
