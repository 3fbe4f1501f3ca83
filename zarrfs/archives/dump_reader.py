"""Reader of dump tars, which flux dump writes: finds the archives in a tar, and the locations of their blobs.

A preserved archive NAME consists of the member archive/NAME, which is its document, and the members
archive/NAME_blobs/N, which are the bytes of the Nth region of its files. A blob is identified by its hash alone: the
document only suggests which member to try first, and if that member is another blob, all members of the same length
are hashed, once. Members are found by their headers, without reading their data. In a tar that `zarrfs archive create`
wrote, the document is the last member, and the location of each blob follows from it, so that the headers of blobs are
not read.

Functions that read a tar are generators: they yield the (offset, length) of bytes to read, and are sent the bytes.
run() and run_remote() drive them.
Sources: POSIX.1 ("pax Interchange Format"); flux-core, flux-dump(1) and flux-archive(1).
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from zlib import adler32

from zarrfs.archives.dump_writer import BLOCK, padded
from zarrfs.errors import SourceError
from zarrfs.net.responses import too_large
from zarrfs.system.buffers import read_all

if TYPE_CHECKING:
    from zarrfs.store.remotefiles import RemoteFiles

T = TypeVar("T")
Steps = Generator[tuple[int, int], bytes, T]

_EXTENDED_MAX = 1 << 20  # bytes of an extended header
# bytes per read: the first read from the end, and the largest one; a read of a document
_TAIL, _TAIL_MAX, _PIECE = 64 << 10, 16 << 20, 4 << 20
# the blobref that ends a region; it cannot match inside a JSON string, where quotation marks have a backslash
_BLOBREF = re.compile(rb'"(sha1-[0-9a-fA-F]{40}|sha256-[0-9a-fA-F]{64})"\s*\]')
_DIGITS, _MOST_DIGITS = b"0123456789", 19
_BEFORE, _LONGEST = 120, 200  # most bytes of a length, and of a length and its blobref, including white space
_BLOB = re.compile(r"archive/(.+)_blobs/(\d{1,19})", re.ASCII)
_DOCUMENT = re.compile(r"archive/(.+)")
_REGULAR = (b"0", b"\0")  # types of members
_EXTENDED = (b"x", b"X")
_LONG_NAME = b"L"  # a GNU extension
_RECORD = re.compile(rb"(\d{1,20}) ([^=]+)=")  # the beginning of a record of an extended header
_SIZE = re.compile(r"[0-9]{1,19}")  # the value of the record `size`
# fields of a header: name; length; checksum; type, link target, magic and version; prefix of the name
_HEADER = struct.Struct("100s 24x 12s 12x 8s 109s 80x 167s")
_PLAIN, _NO_PREFIX = b"0" + bytes(100) + b"ustar\x0000", bytes(167)
_OWN = 8 * ord(" ")  # the checksum counts its own field as spaces
_OTHER_HEADERS = (b"g", b"K")  # pax records for all members; GNU's long link target


class Member(NamedTuple):
    """The location of a member's data in a tar, in bytes."""

    offset: int
    size: int


