"""Dump tars: what flux dump writes of an instance, as the archives in it and as a place of their blobs.

A preserved archive NAME is the member archive/NAME, a document, and archive/NAME_blobs/N, the bytes of the Nth region
of its files. What blob a member is tells only its hash: the document says where to look first, and if that was not
it, all members of the same length are gone through, once. Members are found by their headers; no data is read. In a
tar that `zarrfs archive create` has written, the document comes last and tells where each blob lies, so that no header
of one is read.

What goes through a tar is a generator of (offset, length) to be read, which is sent the bytes: run() and run_remote().
Sources: POSIX.1 ("pax Interchange Format"); flux-core, flux-dump(1) and flux-archive(1).
"""

from __future__ import annotations

import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from zlib import adler32

from zarrfs.errors import SourceError
from zarrfs.net.answers import too_large

if TYPE_CHECKING:
    from zarrfs.store.remotefiles import RemoteFiles

T = TypeVar("T")
Steps = Generator[tuple[int, int], bytes, T]

BLOCK = 512  # bytes: what everything in a tar is a multiple of
_EXTRA = 1 << 20  # bytes of an extended header
_TAIL, _MOST, _PIECE = 64 << 10, 16 << 20, 4 << 20  # bytes that are read at once: from the end; of a document
# the blobref of a region, and its length before that; in text, quotation marks have a backslash
_BLOBREF = re.compile(rb'"(sha1-[0-9a-fA-F]{40}|sha256-[0-9a-fA-F]{64})"\s*\]')
_DIGITS, _MOST_DIGITS = b"0123456789", 19
_BEFORE, _LONGEST = 120, 200  # bytes that a length has, and a length with its blobref, with spaces as some write them
_BLOB = re.compile(r"archive/(.+)_blobs/(\d{1,19})", re.ASCII)
_DOCUMENT = re.compile(r"archive/(.+)")
_REGULAR = (b"0", b"\0")  # types of members
_EXTENDED = (b"x", b"X")
_LONG_NAME = b"L"  # of GNU
_RECORD = re.compile(rb"(\d{1,20}) ([^=]+)=")  # of an extended header
_SIZE = re.compile(r"[0-9]{1,19}")  # in one
# what a header has: name, length, checksum; type, target and version of a regular file; no prefix of the name
_HEADER = struct.Struct("100s 24x 12s 12x 8s 109s 80x 167s")
_PLAIN, _NO_PREFIX = b"0" + bytes(100) + b"ustar\x0000", bytes(167)
_OWN = 8 * ord(" ")  # what a checksum counts itself as
_OTHER_HEADERS = (b"g", b"K")  # for all members; GNU's long target of a link


class Member(NamedTuple):
    """Where the bytes of a member are."""

    offset: int
    size: int


class DumpIndex:
    """The members of a dump tar that are archives or blobs; `fault`: why there may be more, "" if there are not."""

    def __init__(self) -> None:
        self.documents: dict[str, Member] = {}  # by name, "a/b" for archive.a.b of the KVS
        self.blobs: dict[tuple[str, int], Member] = {}  # by name of the archive, and number
        self.fault = ""
        self.complete = False  # whether all headers were read; else there are hints alone
        self.absent: set[tuple[str, int | None]] = set()  # blobs, and their lengths, that are not here
        self._hints: dict[str, Member] = {}
        self._sizes: dict[int, list[Member]] = defaultdict(list)
        self._at: dict[int, int] = defaultdict(int)  # by size: where the search goes on

    def add(self, name: str, member: Member) -> None:
        """Note a regular member."""
        name = name.removeprefix("./")
        if match := _BLOB.fullmatch(name):
            self.blobs[match[1], int(match[2])] = member
            self._sizes[member.size].append(member)
        elif match := _DOCUMENT.fullmatch(name):
            self.documents[match[1]] = member

    def hint(self, name: str, number: int, blobref: str, length: int) -> None:
        """Note what blob the archive `name` says that its member of this number is."""
        member = self.blobs.get((name, number))
        if member is not None and member.size == length:
            self._hints[blobref] = member

    def take(self, name: str, document: Member, hints: dict[str, Member]) -> None:
        """Note an archive, and where its blobs are."""
        self.documents[name] = document
        self._hints |= hints

    def found(self, blobref: str, member: Member) -> None:
        """Note what blob a member is."""
        self._hints[blobref] = member

    def known(self, blobref: str) -> Member | None:
        """The member that is, or should be, that blob."""
        return self._hints.get(blobref)

    def candidates(self, length: int) -> Iterator[Member]:
        """The members of that length, from behind the one taken last on."""
        members = self._sizes.get(length, [])
        start = self._at[length]
        for number in range(len(members)):
            at = (start + number) % len(members)
            self._at[length] = at + 1
            yield members[at]

    def lengths(self) -> list[int]:
        """All lengths that members have."""
        return list(self._sizes)


