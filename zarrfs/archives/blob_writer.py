"""A directory of blobs: one file for each, named by its hash. Source: RFC 10 (blobrefs)."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from zarrfs.archives.blobhash import blobref_of
from zarrfs.errors import SourceError
from zarrfs.store.destination import sync_file_system
from zarrfs.store.staging import RESERVED, StagedDirectory, Staging
from zarrfs.system.buffers import write_all

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

ALGORITHMS = ("sha1", "sha256")  # the first is what Flux takes unless told otherwise
LARGE = 16 << 20  # bytes of a file
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BlobDirectory:
    """The directory `path`; a blob that is there is not written again.

    A blob is written in a locked directory of our own and renamed, so none is ever half there; what a dead process
    left is removed by the next that writes. put() may be called from any thread, and from processes that were forked
    after open(). Closing removes what is not finished. SourceError where it cannot be written to.
    """

    def __init__(self, path: str, algorithm: str = "sha1") -> None:
        self.path, self.algorithm = path, algorithm
        self._written = mmap.mmap(-1, 1)  # shared with processes that are forked: whether a blob was written
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
        """Have the directory open, and one to write in."""
        with self._lock, self._failing(self.path):
            if self._staged is None:
                self._base = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(RESERVED, 0o700, dir_fd=self._base)
                    os.chmod(RESERVED, stat.S_IMODE(os.fstat(self._base).st_mode), dir_fd=self._base)  # who may write
                self._staging = Staging(self._base)
                self._staged = self._staging.directory()
        return self._staged

    def put(self, data: Buffer) -> str:
        """The blobref of `data`, which is there from now on."""
        staged = (self._staged or self.open()).descriptor
        name = blobref_of(data, self.algorithm)
        if os.access(name, os.F_OK, dir_fd=self._base) and self._has(name, len(data)):
            return name
        work = f"{os.getpid()}.{next(self._numbers)}"
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
        self._written[0] = 1
        return name

    def use(self, memory: memoryview) -> None:
        """As TaskBlobs.use(): there is nothing to hold."""

    def taken(self) -> list[tuple[int, int]]:
        """As TaskBlobs.taken(): nothing is held."""
        return []

    def room(self) -> int:
        """How many bytes of one file may be put by a task: a larger file is cut."""
        return LARGE

    def buffer(self, size: int) -> memoryview:
        """Where to read a blob to: what was there before is gone."""
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def finish(self) -> None:
        """Have all blobs on the disk.

        One syncfs(2) for all: fsync(2) of each would take a commit of the journal a blob. It writes what others wrote
        to this file system from this machine, too.
        """
        if self._written[0]:
            with self._failing(self.path):
                sync_file_system(self.path)
                self._written[0] = 0

    def close(self) -> None:
        """Remove what is not a blob yet. Blobs stay: another archive may need them by now."""
        if self._staged is not None and self._staging is not None:
            self._staged.discard()
            self._staging.close()
        if self._base >= 0:
            os.close(self._base)
        self._base, self._staging, self._staged = -1, None, None

    def _has(self, name: str, size: int) -> bool:
        """Whether a file `name` of that size is there; its content is believed (zarrfs archive verify looks)."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self._base)
            return status.st_size == size and stat.S_ISREG(status.st_mode)
        return False

    @contextlib.contextmanager
    def _failing(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise self._failure(path, exc) from exc

    def _failure(self, path: str, exc: OSError) -> SourceError:
        return SourceError(path, f"cannot be written: {(exc.strerror or str(exc)).lower()}")