class DumpIndex:
    """An index of the archives and blobs in a dump tar. `fault` says why some may be missing; "" if none is."""

    def __init__(self) -> None:
        self.documents: dict[str, Member] = {}  # by archive name: "a/b" for the KVS key archive.a.b
        self.blobs: dict[tuple[str, int], Member] = {}  # by archive name and number
        self.fault = ""
        self.complete = False  # True after all headers were read; before that, only the document's blobs are known
        self.absent: set[tuple[str, int | None]] = set()  # (blobref, length) of blobs that a search did not find
        self.hashed: set[tuple[str, int]] = set()  # (algorithm, length): all members of this length were hashed
        self._hints: dict[str, Member] = {}  # by blobref
        self._sizes: dict[int, list[Member]] = defaultdict(list)  # by length in bytes
        self._at: dict[int, int] = defaultdict(int)  # by length: index of the member at which the next search begins

    def add(self, name: str, member: Member) -> None:
        """Add a member that is a regular file; ignore names that are no part of an archive."""
        name = name.removeprefix("./")
        if match := _BLOB.fullmatch(name):
            self.blobs[match[1], int(match[2])] = member
            self._sizes[member.size].append(member)
        elif match := _DOCUMENT.fullmatch(name):
            self.documents[match[1]] = member

    def hint(self, name: str, number: int, blobref: str, length: int) -> None:
        """Note the blob that a document declares member `number` of archive `name` to be, if the length is right."""
        member = self.blobs.get((name, number))
        if member is not None and member.size == length:
            self._hints[blobref] = member

    def take(self, name: str, document: Member, hints: dict[str, Member]) -> None:
        """Add an archive with the locations of its blobs."""
        self.documents[name] = document
        self._hints |= hints

    def found(self, blobref: str, member: Member) -> None:
        """Record the blobref of a member that was hashed."""
        self._hints[blobref] = member

    def known(self, blobref: str) -> Member | None:
        """Return the member that is, or is declared to be, the blob; None if there is none yet."""
        return self._hints.get(blobref)

    def candidates(self, length: int) -> Iterator[Member]:
        """Yield the blob members of this length, beginning after the one that was yielded last."""
        members = self._sizes.get(length, [])
        start = self._at[length]
        for number in range(len(members)):
            at = (start + number) % len(members)
            self._at[length] = at + 1
            yield members[at]

    def lengths(self) -> list[int]:
        """Return the lengths of all blob members, without duplicates."""
        return list(self._sizes)


