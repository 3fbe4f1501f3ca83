"""ZipSystem: the members of a local or remote zip file.

The index is read once. A member is fetched as one value, which reaches from its header to the next one. Stored members
(as Zarr writes them) are sliced. Compressed members are decompressed in worker threads, in the order of bytes, and
kept open so that a reader that continues does not begin again. Source: PKWARE APPNOTE 6.3 (local file header, 4.3.7).
"""

from __future__ import annotations

import bisect
import calendar
import contextlib
import io
import struct
import weakref
import zipfile
import zlib
from collections.abc import Awaitable, Callable
from typing import IO, Any, TypeAlias, TypeVar

import trio

from zarrfs.errors import ReadError, TargetMissing
from zarrfs.net.responses import Entry, Fetched, System, too_large
from zarrfs.system.buffers import Buffer

T = TypeVar("T")
Size: TypeAlias = Callable[[], Awaitable[int]]
# (offset, length, low, high): read a range; [low, high) is the extent, a member or the index, that contains it
Read: TypeAlias = Callable[[int, int, int, int], Awaitable[Buffer]]

_LOCAL_HEADER = 30  # bytes, before the name and the extra field
_UTF_8 = 1 << 11  # flag of a member whose name is in UTF-8
_IDLE = 8  # open files of compressed members that are kept
_WINDOW = 64 << 20  # bytes: ranges of a member that are no further apart are decompressed in their order
_THREADS = 8
_BAD = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error, RuntimeError, UnicodeError)
_BUFFER = 256 << 10  # bytes that zipfile reads in one call
_END = 128 << 10  # bytes: more than the records after the index, including the comment of the archive
_MEMORY_OF_INDEX = 8  # bytes of memory for each byte of the index: zipfile has an object for each member
_LEAST = 256 << 20  # bytes that the index may always take: a process may have only a small share of memory_limit=
_MEMORY_OF_DIRECTORY = 300  # bytes of memory for a directory, without its name
_AHEAD = 8 << 20  # bytes: a compressed member up to this size is fetched into the cache as a whole


