"""ZipSystem: the members of a local or remote zip file.

The index is read once. A member is fetched as one value, which reaches from its header to the next one. Stored members
(as Zarr writes them) are sliced. Deflated members are decompressed in worker threads, in the order of bytes, by
decompressors that are kept, so that a reader that continues does not begin again. Source: PKWARE APPNOTE 6.3 (local
file header, 4.3.7).
"""

from __future__ import annotations

import bisect
import calendar
import contextlib
import struct
import weakref
import zipfile
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import IO, Any, TypeAlias, TypeVar, cast

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
_IDLE = 8  # decompressors that are kept
_WINDOW = 64 << 20  # bytes: ranges of a member that are no further apart are decompressed in their order
_THREADS = 8
_BAD = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error, RuntimeError, UnicodeError)
_STEP = 256 << 10  # bytes that are read or decompressed in one call
_END = 128 << 10  # bytes: more than the records after the index, including the comment of the archive
_MEMORY_OF_INDEX = 8  # bytes of memory for each byte of the index: zipfile has an object for each member
_LEAST = 256 << 20  # bytes that the index may always take: a process may have only a small share of memory_limit=


class _Inflater:
    """The decompressor of one reader of a member, at the byte `at` of its content."""

    def __init__(self, path: str) -> None:
        self.path, self.at, self.crc = path, 0, 0
        self.used, self.rest = 0, b""  # compressed bytes that were read; those that are not decompressed yet
        self.stream = zlib.decompressobj(-zlib.MAX_WBITS)


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
        self._members: dict[str, zipfile.ZipInfo] | None = None  # by name; that of a directory ends with "/"
        self._names: list[str] = []  # sorted
        self._starts: list[int] = []  # sorted offsets of all members, of the index and of the end
        self._idle: list[_Inflater] = []  # the last one that was used at the end
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
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            rule = f"is compressed with zip's method {info.compress_type}: only stored and deflated members are read"
            raise ReadError(self.shown(path), rule)
        begin = await self._begin(path, info)
        if info.compress_type == zipfile.ZIP_DEFLATED:
            data: Buffer = await self._inflated(path, info, begin, start, stop)
        else:
            data = await self._read_part(begin + start, stop - start)
            if stop - start == info.file_size and zlib.crc32(data) != info.CRC:
                raise self._bad(path, "wrong checksum")
        return Fetched(data, None, info.file_size)

    async def stat(self, path: str) -> Entry:
        await self._open()
        name = path.rpartition("/")[2]
        if self._is_directory(path):
            return Entry(name, True)
        info = await self._member(path)
        return Entry(name, False, info.file_size, _mtime_ns(info), f"{info.CRC:08x}")

    async def listing(self, path: str) -> list[Entry] | None:
        await self._open()
        if not self._is_directory(path):
            await self._member(path)
            raise NotADirectoryError(path)
        return [await self.stat(self.child(path, name)) for name in set(self._children(path))]

    def shown(self, path: str) -> str:
        return f"zip://{path}::{self._archive}"

    def host(self, path: str) -> str:
        # not the host of the archive, because a request for a member waits for requests to that host
        return self.shown("")

    def identity(self, path: str) -> str:
        return f"zip://{path}::{self._name}"

    # -- the index

    async def _open(self) -> dict[str, zipfile.ZipInfo]:
        if self._members is None:
            async with self._lock:
                if self._members is None:
                    try:
                        size = await self._size()
                        self._starts = [0, size]
                        self._members = await self._thread("", self._read_index, size)
                    except ReadError as exc:
                        exc.status = None  # of the archive: missing_status= would take its members for absent
                        if isinstance(exc, TargetMissing):
                            raise ReadError(exc.where, exc.reason) from exc
                        raise
        return self._members

    def _read_index(self, size: int) -> dict[str, zipfile.ZipInfo]:
        most = max(self._memory // _MEMORY_OF_INDEX, _END)

        def read(offset: int, length: int) -> bytes:
            if length > most:  # zipfile reads the index in one piece
                rule = f"would take more than {self._memory} bytes of memory (-o memory_limit=)"
                raise ReadError(self._archive, f"its index, of {length} bytes, {rule}")
            return bytes(trio.from_thread.run(self._read, offset, length, 0, size))

        archive = zipfile.ZipFile(cast(IO[bytes], _ArchiveFile(read, size)))
        members = {}
        for info in archive.infolist():
            name = _name(info)
            if {"", ".", ".."}.isdisjoint(name.rstrip("/").split("/")):  # other names are not valid keys
                members[name] = info
        offsets = {info.header_offset for info in archive.infolist() if 0 <= info.header_offset < archive.start_dir}
        self._starts = sorted({0, archive.start_dir, *offsets, size})
        self._names = sorted(members)
        return members

    def _is_directory(self, path: str) -> bool:
        at = bisect.bisect_left(self._names, f"{path}/")
        return not path or (at < len(self._names) and self._names[at].startswith(f"{path}/"))

    def _children(self, path: str) -> Iterator[str]:
        """Yield the names in a directory; one may come twice, as a file and as a directory."""
        prefix = f"{path}/" if path else ""
        at = bisect.bisect_left(self._names, prefix)
        while at < len(self._names) and self._names[at].startswith(prefix):
            name, slash, _ = self._names[at][len(prefix) :].partition("/")
            if name:
                yield name
            # "0" follows "/" in the order of characters
            at = bisect.bisect_left(self._names, f"{prefix}{name}0", at) if name and slash else at + 1

    async def _member(self, path: str) -> zipfile.ZipInfo:
        try:
            return (await self._open())[path]
        except KeyError:
            raise TargetMissing(self.shown(path), "not found") from None

    # -- bytes

    async def _begin(self, path: str, info: zipfile.ZipInfo) -> int:
        """Return the offset of the compressed bytes of a member, all of which lie before the next one."""
        at = info.header_offset
        if not 0 <= at < self._starts[-1]:
            raise self._bad(path, f"its header is at byte {at}, outside the file")
        expected = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF_8 else "cp437")
        high = self._extent(at)[1]
        header = bytes(await self._read_part(at, min(_LOCAL_HEADER + len(expected), high - at)))
        name = struct.pack("<H", len(expected))
        if header[:4] != b"PK\x03\x04" or header[26:28] != name or header[_LOCAL_HEADER:] != expected:
            raise self._bad(path, "no header of the member where the index says")
        begin = at + len(header) + int.from_bytes(header[28:_LOCAL_HEADER], "little")  # after the extra field
        size = info.file_size if info.compress_type == zipfile.ZIP_STORED else info.compress_size
        if begin + size > high:
            raise self._bad(path, "the member is longer than its place")
        return begin

    def _extent(self, offset: int) -> tuple[int, int]:
        """Return the extent of the member, or other part of the archive, that contains the byte `offset`."""
        at = bisect.bisect_right(self._starts, offset)
        return self._starts[at - 1], self._starts[at]

    async def _read_part(self, offset: int, length: int) -> Buffer:
        return await self._read(offset, length, *self._extent(offset))

    async def _inflated(self, path: str, info: zipfile.ZipInfo, begin: int, start: int, stop: int) -> bytes:
        """Decompress a range, after those shortly before it: the read-ahead of a reader requests several at a time."""
        turn = self._turns.setdefault(path, trio.Lock())
        self._wanted.append((path, start))
        try:
            while True:
                async with turn:  # in the order of the requests; one that is too early goes to the end of the queue
                    if any(one == path and 0 < start - other <= _WINDOW for one, other in self._wanted):
                        continue
                    before = [one for one in self._idle if one.path == path and one.at <= start]
                    nearest = max(before, key=lambda one: one.at, default=None)
                    if nearest is not None:
                        self._idle.remove(nearest)
                    inflater = nearest or _Inflater(path)
                    data = await self._thread(path, self._inflate, inflater, info, begin, start, stop)
                    self._idle = [*self._idle, inflater][-_IDLE:]
                    return data
        finally:
            self._wanted.remove((path, start))

    def _inflate(self, one: _Inflater, info: zipfile.ZipInfo, begin: int, start: int, stop: int) -> bytes:
        found = bytearray()
        while one.at < stop:
            if not one.rest and one.used < info.compress_size:
                length = min(_STEP, info.compress_size - one.used)
                one.rest = bytes(trio.from_thread.run(self._read_part, begin + one.used, length))
                one.used += length
            data = one.stream.decompress(one.rest, min(_STEP, stop - one.at))
            one.rest = one.stream.unconsumed_tail
            if not data and not one.rest and one.used == info.compress_size:
                raise EOFError("a member ends too early")
            one.crc = zlib.crc32(data, one.crc)
            found += data[max(start - one.at, 0) :]
            one.at += len(data)
        if one.at == info.file_size and one.crc != info.CRC:
            raise zipfile.BadZipFile("wrong checksum")
        return bytes(found)

    async def _thread(self, path: str, function: Callable[..., T], *args: Any) -> T:
        try:
            return await trio.to_thread.run_sync(function, *args, limiter=self._threads)
        except _BAD as exc:
            raise self._bad(path, str(exc)) from exc

    def _bad(self, path: str, rule: str) -> ReadError:
        return ReadError(self.shown(path) if path else self._archive, f"bad zip file: {rule}")


def _name(info: zipfile.ZipInfo) -> str:
    """Return the name of a member, as UTF-8 if that is possible, because Info-ZIP writes UTF-8 without the flag."""
    name = info.filename
    if not (info.flag_bits & _UTF_8 or name.isascii()):
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    return f"{name.rstrip('/')}/" if name.endswith("/") else name


def _mtime_ns(info: zipfile.ZipInfo) -> int | None:
    """Return the time of a member, read as UTC because zip has no time zone; None if it is invalid, such as zeros."""
    try:
        return calendar.timegm(info.date_time) * 1_000_000_000
    except ValueError:
        return None


class _ArchiveFile:
    """The file object from which zipfile reads the index."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._at = read, size, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        data = self._read(self._at, size if 0 <= size <= left else left) if left and size else b""
        self._at += len(data)
        return data
