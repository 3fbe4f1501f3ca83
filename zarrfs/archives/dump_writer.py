"""A dump tar: an archive and its blobs in one file, as flux dump writes a preserved one.

The document is the member archive/NAME, the Nth region of its files archive/NAME_blobs/N; dump_reader.py reads it.
Sources: POSIX.1 ("ustar Interchange Format"); flux-core, flux-archive(1) and flux-restore(1).
"""

from __future__ import annotations

import os
import re
from typing import IO, TYPE_CHECKING

from zarrfs.archives.blobhash import blobref_of
from zarrfs.errors import UsageError
from zarrfs.system.buffers import write_all

if TYPE_CHECKING:
    from zarrfs.system.buffers import Buffer

_BLOCK = 512  # bytes: what everything in a tar is a multiple of
_RECORD = 20 * _BLOCK  # of the whole
_PIECE = 256 << 10  # bytes copied by one call
MAIN = "main"  # what Flux calls an archive unless told otherwise
HELD = 2 << 20  # bytes of files that are not small, or of one region of more, that a task reads
# fields of a header: mode, uid and gid; mtime; from the type on
_OWNER, _TIME = b"0000644\0" + b"0000000\0" * 2, b"00000000000\0"
_REST = b"0".ljust(101, b"\0") + b"ustar\x0000".ljust(255, b"\0")
_SUM = sum(_OWNER + _TIME + b" " * 8 + _REST)
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_BLOB = re.compile(r".+_blobs\.[0-9]+")
_NAME_MAX = 64  # characters: a member has 100, of which blobs need up to 26 more

Held = tuple[int, int]  # where the header of a blob is to be in the memory of its task, and the length of the blob


def check_name(name: str) -> None:
    """UsageError for what cannot be the name of an archive in a dump tar: it is part of a key, archive.NAME."""
    if _BLOB.fullmatch(name):
        raise UsageError(f"--name {name}: is what a blob of another archive is called")
    if len(name) > _NAME_MAX or not _NAME.fullmatch(name):
        raise UsageError(f"--name {name}: a name has up to {_NAME_MAX} letters, digits, '-', '_', and '.' between")


class TaskBlobs:
    """Hashes the blobs of a task, which lie in a memory shared with who writes them: as in a tar, but for headers."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._memory = memoryview(b"")
        self._at = 0
        self._held: list[Held] = []

    def use(self, memory: memoryview) -> None:
        """Have the blobs from now on in `memory`, from its beginning."""
        self._memory, self._at, self._held = memory, 0, []

    def buffer(self, size: int) -> memoryview:
        """Where to read the next blob to."""
        found = self._memory[self._at + _BLOCK : self._at + _BLOCK + size]
        assert len(found) == size, "memory_of() is too little"
        return found

    def put(self, data: memoryview) -> str:
        """The blobref of `data`, which is the beginning of what buffer() gave, and is held from now on."""
        self._held.append((self._at, len(data)))
        end = self._at + _BLOCK + len(data)
        self._at = _padded(end)
        self._memory[end : self._at] = bytes(self._at - end)
        return blobref_of(data, self._algorithm)

    def taken(self) -> list[Held]:
        """What was put since the last time, in the order in which it came."""
        found, self._held = self._held, []
        return found

    def room(self) -> int:
        """How many bytes of one file may be put now: a larger file is cut."""
        return max(HELD - self._at, 0)


def memory_of(region: int) -> int:
    """The bytes of memory of a task: HELD and a region, with headers and paddings of thousands of tiny regions."""
    return 3 * HELD + region


class DumpWriter:
    """Writes to `file` the blobs of the archive `name`, in the order of its regions, and at last its document.

    `file` is one of the system. Nothing in it is chance: equal archives make equal tars.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._descriptor = file.fileno()
        self._path = f"archive/{name.replace('.', '/')}"
        self._count = self._size = 0

    def add(self, blobs: list[Held], memory: memoryview) -> None:
        """Write the next blobs, which lie in `memory` one after the other."""
        if not blobs:
            return
        for at, size in blobs:
            memory[at : at + _BLOCK] = header(f"{self._path}_blobs/{self._count}", size)
            self._count += 1
        self._put(memory[blobs[0][0] : _padded(at + _BLOCK + size)])

    def close(self, document: IO[bytes]) -> None:
        """Write the document, which is read from its beginning, and the end."""
        size = document.seek(0, os.SEEK_END)
        document.seek(0)
        self._put(header(self._path, size))
        while piece := document.read(_PIECE):
            self._put(piece)
        end = _padded(size) - size + 2 * _BLOCK
        self._put(bytes(end + -(self._size + end) % _RECORD))

    def _put(self, data: Buffer) -> None:
        write_all(self._descriptor, data, self._size)
        self._size += len(data)


def header(path: str, size: int) -> bytes:
    """The header of a regular file of `size` bytes; `path` has up to 100 characters.

    By hand, in a tenth of the time that tarfile takes: there is one for each blob.
    """
    name = path.encode()
    length = b"%011o\0" % size if size < 1 << 33 else b"\x80" + size.to_bytes(11, "big")  # as GNU has larger ones
    checksum = b"%06o\0 " % (sum(name) + sum(length) + _SUM)
    return b"".join((name.ljust(100, b"\0"), _OWNER, length, _TIME, checksum, _REST))


def _padded(size: int) -> int:
    return size + -size % _BLOCK
