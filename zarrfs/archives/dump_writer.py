"""Writer of dump tars: an archive and its blobs in one file, as flux dump writes a preserved archive.

The member archive/NAME is the document, and archive/NAME_blobs/N is the Nth region of its files. dump_reader.py reads
such tars.
Sources: POSIX.1 ("ustar Interchange Format"); flux-core, flux-archive(1) and flux-restore(1).
"""

from __future__ import annotations

import os
import re
from typing import IO, TYPE_CHECKING

from zarrfs.archives.blobrefs import blobref_of
from zarrfs.errors import UsageError
from zarrfs.system.buffers import write_all

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

BLOCK = 512  # bytes; headers and members of a tar are padded to a multiple of it
_RECORD = 20 * BLOCK  # the whole file is padded to a multiple of it
_PIECE = 256 << 10  # bytes copied by one call
MAIN = "main"  # default name of an archive in Flux
TASK_BYTES = 2 << 20  # bytes of files that a task reads, unless a single region is larger
# constant fields of a header: mode, uid and gid; mtime; the type and all fields after it
_OWNER, _TIME = b"0000644\0" + b"0000000\0" * 2, b"00000000000\0"
_REST = b"0".ljust(101, b"\0") + b"ustar\x0000".ljust(255, b"\0")
_SUM = sum(_OWNER + _TIME + b" " * 8 + _REST)
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_BLOB = re.compile(r".+_blobs\.[0-9]+")
_NAME_MAX = 64  # characters; a member's name has up to 100, and blobs add up to 26 to the archive's name

BlobSpan = tuple[int, int]  # (offset of a blob's header in the memory of a task, bytes of the blob)


def check_name(name: str) -> None:
    """Raise UsageError for a name that no archive in a dump tar can have, because the KVS key is archive.NAME."""
    if _BLOB.fullmatch(name):
        raise UsageError(f"--name {name}: has the form of a blob's name; choose another")
    if len(name) > _NAME_MAX or not _NAME.fullmatch(name):
        raise UsageError(f"--name {name}: a name has up to {_NAME_MAX} letters, digits, '-', '_', and '.' between")


class TaskBlobs:
    """The blobs of one task, hashed and kept in memory shared with the process that writes the tar.

    They are laid out as in the tar, with room for headers, so that the writer can write them as one piece.
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._memory = memoryview(b"")
        self._at = 0
        self._held: list[BlobSpan] = []

    def use(self, memory: memoryview) -> None:
        """Begin a task whose blobs go to `memory`, from its start on."""
        self._memory, self._at, self._held = memory, 0, []

    def buffer(self, size: int) -> memoryview:
        """Return memory for the next blob of up to `size` bytes."""
        found = self._memory[self._at + BLOCK : self._at + BLOCK + size]
        assert len(found) == size, "memory_of() is too little"
        return found

    def put(self, data: memoryview) -> str:
        """Keep `data` as the next blob and return its blobref. `data` is a prefix of the last result of buffer()."""
        self._held.append((self._at, len(data)))
        end = self._at + BLOCK + len(data)
        self._at = padded(end)
        self._memory[end : self._at] = bytes(self._at - end)
        return blobref_of(data, self._algorithm)

    def take(self) -> list[BlobSpan]:
        """Return the blobs put since the last call, in order."""
        found, self._held = self._held, []
        return found

    def room(self) -> int:
        """Return how many bytes of one file this task can still take; a larger file is split into several tasks."""
        return max(TASK_BYTES - self._at, 0)


def memory_of(region: int) -> int:
    """Return the bytes of memory that a task needs at most, for regions of up to `region` bytes.

    Files cut into regions need TASK_BYTES and one more region, and 4,096 KiB for headers and padding. A task may also
    take 127 small files without regard to its room. Each needs up to 33 KiB, or less than 1 KiB if the regions are so
    small that padding matters.
    """
    return 4 * TASK_BYTES + region


class DumpWriter:
    """A writer of the blobs of the archive `name` to `file`, in the order of its regions, and then of its document.

    `file` must have a descriptor. Tars are reproducible: equal archives give equal bytes.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._descriptor = file.fileno()
        self._path = f"archive/{name.replace('.', '/')}"
        self._count = self._size = 0

    def add(self, blobs: list[BlobSpan], memory: memoryview) -> None:
        """Write the next blobs, which are adjacent in `memory`, with their headers."""
        if not blobs:
            return
        for at, size in blobs:
            memory[at : at + BLOCK] = header(f"{self._path}_blobs/{self._count}", size)
            self._count += 1
        self._put(memory[blobs[0][0] : padded(at + BLOCK + size)])

    def close(self, document: IO[bytes]) -> None:
        """Write all of `document`, and the end of the tar."""
        size = document.seek(0, os.SEEK_END)
        document.seek(0)
        self._put(header(self._path, size))
        while piece := document.read(_PIECE):
            self._put(piece)
        end = padded(size) - size + 2 * BLOCK
        self._put(bytes(end + -(self._size + end) % _RECORD))

    def _put(self, data: Buffer) -> None:
        write_all(self._descriptor, data, self._size)
        self._size += len(data)


def header(path: str, size: int) -> bytes:
    """Return the tar header of a regular file of `size` bytes; `path` has up to 100 characters.

    This does not use tarfile, which would take ten times as long, because each blob needs a header.
    """
    name = path.encode()
    length = b"%011o\0" % size if size < 1 << 33 else b"\x80" + size.to_bytes(11, "big")  # as GNU tar does
    checksum = b"%06o\0 " % (sum(name) + sum(length) + _SUM)
    return b"".join((name.ljust(100, b"\0"), _OWNER, length, _TIME, checksum, _REST))


def padded(size: int) -> int:
    """Round up to a multiple of BLOCK."""
    return size + -size % BLOCK
