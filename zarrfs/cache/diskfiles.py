"""The files of the disk cache: where they lie, what is in them, and when one is believed.

    cache_dir/zarrfs-blocks-1/          LAYOUT; what another version made has another name and is left alone
      usage, leases/                    diskspace.py
      claims/                           leases.py
      3f/a91c...                        a block, named by the BLAKE2b of what it is (its first two digits: 3f)
      3f/07d2....v                      the version of a target, as its server told it last
      3f/.x8_...tmp                     being written
    cache_dir/blobs/sha1-9f3c...        a blob of an archive (RFC 10), as a place of blobs has it: no header
    cache_dir/blobs/.zarrfs-cache       made by us: what anybody else has called blobs is left alone

A block is a header and its bytes, never changed after it got its name. It is believed where its name, length and
XXH3-128 agree with the header. That finds accidents (a torn write, a bad disk, a file that was moved), not
somebody who may write here: whoever shares a cache directory is trusted with what is read from it.
Nothing here follows a symbolic link below the cache directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zarrfs.system.beneath import is_local, open_cached
from zarrfs.system.buffers import Buffer, write_parts
from zarrfs.system.localfiles import read_cached

LAYOUT = "zarrfs-blocks-1"
HEADER = struct.Struct("<8sQQ16s16s16s")  # magic, start, length, name, hash of the target, XXH3-128 of all but itself
MAGIC = b"zarrfsB1"
RECORD = ".v"  # ends the name of a version record
RECORD_MAX = 64 << 10  # bytes
FOLDER = re.compile(r"[0-9a-f]{2}")
KEPT = re.compile(r"[0-9a-f]{30}(\.v)?")
BLOB = re.compile(r"sha1-[0-9a-f]{40}|sha256-[0-9a-f]{64}")
BLOBS = "../blobs"  # from LAYOUT
BLOBS_MARK = ".zarrfs-cache"
TEMPORARY = re.compile(r"\..*\.tmp")
_SLOW = 0.25  # seconds: what opens no faster is for threads alone
TOUCH = 60.0  # seconds: how exactly the time of the last use is known

_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # a FIFO in a file's place must not stop us
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Damaged(Exception):
    """A file that is not what its name says; str() is why."""


class Block(NamedTuple):
    """The contents of a block's file."""

    start: int  # of its first byte in the target
    data: memoryview
    target: bytes  # hash_of() the target
    due: bool = False  # it was not marked as used for a while


def hash_of(*parts: str | int) -> bytes:
    """16 bytes that stand for `parts`, in that order."""
    text = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else b"%d" % part for part in parts]
    return hashlib.blake2b(b"".join(b"%d:%s" % (len(part), part) for part in text), digest_size=16).digest()


class Handle(int):
    """A descriptor that is closed when nobody refers to it any more, so never under a thread that uses it.

    As an argument of a call it lives as long as that, whatever forget() lets go of in another thread.
    """

    __slots__ = ()

    def __del__(self) -> None:
        os.close(self)


