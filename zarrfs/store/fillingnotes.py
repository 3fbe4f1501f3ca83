"""The note in DIRECTORY/.zarrfs-staging: of a run of store/filling.py that is not at its end, and when it wrote.

A span is [from, to], times of change (ctime) of what was written, in ns, by the clock of its file system: a server's
may not be ours. `to` is 0 while a run goes on, or where it was killed; what it has left then tells when it wrote last.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from zarrfs.store.staging import RESERVED

STAGING, NOTE = os.fsencode(RESERVED), b"note"
OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LARGEST = 1 << 16  # bytes

Spans = list[list[int]]


def read(note: int) -> bytes:
    """What an open note holds."""
    return os.pread(note, _LARGEST, 0)


def write(note: int, text: bytes) -> None:
    """Replace what an open note holds. OSError."""
    os.pwrite(note, text, 0)  # first: a full disk has room for it where it is
    os.ftruncate(note, len(text))


def changed_now(descriptor: int) -> int:
    """What a file that is changed now has as its ctime, in ns."""
    os.utime(descriptor)
    return os.fstat(descriptor).st_ctime_ns


def spans_of(said: dict[str, Any], staging: int) -> Spans:
    """When the run of a note, and those that it has taken up, have written. ValueError, TypeError."""
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


def kept(path: str) -> dict[str, Any]:
    """The note that runs have left in the directory `path`, with spans that have an end; {} where there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        staging = os.open(os.path.join(path, RESERVED), OPEN)
        try:
            note = os.open(NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=staging)
            try:
                said = json.loads(read(note))
                return {**said, "spans": spans_of(said, staging)}
            finally:
                os.close(note)
        finally:
            os.close(staging)
    return {}


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


def forget(path: str) -> None:
    """Remove the note that a run has left in the directory `path` as there was more to be done; it is done now."""
    with contextlib.suppress(OSError):
        staging = os.open(os.path.join(path, RESERVED), OPEN)
        try:
            os.unlink(NOTE, dir_fd=staging)
        finally:
            os.close(staging)
        os.rmdir(os.path.join(path, RESERVED))
