"""Where indexes are kept, and which of them are believed.

An index is named by what it was made of and by what it holds: DIGEST.SHA256.index, where DIGEST stands for the
document, the options that shape its index and the layout's version, and SHA256 is that of the file itself. One
that belongs to somebody else, that others may write, or whose content is not what its name says, is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator

from zarrfs.errors import SourceError, UsageError
from zarrfs.options import Options
from zarrfs.store.indexfile import open_database

_SCRATCH = re.compile(r"\.zarrfs-.*\.tmp")  # names of indexes that are being written
_ABANDONED = 86_400.0  # seconds after which a temporary file has no writer any more


class IndexCache:
    """The directory of indexes: index_dir=, else in the cache directory, else a new one that is `temporary`."""

    def __init__(self, options: Options) -> None:
        self.temporary = False
        self._asked = options.index_dir is not None
        self.directory = os.path.abspath(options.index_dir) if options.index_dir else _usual_directory()
        self._problem: str | None = None
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            if not os.access(self.directory, os.W_OK):
                self._problem = "not writable"
        except OSError as exc:
            self._problem = f"cannot be made: {(exc.strerror or str(exc)).lower()}"

    def find(self, digest: str) -> tuple[str, dict[str, str]] | None:
        """(path, notes) of a kept index for `digest` that can be believed; those that cannot are removed."""
        for path, content in self._candidates(digest):
            notes = _notes(path, content)
            if notes is not None:
                return path, notes
            with contextlib.suppress(OSError):
                os.unlink(path)
        return None

    @contextlib.contextmanager
    def new(self) -> Iterator[str]:
        """A path to write an index to; what is left there is removed. UsageError where nothing can be written."""
        if self._problem is not None:
            if self._asked:
                raise UsageError(f"option index_dir={self.directory}: {self._problem}")
            self.directory, self.temporary = tempfile.mkdtemp(prefix="zarrfs-"), True
        self._sweep()
        scratch = os.path.join(self.directory, f".zarrfs-{secrets.token_hex(8)}.tmp")
        try:
            yield scratch
        except BaseException:
            if self.temporary:
                shutil.rmtree(self.directory, ignore_errors=True)
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(scratch)

    def keep(self, scratch: str, digest: str) -> str:
        """Give a finished index its name; returns its path."""
        with open(scratch, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        path = os.path.join(self.directory, f"{digest}.{content}.index")
        os.rename(scratch, path)
        return path

    def _candidates(self, digest: str) -> list[tuple[str, str]]:
        """(path, content hash by name) of all files named for `digest`."""
        pattern = re.compile(re.escape(digest) + r"\.([0-9a-f]{64})\.index")
        try:
            matches = [pattern.fullmatch(name) for name in os.listdir(self.directory)]
        except OSError:
            return []
        return [(os.path.join(self.directory, match[0]), match[1]) for match in matches if match]

    def _sweep(self) -> None:
        """Remove what killed writers have left."""
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                if _SCRATCH.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > _ABANDONED:
                    os.unlink(entry.path)


def _usual_directory() -> str:
    """Root's is the system's, as helpers and units have no HOME."""
    if os.geteuid() == 0 and "XDG_CACHE_HOME" not in os.environ:
        return "/var/cache/zarrfs/index"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "zarrfs", "index")


def _notes(path: str, content: str) -> dict[str, str] | None:
    """The notes in an index file, if it is ours and holds what its name says."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            if hashlib.file_digest(file, "sha256").hexdigest() != content:
                return None
        with contextlib.closing(open_database(path)) as db:
            notes = dict(db.execute("SELECT name, value FROM meta"))
        json.loads(notes["warnings"])
    except (OSError, SourceError, sqlite3.Error, KeyError, ValueError):
        return None
    return notes if "kind" in notes else None