def run(steps: Steps[T], read: Callable[[int, int], bytes]) -> T:
    """What a generator gives at last; `read(offset, length)` reads, and may raise. It may give less at the end."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(read(*wanted))
    except StopIteration as stop:
        found: T = stop.value
        return found


def run_local(steps: Steps[T], fd: int) -> T:
    """As run(), with an open tar; blocks. OSError."""
    return run(steps, lambda offset, length: _pread(fd, offset, length))


async def run_remote(steps: Steps[T], files: RemoteFiles, url: str, size: int) -> T:
    """As run(), with a tar of `size` bytes behind a URL. ReadError."""
    try:
        offset, length = next(steps)
        while True:
            # headers come one behind the other; what else is wanted ends where it ends
            low, high = (0, size) if length == BLOCK else (offset, offset + length)
            offset, length = steps.send(bytes(await files.read(url, offset, length, low, high)))
    except StopIteration as stop:
        found: T = stop.value
        return found


def _pread(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more  # one call gives up to 2 GiB
    return data


def document(size: int, wanted: str, source: str, limit: int) -> Steps[bytes]:
    """The archive `wanted` ("": the only one) of a tar. SourceError as chosen(), and for more than `limit` bytes."""
    last, index = (yield from _last_document(size)), DumpIndex()
    if last is not None and last[1].size <= limit:
        start = last[1].offset
        data = yield start, last[1].size
        # else there may be others of any name
        if run(_laid_out(last, index), lambda offset, length: data[offset - start : offset - start + length]):
            chosen(index, wanted, source)
            return data
    elif last is not None and wanted.replace(".", "/") in ("", last[0]):
        raise SourceError(source, too_large(source, limit).reason)
    yield from scan(size, index)
    where = index.documents[chosen(index, wanted, source)]
    if where.size > limit:
        raise SourceError(source, too_large(source, limit).reason)
    return (yield where.offset, where.size)


def lay_out(size: int, index: DumpIndex) -> Steps[bool]:
    """Fill `index` from the document at the end of a tar; False unless it is as `zarrfs archive create` wrote."""
    last = yield from _last_document(size)
    return last is not None and (yield from _laid_out(last, index))


def _laid_out(last: tuple[str, Member], index: DumpIndex) -> Steps[bool]:
    """Fill `index`, if the regions of the `last` document, each behind a header, are all that comes before it."""
    name, where = last
    regions, hints, at = _Regions(), dict[str, Member](), 0
    for start in range(where.offset, where.offset + where.size, _PIECE):
        for blobref, length in regions.of((yield start, min(_PIECE, where.offset + where.size - start))):
            hints[blobref] = Member(at + BLOCK, length)
            at += BLOCK + _padded(length)
    if at + BLOCK != where.offset:
        return False
    index.take(name, where, hints)
    return True


def _last_document(size: int) -> Steps[tuple[str, Member] | None]:
    """The name of the archive whose document ends a tar, and where that is; None where something else does.

    Text has no zero bytes, so it begins behind the last one, which is of its header. Other tars, whose last member may
    be a text of any length, begin with something else, or end so.
    """
    # two blocks, which all tars have: of headers alone more is fetched than is asked for (run_remote)
    first = _plain((yield 0, 2 * BLOCK)[:BLOCK]) if size >= 2 * BLOCK else None
    blob = first and _BLOB.fullmatch(first[0])
    if first is None or (int(blob[2]) if blob else not _DOCUMENT.fullmatch(first[0])):
        return None
    end, at, step = -1, size, _TAIL
    while at > 0:
        low = max(0, at - step)
        block = yield low, at - low
        if end < 0:
            block = block.rstrip(b"\0")
            end = low + len(block)
            if not block.rstrip().endswith((b"]", b"}")) or size - _padded(end) < 2 * BLOCK:
                return None
        zero = block.rfind(b"\0")
        if zero >= 0:
            start = low + zero + 1
            header = (yield start - BLOCK, BLOCK) if start % BLOCK == 0 else b""
            name, length = (_plain(header) if len(header) == BLOCK else None) or ("", 0)
            match = _DOCUMENT.fullmatch(name)
            if match is None or _BLOB.fullmatch(name) or length != end - start:
                return None
            return match[1], Member(start, length)
        at, step = low, min(size - low, _MOST)  # twice as much in all, each time
    return None


def go_through(size: int, index: DumpIndex) -> Steps[None]:
    """Fill `index` by the headers of a tar, as scan(), and by what the documents in it say."""
    yield from scan(size, index)
    for name, where in index.documents.items():
        regions, number = _Regions(), 0
        for start in range(where.offset, where.offset + where.size, _PIECE):
            piece = yield start, min(_PIECE, where.offset + where.size - start)
            for blobref, length in regions.of(piece):
                index.hint(name, number, blobref, length)
                number += 1
    index.complete = True


def scan(size: int, found: DumpIndex) -> Steps[None]:
    """Fill `found` with the members of a tar of `size` bytes.

    A tar that is damaged or ends early leaves its `fault`, and what comes before that.
    """
    import tarfile

    at = 0
    extended: dict[str, str] = {}
    while at + BLOCK <= size:
        block = yield at, BLOCK
        if len(block) < BLOCK:
            break
        plain = _plain(block)
        if plain is not None and not extended:
            name, length = plain
            at += BLOCK
            if at + length > size:
                break
            found.add(name, Member(at, length))
            at += _padded(length)
            continue
        if not block.strip(b"\0"):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            found.fault = f"damaged at byte {at:,}: {exc}"
            return
        length, name = header.size, header.name
        if length < 0:  # it would lead back, again and again
            found.fault = f"damaged at byte {at:,}: a member of {length} bytes"
            return
        at += BLOCK
        if header.type in (*_EXTENDED, _LONG_NAME, *_OTHER_HEADERS):
            if length > min(_EXTRA, size - at):
                break
            data = yield at, length
            if header.type in _EXTENDED:
                extended |= _pax(data)
            elif header.type == _LONG_NAME:
                extended["path"] = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        else:
            name = extended.get("path", name)
            if _SIZE.fullmatch(extended.get("size", "")):
                length = int(extended["size"])
            extended = {}
            if at + length > size:
                break
            if header.type in _REGULAR:
                found.add(name, Member(at, length))
        at += _padded(length)
    found.fault = f"cut short after {size:,} bytes"


def _plain(block: bytes) -> tuple[str, int] | None:
    """(name, length) that the header of a regular file tells, if it is as most are: in a tenth of tarfile's time."""
    name, length, checksum, plain, prefix = _HEADER.unpack(block)
    if plain != _PLAIN or prefix != _NO_PREFIX:
        return None
    name, length, own = name.partition(b"\0")[0], length.rstrip(b" \0"), checksum.rstrip(b" \0")
    if not (name.isascii() and length.isdigit() and own.isdigit()):
        return None
    try:
        # the lower half is one more than the sum of the bytes, which is below 65,521 with a name in ASCII
        right = int(own, 8) == (adler32(block) & 0xFFFF) - (adler32(checksum) & 0xFFFF) + _OWN
        return (name.decode(), int(length, 8)) if right else None
    except ValueError:
        return None