class ZipSystem(System):
    """The members of a zip file; a path is a member's name, "" the root."""

    immutable = True
    nested = True

    def __init__(self, archive: str, name: str, size: Size, read: Read, limit: int, memory: int) -> None:
        """Read whole members up to `limit` bytes. The index may take about max(`memory`, _LEAST) bytes of memory.

        `archive` is its URL in messages, `name` its identity.
        """
        self._archive, self._name, self._size, self._read = archive, name, size, read
        self._limit, self._memory = limit, max(memory, _LEAST)
        self._lock = trio.Lock()
        self._threads = trio.CapacityLimiter(_THREADS)
        self._zip: zipfile.ZipFile | None = None
        self._starts: list[int] = []  # sorted offsets of all members, of the index and of the end
        self._directories: dict[str, set[str]] = {"": set()}
        self._room = 0  # bytes that more directories may take
        self._idle: dict[tuple[str, int], IO[bytes]] = {}  # open compressed members, by name and position
        self._wanted: list[tuple[str, int]] = []  # names and starts of the ranges that are, or will be, decompressed
        self._turns: weakref.WeakValueDictionary[str, trio.Lock] = weakref.WeakValueDictionary()  # by name

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        info = await self._member(path)
        if stop is None and info.file_size - start > self._limit:
            raise too_large(self.shown(path), self._limit)
        stop = info.file_size if stop is None else min(stop, info.file_size)
        if start >= stop:
            return Fetched(b"", None, info.file_size)
        if info.flag_bits & 1:
            raise ReadError(self.shown(path), "is encrypted")
        if info.compress_type == zipfile.ZIP_STORED:
            data = await self._stored(path, info, start, stop)
        else:
            low, high = self._extent(self._header_at(path, info))
            if high - low <= _AHEAD:  # fetch the member before zipfile reads it, which holds a lock
                await self._read(low, 1, low, high)
            data = await self._decompressed(path, start, stop)
        return Fetched(data, None, info.file_size)

    async def stat(self, path: str) -> Entry:
        await self._open()
        if path in self._directories:
            return Entry(path.rpartition("/")[2], True)
        info = await self._member(path)
        return Entry(path.rpartition("/")[2], False, info.file_size, _mtime_ns(info), f"{info.CRC:08x}")

    async def listing(self, path: str) -> list[Entry] | None:
        await self._open()
        if path not in self._directories:
            await self._member(path)
            raise NotADirectoryError(path)
        return [await self.stat(self.child(path, name)) for name in self._directories[path]]

    def shown(self, path: str) -> str:
        return f"zip://{path}::{self._archive}"

    def host(self, path: str) -> str:
        # not the host of the archive, because a request for a member waits for requests to that host
        return self.shown("")

    def identity(self, path: str) -> str:
        return f"zip://{path}::{self._name}"

    async def aclose(self) -> None:
        while self._idle:
            self._idle.popitem()[1].close()

    # -- the index

    async def _open(self) -> zipfile.ZipFile:
        if self._zip is None:
            async with self._lock:
                if self._zip is None:
                    size = await self._size()
                    self._starts = [0, size]
                    found = await self._thread("", self._read_index, size)
                    self._zip = found
        return self._zip

    def _read_index(self, size: int) -> zipfile.ZipFile:
        file = _BoundedReader(_ArchiveIO(self._read_blocking, size), _BUFFER)
        file.most = max(self._memory // _MEMORY_OF_INDEX, _END)  # zipfile reads the index in one piece
        try:
            found = zipfile.ZipFile(file)
        except _TooLong as exc:
            raise self._too_large(f"{exc} bytes") from None
        file.most = None
        self._room = self._memory - _MEMORY_OF_INDEX * (size - found.start_dir)
        for info in found.infolist():
            if not (info.flag_bits & _UTF_8 or info.filename.isascii()):
                _read_as_utf8(found, info)
            name = info.filename.rstrip("/")
            if {"", ".", ".."}.isdisjoint(name.split("/")):  # other names are not valid keys
                self._add(name, info.is_dir())
        offsets = {info.header_offset for info in found.infolist() if 0 <= info.header_offset < found.start_dir}
        self._starts = sorted({0, found.start_dir, *offsets, size})
        return found

    def _too_large(self, what: str) -> ReadError:
        rule = f"its index, of {what}, would take more than {self._memory} bytes of memory (-o memory_limit=)"
        return ReadError(self._archive, rule)

    def _add(self, name: str, directory: bool) -> None:
        if directory:
            self._directory(name)
        while name:
            parent, _, last = name.rpartition("/")
            known = parent in self._directories
            self._directory(parent).add(last)
            if known:
                return
            name = parent

    def _directory(self, name: str) -> set[str]:
        """Return the names in a directory; make it if it is new. Raise ReadError if there is no memory for it."""
        found = self._directories.get(name)
        if found is None:
            self._room -= _MEMORY_OF_DIRECTORY + len(name)
            if self._room < 0:
                raise self._too_large("deep directories")
            found = self._directories[name] = set()
        return found

    async def _member(self, path: str) -> zipfile.ZipInfo:
        try:
            return (await self._open()).getinfo(path)
        except KeyError:
            raise TargetMissing(self.shown(path), "not found") from None

    # -- bytes

    def _extent(self, offset: int) -> tuple[int, int]:
        """Return the extent of the member, or other part of the archive, that contains the byte `offset`."""
        at = bisect.bisect_right(self._starts, offset)
        return self._starts[at - 1], self._starts[at]

    def _header_at(self, path: str, info: zipfile.ZipInfo) -> int:
        at = info.header_offset
        if not 0 <= at < self._starts[-1]:
            raise ReadError(self.shown(path), f"bad zip file: its header is at byte {at}, outside the file")
        return at

    def _read_blocking(self, offset: int, length: int) -> Buffer:
        """Read up to `length` bytes within one extent, for zipfile in a worker thread."""
        low, high = self._extent(offset)
        length = min(length, high - offset)
        return trio.from_thread.run(self._read, offset, length, low, high)

    async def _stored(self, path: str, info: zipfile.ZipInfo, start: int, stop: int) -> Buffer:
        at = self._header_at(path, info)
        low, high = self._extent(at)
        expected = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF_8 else "cp437")
        header = bytes(await self._read(at, min(_LOCAL_HEADER + len(expected), high - at), low, high))
        if header[:4] != b"PK\x03\x04" or header[_LOCAL_HEADER:] != expected:
            raise ReadError(self.shown(path), "bad zip file: no header of the member where the index says")
        name, extra = struct.unpack_from("<HH", header, 26)
        begin = at + _LOCAL_HEADER + name + extra
        if begin + info.file_size > high:
            raise ReadError(self.shown(path), "bad zip file: the member is longer than its place")
        data = await self._read(begin + start, stop - start, low, high)
        if stop - start == info.file_size and zlib.crc32(data) != info.CRC:
            raise ReadError(self.shown(path), "bad zip file: wrong checksum")
        return data

    async def _decompressed(self, path: str, start: int, stop: int) -> bytes:
        """Decompress a range, after those shortly before it: the read-ahead of a reader requests several at a time."""
        archive, turn = await self._open(), self._turns.setdefault(path, trio.Lock())
        self._wanted.append((path, start))
        try:
            while True:
                async with turn:  # in the order of the requests; one that is too early goes to the end of the queue
                    if not any(one == path and 0 < start - other <= _WINDOW for one, other in self._wanted):
                        return await self._go_on(archive, path, start, stop)
        finally:
            self._wanted.remove((path, start))

    async def _go_on(self, archive: zipfile.ZipFile, path: str, start: int, stop: int) -> bytes:
        """Read a range from the open file that is nearest before it, or from a new one."""
        nearest = max((at for one, at in self._idle if one == path and at <= start), default=-1)
        present = self._idle.pop((path, nearest), None)

        def read() -> tuple[IO[bytes], bytes]:
            file = present or archive.open(path)
            try:
                file.seek(start)
                return file, file.read(stop - start)
            except BaseException:
                file.close()
                raise

        self._idle[path, stop], data = await self._thread(path, read)
        while len(self._idle) > _IDLE:
            self._idle.pop(next(iter(self._idle))).close()
        return data

    async def _thread(self, path: str, function: Callable[..., T], *args: Any) -> T:
        try:
            return await trio.to_thread.run_sync(function, *args, limiter=self._threads)
        except _BAD as exc:
            where = self.shown(path) if path else self._archive
            raise ReadError(where, f"bad zip file: {exc}") from exc


