"""Reader of blobs in content.sqlite, the database of a stopped Flux instance.

Source: flux-core, content-sqlite: table objects(hash, size, object, ...). `hash` is the digest's bytes, bound as
TEXT. If `size` is -1, `object` is the blob itself; otherwise `size` is the blob's length, and `object` is an LZ4 block
without a frame. The file is opened as immutable, so the database of a running instance must be refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import struct
import threading
from urllib.parse import quote

from zarrfs.archives.blobrefs import LARGEST
from zarrfs.errors import OutOfRange, ReadError, TargetMissing, WrongHash

_LOCKS = (0x40000000, 512)  # (start, length) of the bytes that SQLite locks ("File Locking", PENDING_BYTE)
_LOOK = "SELECT size, length(object), rowid FROM objects WHERE hash = CAST(? AS TEXT) LIMIT 1"
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux: type, whence, start, length, pid
_RATIO = 255  # bytes that one byte of LZ4 expands to at most (LZ4 block format, "Parsing restrictions")


def fault_of(path: str) -> str:
    """Return why an SQLite file is no usable source of blobs, or "". Raise OSError if it cannot be opened."""
    path = os.path.realpath(path)  # SQLite keeps its journal beside the real file
    for suffix in ("-wal", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path + suffix).st_size:
                return f"in use by a Flux instance, or left open by one ({suffix}): blobs=flux:, or stop it first"
    if _locked(path):
        return "in use by another process, perhaps a running Flux instance: blobs=flux:, or stop it first"
    try:
        with contextlib.closing(_connect(path)) as db:
            db.execute("SELECT hash, size, object FROM objects LIMIT 0")
    except sqlite3.Error as exc:
        return f"a database of SQLite, but not of Flux's blobs: {exc}"
    return ""


class ContentDatabase:
    """A content.sqlite file, opened on the first read. Methods block and are thread-safe."""

    def __init__(self, path: str) -> None:
        self.shown = path
        self._db: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def load(self, blobref: str, declared: int | None) -> bytes:
        """Return the bytes of a blob, without verifying its hash.

        Raise TargetMissing, OutOfRange if the blob has another length than `declared` or is larger than any blob may
        be, WrongHash if its LZ4 data are damaged, or another ReadError.
        """
        digest, where = bytes.fromhex(blobref.partition("-")[2]), f"{self.shown}: {blobref}"
        try:
            with self._lock:
                if self._db is None:
                    self._db = _connect(self.shown)
                row = self._db.execute(_LOOK, (digest,)).fetchone()
                if row is None:
                    raise TargetMissing(where, "no such blob")
                size, stored, number = row
                length = stored if size == -1 else size
                if not isinstance(length, int):
                    raise ReadError(where, "an object that is not as Flux writes them")
                if length > LARGEST or (declared is not None and length != declared):
                    right = "no blob has" if declared is None else f"where the archive says {declared}"
                    raise OutOfRange(where, f"a blob of {length} bytes, {right}")
                (data,) = self._db.execute("SELECT object FROM objects WHERE rowid = ?", (number,)).fetchone()
        except sqlite3.Error as exc:
            raise ReadError(where, str(exc)) from exc
        if not isinstance(data, bytes):
            raise ReadError(where, "an object that is not as Flux writes them")
        return data if size == -1 else _expanded(data, size, where)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None


def _expanded(data: bytes, size: int, where: str) -> bytes:
    if not 0 <= size <= _RATIO * len(data):
        raise WrongHash(where, f"damaged: {len(data)} bytes of LZ4 cannot be {size}")
    try:
        import lz4.block
    except ImportError:
        from zarrfs.system.packages import install_command

        rule = f"compressed with LZ4, which needs the package lz4: {install_command('flux')}"
        raise ReadError(where, rule) from None
    try:
        found: bytes = lz4.block.decompress(data, uncompressed_size=size)
    except lz4.block.LZ4BlockError as exc:
        raise WrongHash(where, f"damaged: {exc}") from None
    return found


def _connect(path: str) -> sqlite3.Connection:
    url = f"file:{quote(os.fsencode(path))}?mode=ro&immutable=1"
    return sqlite3.connect(url, uri=True, check_same_thread=False, isolation_level=None)


def _locked(path: str) -> bool:
    """Return whether any process holds an SQLite lock on the file."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *_LOCKS, 0)
    with open(path, "rb") as file:
        try:
            answer = fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, asked)
        except OSError:  # a file system without locks
            return False
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
