"""What the cache directory of indexes holds, and which of it may go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable

from zarrfs.errors import SourceError, UsageError
from zarrfs.options import Options
from zarrfs.sources.indexcache import ABANDONED, INDEX_NAME, SCRATCH_NAME, IndexCache, verified
from zarrfs.store.indexfile import read_notes

UNFINISHED = "unfinished"  # the problem of an index that is being written, or was when its writer died


@dataclasses.dataclass(frozen=True)
class Kept:
    """One file in the directory; times in seconds since 1970."""

    path: str
    size: int  # bytes
    made: float
    used: float  # when it was last mounted, as far as that can be told
    kind: str  # of the source: references or archive; "" where it is of no use
    source: str  # what it was made of first; "" where nobody can tell
    problem: str = ""  # why it is of no use


def kept(options: Options) -> list[Kept]:
    """Every file in the cache directory that is ours, the one last used first. UsageError where it cannot be read."""
    directory = IndexCache(options).directory
    try:
        names = os.listdir(directory)
    except OSError as exc:
        raise UsageError(f"{directory}: {(exc.strerror or str(exc)).lower()}") from None
    used = _times_of_use(directory, names)
    found = []
    for name in names:
        path = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError):  # another process tidies up, too
            if INDEX_NAME.fullmatch(name):
                found.append(_index(path, used.get(name, 0.0)))
            elif SCRATCH_NAME.fullmatch(name):
                status = os.lstat(path)
                found.append(Kept(path, status.st_size, status.st_mtime, status.st_mtime, "", "", UNFINISHED))
    return sorted(found, key=lambda one: -one.used)


def prune(options: Options, older_than: float, max_size: int | None, dry_run: bool) -> list[Kept]:
    """Remove what is of no use, what was not used for `older_than` seconds, and then the least used over `max_size`.

    Returns what is (with `dry_run`: would be) removed. A mount that uses an index keeps it until it ends.
    """
    now = time.time()
    gone, left = [], 0
    for one in kept(options):
        too_much = max_size is not None and left + one.size > max_size
        if one.problem == UNFINISHED:
            old = now - one.made > ABANDONED
        else:
            old = bool(one.problem) or now - one.used > older_than or too_much
        if old:
            gone.append(one)
        else:
            left += one.size
    if not dry_run:
        for one in gone:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(one.path)
        _forget(IndexCache(options).directory)
    return gone


def _index(path: str, used: float) -> Kept:
    status = os.lstat(path)
    used = max(used, status.st_mtime)
    about: tuple[str, ...] = "", "", "damaged, or not ours"
    if verified(path):
        try:
            notes = read_notes(path)
            about = notes["kind"], notes.get("source", "")
        except SourceError as exc:
            about = "", "", exc.rule
    return Kept(path, status.st_size, status.st_mtime, used, *about)


def _times_of_use(directory: str, names: Iterable[str]) -> dict[str, float]:
    """Index name -> when it was last recalled."""
    used: dict[str, float] = {}
    for name in names:
        if name.endswith(".known"):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError, ValueError, TypeError), open(path, "rb") as file:
                index = json.load(file)[0]
                used[index] = max(used.get(index, 0.0), os.fstat(file.fileno()).st_mtime)
    return used


def _forget(directory: str) -> None:
    """Remove what is remembered of indexes that are gone."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError, ValueError, TypeError, IndexError):
            if name.endswith(".known"):
                with open(path, "rb") as file:
                    index = json.load(file)[0]
                if not os.path.exists(os.path.join(directory, index)):
                    os.unlink(path)