def _read_as_utf8(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Decode the name of a member as UTF-8 if that is possible, because Info-ZIP writes UTF-8 without the flag."""
    with contextlib.suppress(UnicodeError):
        name = info.filename.encode("cp437").decode()
        archive.NameToInfo.pop(info.filename, None)
        info.filename = name
        archive.NameToInfo[name] = info


def _mtime_ns(info: zipfile.ZipInfo) -> int | None:
    """Return the time of a member, read as UTC because zip has no time zone; None if it is invalid, such as zeros."""
    try:
        return calendar.timegm(info.date_time) * 1_000_000_000
    except ValueError:
        return None


class _TooLong(Exception):
    """A read of more bytes than a _BoundedReader allows; str() is their number."""


class _BoundedReader(io.BufferedReader):
    """A file that refuses to read more than `most` bytes in one call."""

    most: int | None = None

    def read(self, size: int | None = -1) -> bytes:
        """Read as io.BufferedReader does. Raise _TooLong before anything is read or allocated."""
        if self.most is not None and size is not None and size > self.most:
            raise _TooLong(size)
        return super().read(size)


class _ArchiveIO(io.RawIOBase):
    """The file object that zipfile reads from, in a worker thread."""

    def __init__(self, read: Callable[[int, int], Buffer], size: int) -> None:
        super().__init__()
        self._read, self._size, self._at = read, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, self._size)[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        data = self._read(self._at, length)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
