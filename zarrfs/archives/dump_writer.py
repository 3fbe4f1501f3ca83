"""Writer of dump tars: an archive and its blobs in one file, as flux dump writes a preserved one.

The document is the member archive/NAME, the Nth region of its files archive/NAME_blobs/N; dump_reader.py reads it.
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

BLOCK = 512  # bytes: headers and members of a tar are padded to it
_RECORD = 20 * BLOCK  # the whole file is padded to it
_PIECE = 256 << 10  # bytes copied by one call
MAIN = "main"  # default name of an archive in Flux
TASK_BYTES = 2 << 20  # bytes of files that a task reads, but for one region of more
# constant fields of a header: mode, uid and gid; mtime; from the type on
_OWNER, _TIME = b"0000644\0" + b"0000000\0" * 2, b"00000000000\0"
_REST = b"0".ljust(101, b"\0") + b"ustar\x0000".ljust(255, b"\0")
_SUM = sum(_OWNER + _TIME + b" " * 8 + _REST)
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_BLOB = re.compile(r".+_blobs\.[0-9]+")
_NAME_MAX = 64  # characters: the name of a member has 100, of which blobs need up to 26 more

BlobSpan = tuple[int, int]  # offset, in the memory of a task, of the header of a blob; bytes of the blob


def check_name(name: str) -> None:
    """Raise UsageError for a name that no archive in a dump tar can have: it is part of the KVS key archive.NAME."""
    if _BLOB.fullmatch(name):
        raise UsageError(f"--name {name}: has the form of a blob's name; choose another")
    if len(name) > _NAME_MAX or not _NAME.fullmatch(name):
        raise UsageError(f"--name {name}: a name has up to {_NAME_MAX} letters, digits, '-', '_', and '.' between")


class TaskBlobs:
    """Hashes the blobs of a task in memory shared with the process that writes the tar.

    They are laid out as in the tar, with room for headers, so that the writer copies them in one piece.
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._memory = memoryview(b"")
        self._at = 0
        self._held: list[BlobSpan] = []

    def use(self, memory: memoryview) -> None:
        """Begin a task: put its blobs into `memory`, from the start on."""
        self._memory, self._at, self._held = memory, 0, []

    def buffer(self, size: int) -> memoryview:
        """Return memory for the next blob of up to `size` bytes."""
        found = self._memory[self._at + BLOCK : self._at + BLOCK + size]
        assert len(found) == size, "memory_of() is too little"
        return found

    def put(self, data: memoryview) -> str:
        """Keep `data`, a prefix of what buffer() returned last, as the next blob; return its blobref."""
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
        """Return how many bytes of one file this task can still take; a larger file becomes tasks of its own."""
        return max(TASK_BYTES - self._at, 0)


def memory_of(region: int) -> int:
    """Return the bytes of memory of a task.

    Files cut into regions take TASK_BYTES and a region, their headers and padding 4,096 KiB; 127 small files, which a
    task takes whatever room there is, 33 KiB each, or less than 1 KiB where regions are as tiny as to need padding.
    """
    return 4 * TASK_BYTES + region


class DumpWriter:
    """Writes the blobs of the archive `name` to `file`, in the order of its regions, and its document last.

    `file` has a descriptor. Tars are reproducible: equal archives give equal bytes.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._descriptor = file.fileno()
        self._path = f"archive/{name.replace('.', '/')}"
        self._count = self._size = 0

    def add(self, blobs: list[BlobSpan], memory: memoryview) -> None:
        """Write the next blobs, which are adjacent in `memory`."""
        if not blobs:
            return
        for at, size in blobs:
            memory[at : at + BLOCK] = header(f"{self._path}_blobs/{self._count}", size)
            self._count += 1
        self._put(memory[blobs[0][0] : padded(at + BLOCK + size)])

    def close(self, document: IO[bytes]) -> None:
        """Write the document, read from its start, and the end of the tar."""
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
    """Return the header of a regular file of `size` bytes; `path` has up to 100 characters.

    Written by hand, as each blob needs one: tarfile takes ten times as long.
    """
    name = path.encode()
    length = b"%011o\0" % size if size < 1 << 33 else b"\x80" + size.to_bytes(11, "big")  # as GNU tar
    checksum = b"%06o\0 " % (sum(name) + sum(length) + _SUM)
    return b"".join((name.ljust(100, b"\0"), _OWNER, length, _TIME, checksum, _REST))


def padded(size: int) -> int:
    """Round up to a multiple of BLOCK."""
    return size + -size % BLOCK
