"""What the cache directory of indexes holds, and which of it may go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator

from zarrfs.config.options import Options
from zarrfs.errors import SourceError, UsageError
from zarrfs.sources.indexcache import ABANDONED, INDEX_NAME, NAMES_NAME, SCRATCH_NAME, IndexCache, verified
from zarrfs.store.indexfile import read_notes

DAMAGED = "damaged, or not ours"  # the problem of an index whose content is not what its name says
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
    used: dict[str, float] = {}
    for _, index, when in _remembered(directory):
        used[index] = max(used.get(index, 0.0), when)
    found = []
    for name in names:
        path = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError):  # another process tidies up, too
            if INDEX_NAME.fullmatch(name):
                found.append(_index(path, used.get(name, 0.0)))
            elif NAMES_NAME.fullmatch(name):
                status = os.lstat(path)
                found.append(Kept(path, status.st_size, status.st_mtime, status.st_mtime, "names", ""))
            elif SCRATCH_NAME.fullmatch(name):
                status = os.lstat(path)
                found.append(Kept(path, status.st_size, status.st_mtime, status.st_mtime, "", "", UNFINISHED))
    return sorted(found, key=lambda one: -one.used)


def prune(options: Options, older_than: float, max_size: int | None, dry_run: bool) -> tuple[list[Kept], int]:
    """Remove what is of no use, what was not used for `older_than` seconds, and then the least used over `max_size`.

    Returns what is (with `dry_run`: would be) removed, and the bytes of what is left. A mount that uses an index
    keeps it until it ends.
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
        directory = IndexCache(options).directory
        for path, index, _ in _remembered(directory):
            if not os.path.exists(os.path.join(directory, index)):
                with contextlib.suppress(OSError):
                    os.unlink(path)
    return gone, left


def verify(options: Options) -> tuple[int, list[Kept]]:
    """Read every index; returns how many there are, and the damaged ones, which are removed if they are ours."""
    found = [one for one in kept(options) if one.problem != UNFINISHED]
    bad = [one for one in found if one.problem == DAMAGED]
    for one in bad:
        with contextlib.suppress(OSError):
            if os.geteuid() in (0, os.lstat(one.path).st_uid):  # to its owner it may be good
                os.unlink(one.path)
    return len(found), bad


def _index(path: str, used: float) -> Kept:
    status = os.lstat(path)
    used = max(used, status.st_mtime)
    about: tuple[str, ...] = "", "", DAMAGED
    if verified(path):
        try:
            notes = read_notes(path)
            about = notes["kind"], notes.get("source", "")
        except SourceError as exc:
            about = "", "", exc.rule
    return Kept(path, status.st_size, status.st_mtime, used, *about)


def _remembered(directory: str) -> Iterator[tuple[str, str, float]]:
    """(path, name of its index, when it was last of use) of everything that IndexCache.remember() has noted."""
    for name in os.listdir(directory):
        if name.endswith(".known"):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError, ValueError, TypeError, IndexError), open(path, "rb") as file:
                index = json.load(file)[0]
                if isinstance(index, str):
                    yield path, index, os.fstat(file.fileno()).st_mtime