def chosen(index: DumpIndex, wanted: str, source: str) -> str:
    """The name of the archive `wanted` ("": the only one). SourceError where it is not there, or there are several."""
    names = sorted(index.documents)
    shown = ", ".join(name.replace("/", ".") for name in names[:10]) + (", ..." if len(names) > 10 else "")
    if not wanted and len(names) == 1:
        return names[0]
    wanted = wanted.replace(".", "/")
    if wanted in index.documents:
        return wanted
    if index.fault:
        raise SourceError(source, f"the tar is {index.fault}")
    if not names:
        raise SourceError(source, "a tar without archive/NAME: not one that flux dump has written of an archive")
    rule = f"no archive {wanted.replace('/', '.')!r}" if wanted else "more than one archive"
    raise SourceError(source, f"{rule}; say FILE.tar#NAME, of {shown}")


def split_member(source: str) -> tuple[str, str]:
    """("dump.tar", "NAME") of "dump.tar#NAME"; (source, "") of anything else."""
    path, mark, name = source.rpartition("#")
    return (path, name) if mark and name and path.lower().endswith(".tar") else (source, "")


def _pax(data: bytes) -> dict[str, str]:
    """The records "LENGTH KEY=VALUE\\n" of an extended header."""
    found, at = {}, 0
    while match := _RECORD.match(data, at):
        at += int(match[1])
        if not match.end() < at <= len(data):
            break
        found[match[2].decode("utf-8", "replace")] = data[match.end() : at - 1].decode("utf-8", "surrogateescape")
    return found


class _Regions:
    """The regions of an archive, in its order, found without parsing it.

    What else looks like one only leads to a wrong place, which the hash tells.
    """

    def __init__(self) -> None:
        self._rest = b""

    def of(self, piece: bytes) -> Iterator[tuple[str, int]]:
        """(blobref, length) of all regions that end in the next piece of the document."""
        text, end = self._rest + piece, 0
        for match in _BLOBREF.finditer(text):
            start, end = match.span()
            before = text[max(start - _BEFORE, 0) : start].rstrip()
            if before[-1:] == b",":
                before = before[:-1].rstrip()
                digits = before[len(before.rstrip(_DIGITS)) :]
                if 0 < len(digits) <= _MOST_DIGITS:
                    yield match[1].decode().lower(), int(digits)
        self._rest = text[max(end, len(text) - _LONGEST) :]


def _padded(length: int) -> int:
    """With what is missing to a multiple of BLOCK."""
    return length + -length % BLOCK