def run(steps: Steps[T], read: Callable[[int, int], bytes]) -> T:
    """Drive a generator with `read(offset, length)`, which may return fewer bytes at the end of the tar."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(read(*wanted))
    except StopIteration as stop:
        found: T = stop.value
        return found


def run_local(steps: Steps[T], fd: int) -> T:
    """Drive a generator with reads of the descriptor of a tar. Blocks. Raise OSError."""
    return run(steps, lambda offset, length: read_all(fd, length, offset))


async def run_remote(steps: Steps[T], files: RemoteFiles, url: str, size: int) -> T:
    """Drive a generator with reads of a tar of `size` bytes behind a URL. Raise ReadError."""
    try:
        offset, length = next(steps)
        while True:
            # for a header, allow read-ahead, because more headers follow; of other parts fetch only these bytes
            low, high = (0, size) if length == BLOCK else (offset, offset + length)
            offset, length = steps.send(bytes(await files.read(url, offset, length, low, high)))
    except StopIteration as stop:
        found: T = stop.value
        return found


def document(size: int, wanted: str, source: str, limit: int) -> Steps[bytes]:
    """Read the document of the archive `wanted`.

    Raise the SourceErrors of choose_archive(), and SourceError if the document has more than `limit` bytes.
    """
    last, index = (yield from _last_document(size)), DumpIndex()
    if last is not None and last[1].size <= limit:
        start = last[1].offset
        data = yield start, last[1].size
        # if the layout is not that of `zarrfs archive create`, the tar may hold more archives
        if run(_laid_out(last, index), lambda offset, length: data[offset - start : offset - start + length]):
            choose_archive(index, wanted, source)
            return data
    elif last is not None and wanted.replace(".", "/") in ("", last[0]):
        raise SourceError(source, too_large(source, limit).reason)
    yield from scan(size, index)
    where = index.documents[choose_archive(index, wanted, source)]
    if where.size > limit:
        raise SourceError(source, too_large(source, limit).reason)
    return (yield where.offset, where.size)


def lay_out(size: int, index: DumpIndex) -> Steps[bool]:
    """Fill `index` from the document at the end of a tar; return False if `zarrfs archive create` did not write it."""
    last = yield from _last_document(size)
    return last is not None and (yield from _laid_out(last, index))


def _laid_out(last: tuple[str, Member], index: DumpIndex) -> Steps[bool]:
    """Fill `index` if the regions of the last document, each with a header, make up all bytes before it.

    Return whether they do.
    """
    name, where = last
    regions, hints, at = _Regions(), dict[str, Member](), 0
    for start in range(where.offset, where.offset + where.size, _PIECE):
        for blobref, length in regions.of((yield start, min(_PIECE, where.offset + where.size - start))):
            hints[blobref] = Member(at + BLOCK, length)
            at += BLOCK + padded(length)
    if at + BLOCK != where.offset:
        return False
    index.take(name, where, hints)
    return True


def _last_document(size: int) -> Steps[tuple[str, Member] | None]:
    """Return the name and location of the document at the end of a tar; None if the last member is no document.

    A document has no zero bytes, so it begins after the last zero byte before its end, which is in its header. The
    first member must be a document or blob 0. This check rejects other tars early, because their last member may be a
    text of any length.
    """
    # read two blocks, which every tar has, because run_remote() would read ahead for a single one
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
            if not block.rstrip().endswith((b"]", b"}")) or size - padded(end) < 2 * BLOCK:
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
        at, step = low, min(size - low, _TAIL_MAX)  # each step doubles the bytes read, up to _TAIL_MAX per step
    return None


def go_through(size: int, index: DumpIndex) -> Steps[None]:
    """Fill `index` from all headers and all documents of a tar."""
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

    If the tar is damaged or cut short, set `found.fault`, and add the members before the damage.
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
            at += padded(length)
            continue
        if not block.strip(b"\0"):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            found.fault = f"damaged at byte {at:,}: {exc}"
            return
        length, name = header.size, header.name
        if length < 0:  # going back by it would loop
            found.fault = f"damaged at byte {at:,}: a member of {length} bytes"
            return
        at += BLOCK
        if header.type in (*_EXTENDED, _LONG_NAME, *_OTHER_HEADERS):
            if length > min(_EXTENDED_MAX, size - at):
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
        at += padded(length)
    found.fault = f"cut short after {size:,} bytes"


def _plain(block: bytes) -> tuple[str, int] | None:
    """Return (name, length) from the usual header of a regular file; None for others. tarfile is ten times slower."""
    name, length, checksum, plain, prefix = _HEADER.unpack(block)
    if plain != _PLAIN or prefix != _NO_PREFIX:
        return None
    name, length, own = name.partition(b"\0")[0], length.rstrip(b" \0"), checksum.rstrip(b" \0")
    if not (name.isascii() and length.isdigit() and own.isdigit()):
        return None
    try:
        # the lower half of Adler-32 is the sum of the bytes plus 1: a name in ASCII keeps it below 65,521, the modulus
        right = int(own, 8) == (adler32(block) & 0xFFFF) - (adler32(checksum) & 0xFFFF) + _OWN
        return (name.decode(), int(length, 8)) if right else None
    except ValueError:
        return None


def choose_archive(index: DumpIndex, wanted: str, source: str) -> str:
    """Return the name of the archive `wanted`, or of the only archive in the tar if `wanted` is "".

    Raise SourceError if there is no such archive, or if `wanted` is "" and there are several.
    """
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
        raise SourceError(source, "has no member archive/NAME: not a tar that flux dump wrote of an archive")
    rule = f"no archive {wanted.replace('/', '.')!r}" if wanted else "more than one archive"
    raise SourceError(source, f"{rule}; name one with FILE.tar#NAME: {shown}")


def split_member(source: str) -> tuple[str, str]:
    """Split "dump.tar#NAME" into path and name; the name of other sources is ""."""
    path, mark, name = source.rpartition("#")
    return (path, name) if mark and name and path.lower().endswith(".tar") else (source, "")


def _pax(data: bytes) -> dict[str, str]:
    """Parse the records "LENGTH KEY=VALUE\\n" of an extended header."""
    found, at = {}, 0
    while match := _RECORD.match(data, at):
        at += int(match[1])
        if not match.end() < at <= len(data):
            break
        found[match[2].decode("utf-8", "replace")] = data[match.end() : at - 1].decode("utf-8", "surrogateescape")
    return found


class _Regions:
    """A search for the regions of a document, in order, without parsing the JSON.

    Other text that looks like a region leads to a wrong member, which is then rejected because of its hash.
    """

    def __init__(self) -> None:
        self._rest = b""

    def of(self, piece: bytes) -> Iterator[tuple[str, int]]:
        """Yield (blobref, length) of each region that ends in `piece`, the next piece of the document."""
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
