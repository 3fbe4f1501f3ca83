"""Writer of a directory of blobs, with one file per blob, named by its blobref. Source: RFC 10 (blobrefs)."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from zarrfs.archives.blobrefs import blobref_of
from zarrfs.errors import SourceError, reason_of
from zarrfs.store.destination import sync_file_system
from zarrfs.store.staging import RESERVED, StagedDirectory, Staging
from zarrfs.system.buffers import write_all

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

ALGORITHMS = ("sha1", "sha256")  # the first one is Flux's default
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BlobDirectory:
    """A writer of blobs to the directory `path`. A blob that exists already is not written again.

    A blob is written to a locked staging directory and then renamed, so it appears atomically. The next writer removes
    unfinished blobs of a process that was killed. put() may be called from any thread. close() removes unfinished
    blobs. Methods raise SourceError if the directory cannot be written to.
    """

    def __init__(self, path: str, algorithm: str = "sha1") -> None:
        self.path, self.algorithm = path, algorithm
        self._written = False  # whether there are unflushed blobs
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._base = -1
        self._buffer = bytearray()
        self._staging: Staging | None = None
        self._staged: StagedDirectory | None = None

    def __enter__(self) -> BlobDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def open(self) -> StagedDirectory:
        """Open the directory and its staging directory."""
        with self._lock, self._failing():
            if self._staged is None:
                self._base = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(RESERVED, 0o700, dir_fd=self._base)
                    mode = stat.S_IMODE(os.fstat(self._base).st_mode)  # the same users may write
                    os.chmod(RESERVED, mode, dir_fd=self._base)
                self._staging = Staging(self._base)
                self._staged = self._staging.directory()
        return self._staged

    def put(self, data: Buffer) -> str:
        """Write `data` as a blob unless it exists; return its blobref."""
        staged = (self._staged or self.open()).descriptor
        name = blobref_of(data, self.algorithm)
        if os.access(name, os.F_OK, dir_fd=self._base) and self._has(name, len(data)):
            self._written = True  # a command that was killed may have written the blob without flushing it
            return name
        work = str(next(self._numbers))
        try:
            descriptor = os.open(work, _NEW, 0o666, dir_fd=staged)
            try:
                write_all(descriptor, data, 0)
            finally:
                os.close(descriptor)
            os.rename(work, name, src_dir_fd=staged, dst_dir_fd=self._base)
        except BaseException as exc:
            with contextlib.suppress(OSError):
                os.unlink(work, dir_fd=staged)
            if isinstance(exc, OSError):
                raise self._failure(os.path.join(self.path, name), exc) from exc
            raise
        self._written = True
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
        """Remove unfinished blobs. Finished ones stay, because another archive may refer to them already."""
        if self._staged is not None and self._staging is not None:
            self._staged.discard()
            self._staging.close()
        if self._base >= 0:
            os.close(self._base)
        self._base, self._staging, self._staged = -1, None, None

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