class Layout:
    """The directory LAYOUT in a cache directory and the 256 in it, opened when they are first used and held open.

    Methods raise OSError, FileNotFoundError where there is nothing yet, and Damaged.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._folders: dict[str, Handle] = {}  # by name; "" is LAYOUT itself
        self._mode = 0o700  # of directories: who may write the cache directory may do so below it, and nobody else
        self._local = False  # on a file system that never waits for a server
        self._scratch = f".{secrets.token_hex(6)}"
        self._numbers = itertools.count()

    def folder(self, name: str, make: bool = False) -> Handle:
        """The directory `name` in LAYOUT ("": LAYOUT itself), open; made if it is missing and `make`."""
        found = self._folders.get(name)
        if found is None:
            found = self._open_folder(name, make) if name else self._open_root(make)
            found = self._folders.setdefault(name, found)  # never in place of one that another thread uses
        return found

    def _open_root(self, make: bool) -> Handle:
        path = os.path.join(self.directory, LAYOUT)
        try:
            root = Handle(os.open(path, _DIRECTORY))
        except FileNotFoundError:
            if not make:
                raise
            os.makedirs(self.directory, 0o700, exist_ok=True)
            shared = os.stat(self.directory).st_mode
            mode = 0o700 | (0o070 if shared & stat.S_IWGRP else 0) | (0o007 if shared & stat.S_IWOTH else 0)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode)
                _set_mode(Handle(os.open(path, _DIRECTORY)), mode)
            root = Handle(os.open(path, _DIRECTORY))
        self._mode = os.fstat(root).st_mode & 0o777
        self._local = is_local(root)
        return root

    def _open_folder(self, name: str, make: bool) -> Handle:
        root = self.folder("", make)
        if name == BLOBS:
            return self._open_blobs(root, make)
        try:
            return Handle(os.open(name, _DIRECTORY, dir_fd=root))
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, self._mode, dir_fd=root)
            _set_mode(Handle(os.open(name, _DIRECTORY, dir_fd=root)), self._mode)
        return Handle(os.open(name, _DIRECTORY, dir_fd=root))

    def _open_blobs(self, root: Handle, make: bool) -> Handle:
        """The directory of blobs, if it is one that we have made; FileNotFoundError, with `make` FileExistsError."""
        scratch = f"../{self._scratch}{next(self._numbers):x}.blobs"  # a name of its own: threads may come at once
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(scratch, self._mode, dir_fd=root)
                made = Handle(os.open(scratch, _DIRECTORY, dir_fd=root))
                _set_mode(made, self._mode)
                os.close(os.open(BLOBS_MARK, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=made))
            try:
                os.stat(BLOBS, dir_fd=root, follow_symlinks=False)
            except FileNotFoundError:
                with contextlib.suppress(OSError):  # another process was faster
                    os.rename(scratch, BLOBS, src_dir_fd=root, dst_dir_fd=root)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{scratch}/{BLOBS_MARK}", dir_fd=root)
                os.rmdir(scratch, dir_fd=root)
        try:
            found = Handle(os.open(BLOBS, _DIRECTORY, dir_fd=root))
            os.stat(BLOBS_MARK, dir_fd=found, follow_symlinks=False)
        except OSError as exc:
            code = errno.EEXIST if make else errno.ENOENT
            raise OSError(code, "blobs in it is something else, and is left alone") from exc
        return found

    def forget(self) -> None:
        """Open everything anew: somebody has removed the directory under us."""
        self._folders = {}

    def open(self, folder: str, name: str, flags: int, make: bool = False) -> int:
        """A descriptor of the file `name`; a new file gets the mode that its directory asks for."""
        fd = os.open(name, flags | _FILE, self._mode & 0o600, dir_fd=self.folder(folder, make))
        if flags & os.O_CREAT and self._mode & 0o077:
            with contextlib.suppress(PermissionError):  # somebody else has made it
                os.fchmod(fd, self._mode & 0o666)
        return fd

    def size(self, name: str) -> int | None:
        """Bytes in the file `name`, None if there is none."""
        folder, name = _parts(name)
        try:
            status = os.stat(name, dir_fd=self.folder(folder), follow_symlinks=False)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def put(self, name: str, parts: Sequence[Buffer]) -> int:
        """Write the file `name`: it appears whole. Returns the bytes that it takes on the disk."""
        scratch = f"{self._scratch}{next(self._numbers):x}.tmp"
        where, name = _parts(name)
        folder = self.folder(where, make=True)
        fd = self.open(where, scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                write_parts(fd, parts)
                taken = os.fstat(fd).st_blocks * 512
            finally:
                os.close(fd)
            os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch, dir_fd=folder)
            raise
        return taken

    def load(self, name: str, length_max: int | None = None, touch: bool = True, now: bool = False) -> Block:
        """The block `name`, verified, and marked as used with `touch`. Damaged if it is not what its name says.

        `now`: BlockingIOError unless it can be had without waiting; it is not marked then.
        """
        fd = self._open_kept(name, now)
        try:
            status = os.fstat(fd)
            if length_max is not None and status.st_size > HEADER.size + length_max:
                raise Damaged("longer than it may be")
            if not stat.S_ISREG(status.st_mode):
                raise Damaged("not a file")
            if length_max is None:  # before so much memory is taken
                _header(memoryview(os.pread(fd, HEADER.size, 0)), name, status.st_size)
            whole = memoryview(_read_now(fd, status.st_size) if now else _read_all(fd, status.st_size))
            start, target, head, check = _header(whole, name, status.st_size)
            data = whole[HEADER.size :]
            if _check(head, data) != check:
                raise Damaged("wrong checksum")
            due = time.time() - status.st_mtime > TOUCH
            if due and touch and not now:
                with contextlib.suppress(OSError):  # read-only, or of somebody else: it goes sooner
                    os.utime(fd)
        finally:
            os.close(fd)
        return Block(start, data, target, due)

    def target(self, name: str) -> bytes:
        """The hash of the target that the block `name` is of."""
        fd = self._open_kept(name)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Damaged("not a file")
            return _header(memoryview(os.pread(fd, HEADER.size, 0)), name, status.st_size)[1]
        finally:
            os.close(fd)

    def blob(self, name: str) -> int:
        """A descriptor of the blob `name`, not verified. Damaged if it is no file."""
        return self._open_kept(name)

    def load_record(self, name: str, now: bool = False) -> tuple[bytes, float]:
        """(content of the record `name`, when it was written or touched in seconds since 1970). `now`: as load()."""
        fd = self._open_kept(name, now)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > RECORD_MAX:
                raise Damaged("no version record")
            text = _read_now(fd, status.st_size) if now else _read_all(fd, status.st_size)
            return bytes(text), status.st_mtime
        finally:
            os.close(fd)

    def touch(self, name: str) -> None:
        """Let the file `name` be seen now."""
        folder, name = _parts(name)
        os.utime(name, dir_fd=self.folder(folder), follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Remove the file `name`. OSError where that fails."""
        folder, name = _parts(name)
        os.unlink(name, dir_fd=self.folder(folder))

    def remove(self, name: str) -> None:
        """Remove what is at `name`, also an empty directory. Never raises."""
        with contextlib.suppress(OSError):
            try:
                self.unlink(name)
            except IsADirectoryError:
                folder, name = _parts(name)
                os.rmdir(name, dir_fd=self.folder(folder))

    def entries(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """(name, lstat) of everything in one directory of LAYOUT, its own as "."; what vanishes is left out."""
        with contextlib.suppress(FileNotFoundError):
            if folder == BLOBS:
                self.folder(BLOBS)  # only if it is ours
            own = Handle(os.open(folder or ".", _DIRECTORY, dir_fd=self.folder("")))  # its own offset
            yield ".", os.fstat(own)
            with os.scandir(own) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.name, entry.stat(follow_symlinks=False)

    def kept(self) -> Iterator[tuple[str, os.stat_result]]:
        """(name for load(), lstat) of all blocks and version records, and of blobs, which have no header to load."""
        for folder, about in self.entries(""):
            if FOLDER.fullmatch(folder) and stat.S_ISDIR(about.st_mode):
                for name, status in self.entries(folder):
                    if KEPT.fullmatch(name):
                        yield folder + name, status
        for name, status in self.entries(BLOBS):
            if BLOB.fullmatch(name):
                yield name, status

    def _open_kept(self, name: str, now: bool = False) -> int:
        folder, name = _parts(name)
        if now:
            root = self._folders.get("")
            if root is None or not self._local:
                raise BlockingIOError(errno.EAGAIN, "may have to wait for a server")
            began = time.monotonic()
            try:
                return open_cached(f"{folder}/{name}", os.O_RDONLY | _FILE, root)
            finally:  # a scanner of viruses, say, that is asked before a file opens
                self._local = time.monotonic() - began < _SLOW
        try:
            return os.open(name, os.O_RDONLY | _FILE, dir_fd=self.folder(folder))
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO):
                raise Damaged("a symbolic link or a socket") from None
            raise


