"""Writer of a directory of blobs, with one file per blob, named by its blobref. Source: RFC 10 (blobrefs)."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from zarrfs.archives.blobrefs import blobref_of
from zarrfs.errors import SourceError, reason_of
from zarrfs.store.destination import sync_file_system
from zarrfs.store.writing import NewFile, remove_abandoned
from zarrfs.system.buffers import write_all

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

ALGORITHMS = ("sha1", "sha256")  # the first one is Flux's default


class BlobDirectory:
    """A writer of blobs to the directory `path`. A blob that exists already is not written again.

    A blob appears under its name when it is complete. put() may be called from any thread. Methods raise SourceError
    if the directory cannot be written to.
    """

    def __init__(self, path: str, algorithm: str = "sha1") -> None:
        self.path, self.algorithm = path, algorithm
        self._written = False  # whether there are unflushed blobs
        self._lock = threading.Lock()
        self._base = -1
        self._buffer = bytearray()

    def __enter__(self) -> BlobDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def open(self) -> int:
        """Open the directory, and remove what killed writers left there; return the descriptor."""
        with self._lock, self._failing():
            if self._base < 0:
                self._base = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                remove_abandoned(self._base)
        return self._base

    def put(self, data: Buffer) -> str:
        """Write `data` as a blob unless it exists; return its blobref."""
        base = self._base if self._base >= 0 else self.open()
        name = blobref_of(data, self.algorithm)
        self._written = True  # also if it exists: a command that was killed may not have flushed it
        if os.access(name, os.F_OK, dir_fd=base) and self._has(name, len(data)):
            return name
        try:
            with contextlib.closing(NewFile(base)) as new:
                write_all(new.descriptor, data, 0)
                new.place(base, os.fsencode(name))
        except OSError as exc:
            raise self._failure(os.path.join(self.path, name), exc) from exc
        return name

    def buffer(self, size: int) -> memoryview:
        """Return memory to read a blob into. The next call reuses it."""
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def finish(self) -> None:
        """Flush all blobs to the disk.

        One syncfs(2) flushes all of them, while fsync(2) would commit the journal for each blob. It also flushes data
        that other programs wrote to this file system.
        """
        if self._written:
            with self._failing():
                sync_file_system(self.path)
                self._written = False

    def close(self) -> None:
        """Close the directory. Blobs stay, because another archive may refer to them already."""
        if self._base >= 0:
            os.close(self._base)
        self._base = -1

    def _has(self, name: str, size: int) -> bool:
        """Return whether a file of this name and size exists. Its bytes are left to `zarrfs check`."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self._base)
            return status.st_size == size and stat.S_ISREG(status.st_mode)
        return False

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise self._failure(self.path, exc) from exc

    def _failure(self, path: str, exc: OSError) -> SourceError:
        return SourceError(path, f"cannot be written: {reason_of(exc)}")
