"""The note in DIRECTORY/.zarrfs-staging: of a run of staging_directory.py that is not at its end, and when it wrote.

A span is [from, to], times of change (ctime) of what was written, in ns, by the clock of its file system: a server's
may not be ours. `to` is 0 while a run goes on, or where it was killed; what it has left then tells when it wrote last.
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

from zarrfs.store.staging import RESERVED, lock, remove_abandoned

STAGING, NOTE = os.fsencode(RESERVED), b"note"
OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DAMAGED = ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError  # what a note may raise
_RUN = re.compile(r"[0-9a-f]{16}")  # what directories of runs are called
_LARGEST = 1 << 16  # bytes
_TICK = 3.0  # seconds at most between two times that a file system tells apart

Spans = list[list[int]]


def read(note: int) -> bytes:
    """What an open note holds."""
    return os.pread(note, _LARGEST, 0)


def write(note: int, text: bytes) -> None:
    """Replace what an open note holds. OSError."""
    os.pwrite(note, text, 0)  # first: a full disk has room for it where it is
    os.ftruncate(note, len(text))


def changed_now(descriptor: int, after: int = 0) -> int:
    """What a file that is changed now has as its ctime, in ns, once that is later than `after`; waits for a tick."""
    deadline = time.monotonic() + _TICK
    while True:
        os.utime(descriptor)
        now = os.fstat(descriptor).st_ctime_ns
        if now > after or time.monotonic() > deadline:  # else a clock was set back
            return now
        time.sleep(0.001)


def alone(descriptor: int) -> bool:
    """Whether a file, or a directory, is ours, and nobody else can write to it or has another name of it."""
    status = os.fstat(descriptor)
    links = stat.S_ISDIR(status.st_mode) or status.st_nlink == 1
    return links and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def spans_of(said: dict[str, Any], staging: int) -> Spans:
    """When the run of a note, and those that it has taken up, have written. ValueError, TypeError, OverflowError."""
    spans = [[int(since), int(until)] for since, until in said.get("spans", ())]
    if spans and not spans[-1][1]:
        spans[-1][1] = max(spans[-1][0], _last_change(staging))
    return spans


def _last_change(staging: int) -> int:
    """When a killed run has made or moved a file last; 0 where it has left nothing."""
    found = 0
    for name in os.listdir(f"/proc/self/fd/{staging}"):
        with contextlib.suppress(OSError):
            run = os.open(name, OPEN, dir_fd=staging)
            try:
                found = max(found, os.fstat(run).st_ctime_ns)
                for inner in os.listdir(f"/proc/self/fd/{run}"):  # of its processes, and files
                    found = max(found, os.lstat(inner, dir_fd=run).st_ctime_ns)
            finally:
                os.close(run)
    return found


def kept(path: str, mark: str) -> dict[str, Any] | None:
    """The note that runs with `mark` have left in the directory `path`, spans with an end; {} where there is none.

    None where another run writes there, which may be a note of `mark`, too.
    """
    try:
        with _opened(path) as (staging, note):
            return None if lock(note) is False else _said(staging, note, mark)
    except OSError:
        return {}


def remove_abandoned_runs(staging: int) -> None:
    """Remove what killed runs have left of files that were not whole."""
    for entry in os.listdir(staging):
        if _RUN.fullmatch(entry):
            remove_abandoned(staging, os.fsencode(entry))


def put(path: str, said: dict[str, Any]) -> None:
    """Leave a note in the directory `path` that was kept() and forgotten, unless one is there. OSError."""
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


def forget(path: str, mark: str) -> bool:
    """Remove the note of runs with `mark` from the directory `path`; False where another run writes there."""
    with contextlib.suppress(OSError), _opened(path) as (staging, note):
        if lock(note) is False:
            return False
        if _said(staging, note, mark):
            remove_abandoned_runs(staging)
            os.unlink(NOTE, dir_fd=staging)
    with contextlib.suppress(OSError):  # something of another process is in it
        os.rmdir(os.path.join(path, RESERVED))
    return True


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """(staging directory, note) of the directory `path`. OSError, as where they are not ours alone."""
    staging = os.open(os.path.join(path, RESERVED), OPEN)
    try:
        note = os.open(NOTE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=staging)
        try:
            if not (alone(staging) and alone(note)):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
            yield staging, note
        finally:
            os.close(note)
    finally:
        os.close(staging)


def _said(staging: int, note: int, mark: str) -> dict[str, Any]:
    """What an open note holds, if it is one of runs with `mark`; {} otherwise."""
    try:
        said = json.loads(read(note))
        return {**said, "spans": spans_of(said, staging)} if said["mark"] == mark else {}
    except DAMAGED:
        return {}