def _parts(name: str) -> tuple[str, str]:
    """(directory, name in it) of what is kept as `name`."""
    return (BLOBS, name) if BLOB.fullmatch(name) else (name[:2], name[2:])


def header(name: str, target: bytes, start: int, data: Buffer) -> bytes:
    """The header of a block that will be called `name`."""
    head = HEADER.pack(MAGIC, start, memoryview(data).nbytes, bytes.fromhex(name), target, bytes(16))[:-16]
    return head + _check(head, data)


def _header(whole: memoryview, name: str, size: int) -> tuple[int, bytes, memoryview, bytes]:
    """(start, target, the header but its checksum, checksum) of what a file begins with; agrees with name and size."""
    if len(whole) < HEADER.size:
        raise Damaged("cut short")
    magic, start, length, named, target, check = HEADER.unpack_from(whole)
    if magic != MAGIC or named != bytes.fromhex(name):
        raise Damaged("another file")
    if size != HEADER.size + length:
        raise Damaged("cut short, or too long")
    return start, target, whole[: HEADER.size - len(check)], check


def _check(head: Buffer, data: Buffer) -> bytes:
    import xxhash

    state = xxhash.xxh3_128(head)
    state.update(data)
    return state.digest()


def checksum(text: bytes) -> bytes:
    """16 hexadecimal digits that tell accidents to a small file."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(text).encode()


def _read_all(fd: int, size: int) -> bytes:
    data = os.pread(fd, size, 0)
    while len(data) < size:  # on some network file systems, and over 2 GiB
        more = os.pread(fd, size - len(data), len(data))
        if not more:
            raise Damaged("cut short")
        data += more
    return data


def _read_now(fd: int, size: int) -> Buffer:
    """As _read_all(), from the page cache alone; BlockingIOError where not all is there."""
    data = read_cached(fd, 0, size)
    if len(data) < size:
        raise BlockingIOError(errno.EAGAIN, "not in memory")
    return data


def _set_mode(made: Handle, mode: int) -> None:
    """Permission bits of a new directory, whatever the umask; the bit that hands on its group stays."""
    os.fchmod(made, mode | os.fstat(made).st_mode & stat.S_ISGID)
