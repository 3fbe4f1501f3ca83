"""How an archive is to be made, and how far that is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zarrfs.archives.blob_writer import ALGORITHMS
from zarrfs.archives.dump_writer import check_name
from zarrfs.errors import SourceError, UsageError

REGION_MAX = 64 << 20  # bytes of a blob at most: each process holds one
PATH_MAX = 4095  # bytes of a path: what the kernel takes in one call, and who reads archives
_JOBS_MAX = 8  # processes, unless told otherwise: more wait for each other at the directory of blobs


@dataclass(frozen=True)
class Making:
    """What `zarrfs archive create` is told. Sizes are in bytes."""

    blobs: str | None = None  # the directory of blobs
    dump: str | None = None  # the name of the archive in a dump tar, blobs and all; None: the document alone
    algorithm: str = "sha1"
    inline: int = 1024  # files of up to as many are in the document itself
    region: int = 1 << 20  # of a blob at most
    dictionary: bool = False
    all_inline: bool = False
    skip_unsupported: bool = False  # leave out what no archive can hold, with a warning
    sync: bool = False  # have blobs on the disk before the document is there
    jobs: int | None = None  # processes that read and hash; None: as many as there are CPUs, up to 8
    excludes: tuple[str, ...] = ()  # globs: of a name at any depth, or with a "/" of a path; with all below it
    leave_out: Callable[[str], bool] | None = None  # whether a path is left out, and all below it, silently
    own: frozenset[tuple[int, int]] = frozenset()  # (device, inode) of what is written meanwhile: left out

    def check(self) -> None:
        """UsageError where that cannot be done."""
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f"{self.algorithm}: is not a hash of blobs ({', '.join(ALGORITHMS)})")
        if not 1 <= self.region <= REGION_MAX:
            raise UsageError(f"a region of {self.region:,} bytes: it has 1 to {REGION_MAX:,}")
        if self.dump is not None:
            check_name(self.dump)
            if self.blobs is not None:
                raise UsageError("a tar has the blobs in it: --blobs has nothing to do")
        if self.all_inline and self.blobs is not None:
            raise UsageError("--inline puts everything into the document: --blobs has nothing to do")

    def processes(self) -> int:
        """How many read and hash."""
        return self.jobs or min(len(os.sched_getaffinity(0)), _JOBS_MAX)


@dataclass
class Progress:
    """How far create() is; what is expected is not known until expect() has ended."""

    files: int = 0
    bytes: int = 0
    expected_files: int | None = None
    expected_bytes: int | None = None


def failed(base: str, path: str, rule: str | OSError) -> SourceError:
    """What is wrong with an entry of the directory `base`."""
    if isinstance(rule, FileNotFoundError | NotADirectoryError):
        rule = "no such file or directory (or it is gone meanwhile)"
    elif isinstance(rule, OSError):
        rule = (rule.strerror or str(rule)).lower()
    return SourceError(path or ".", rule) if base == "." else SourceError(base, rule, path or ".")


@contextlib.contextmanager
def reading(base: str, path: str) -> Iterator[None]:
    """Turns what the system says about an entry meanwhile into a SourceError about it."""
    try:
        yield
    except OSError as exc:
        raise failed(base, path, exc) from exc


def changed(base: str, path: str) -> SourceError:
    """That an entry is not what it was a moment ago."""
    return failed(base, path, "changed while it was read: archive it when nothing writes to it")


def path_rule(path: str) -> str | None:
    """Why an archive cannot hold something of that path."""
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "a name that is not UTF-8, which no archive can hold"
    return f"a path over {PATH_MAX:,} bytes, which no archive can hold" if size > PATH_MAX else None


def time_rule(mtime_ns: int) -> str | None:
    """Why an archive cannot hold something of that time."""
    return None if -(2**63) <= mtime_ns < 2**63 else "a time that does not fit 64 bits of nanoseconds"
