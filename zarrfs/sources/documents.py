"""Documents: bytes that describe a tree, read as often as needed, a slice at a time.

Nothing here holds a whole document: a local one is read through its descriptor, its compression is undone on
the way, and JsonDocument parses about a megabyte of it at once. Why orjson in slices: docs/large-sets.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple

from zarrfs.errors import SourceError
from zarrfs.sources.blobrefs import is_tar
from zarrfs.sources.compressed import expanding

WINDOW = 1 << 20  # bytes parsed at once; more where a single value is larger
_SETTLED_NS = 2_000_000_000
_PIECE = 1 << 20  # bytes hashed at once
_GUESSES = 3  # places tried as the end of a slice before it is looked for properly

_OPEN_STRING = rb'"(?:[^"\\]++|\\.)*+'
_STRING = _OPEN_STRING + rb'"'
_FLAT = rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+"  # what holds no brackets
_TOKEN = re.compile(rb"\[" + _FLAT + rb"\]|" + _OPEN_STRING + rb'(?:"|\\?\Z)|[{}\[\],]', re.DOTALL)
_SMALL = rb"\s*" + _STRING + rb"\s*:\s*(?:" + _STRING + rb"|\{" + _FLAT + rb"\}|\[" + _FLAT + rb'\]|[^",\[\]{}]++)\s*,'
_CONTAINER = re.compile(rb"((?:" + _SMALL + rb")*+)\s*(" + _STRING + rb")\s*:\s*(?=[{\[])", re.DOTALL)
_LONG = re.compile(rb"[0-9]{19}")
_BLANKS = b" \t\r\n"
_CLOSING = {b"{": b"}", b"[": b"]", b"": b""}


class Slice(NamedTuple):
    """Consecutive members of an object (a dict), or items of an array (a list)."""

    member: str | None  # of the root, whose value they are part of; None: they are the root's own
    values: Any  # of a root that is neither object nor array: the root


@dataclasses.dataclass(frozen=True)
class Document:
    """A fetched document."""

    source: str
    data: bytes | int  # or the descriptor of a regular file
    base: str
    mtime_ns: int | None
    origin: str = ""  # as Plan.origin
    version: str = ""  # stamp() of one that was fetched
    blobs: tuple[str, ...] = ()  # where the blobs of an archive lie if -o blobs= does not say
    known: tuple[str, dict[str, str]] | None = None  # its index, as IndexCache.recall() gives it: `data` is empty

    @property
    def size(self) -> int:
        """Bytes, as fetched: perhaps compressed."""
        return len(self.data) if isinstance(self.data, bytes) else os.fstat(self.data).st_size

    @property
    def fetched(self) -> bool:
        """Whether it is a copy of our own, which nobody changes."""
        return bool(self.origin) or isinstance(self.data, bytes)

    def close(self) -> None:
        """Give the descriptor back, if it has one."""
        if not isinstance(self.data, bytes):
            os.close(self.data)

    def open(self) -> IO[bytes]:
        """A reader of its own from the beginning."""
        if isinstance(self.data, bytes):
            return io.BytesIO(self.data)
        return io.BufferedReader(_Positioned(self.data), _PIECE)

    def stamp(self) -> str:
        """What names this version: of a local file what stat(2) shows of it; "" where there is no such name."""
        if self.origin or isinstance(self.data, bytes):
            return self.version
        status = os.fstat(self.data)
        parts = (self.source, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()

    def settled(self) -> bool:
        """Whether the next change will show in stamp(): two within one tick of the clock have the same times."""
        if self.origin or isinstance(self.data, bytes):
            return bool(self.version)
        status = os.fstat(self.data)
        return time.time_ns() - max(status.st_ctime_ns, status.st_mtime_ns) > _SETTLED_NS

    def digest(self) -> bytes:
        """The SHA-256 of its bytes."""
        hashed = hashlib.sha256()
        with self.open() as file:
            while piece := file.read(_PIECE):
                hashed.update(piece)
        return hashed.digest()


class JsonDocument:
    """A JSON document, parsed in slices. Everything raises SourceError where it is not JSON, or too large.

    `progress` is called with the position in the document (bytes, as fetched) now and then.
    """

    def __init__(
        self, document: Document, limit: int, progress: Callable[[int], object] = lambda position: None
    ) -> None:
        self.source = document.source
        self._document, self._limit, self._progress = document, limit, progress

    def slices(self, apart: Collection[str] = ()) -> Iterator[Slice]:
        """Everything, from the beginning, in the order of the text.

        Members of the root called one of `apart` come in slices of their own where they do not fit in one.
        """
        with self._document.open() as raw:
            reader = _Reader(expanding(raw, self._limit, self.source), self.source)
            for found in reader.slices(apart):
                yield found
                self._progress(raw.tell())

    def head(self, apart: Collection[str] = ()) -> Any:
        """The document, or as many of its first members or items as tell what it is."""
        slices = self.slices(apart)
        member, values = next(slices)
        found = {member: values} if member else values
        if isinstance(found, dict) and len(found) == 1 and not member:
            for member, values in slices:
                return found | ({member: values} if member else values)
        return found

    def members(self, names: Collection[str], apart: Collection[str] = ()) -> dict[str, Any]:
        """Those members of the root called one of `names` that do not come apart."""
        found: dict[str, Any] = {}
        for member, values in self.slices(apart):
            if member is None and isinstance(values, dict):
                found |= {name: values[name] for name in names if name in values}
        return found

    def whole(self) -> Any:
        """The parsed document, all at once."""
        parts = list(self.slices())
        first = parts[0].values
        for part in parts[1:]:
            if isinstance(first, dict):
                first.update(part.values)
            else:
                first.extend(part.values)
        return first


class _Reader:
    """The text of one document, from which slices are cut."""

    def __init__(self, file: IO[bytes], source: str) -> None:
        self._file, self._source = file, source
        self._text = b""
        self._start = 0  # of _text in the document
        self._ended = False  # whether _text reaches its end

    def slices(self, apart: Collection[str]) -> Iterator[Slice]:
        """As JsonDocument.slices."""
        self._more()
        self._skip(0)
        if is_tar(self._text):
            rule = "a tar that is compressed, which cannot be read in pieces: decompress it first"
            raise SourceError(self._source, rule)
        if self._ended or self._text[:1] not in (b"{", b"["):
            while not self._ended:
                self._more()
            yield Slice(None, self._parse(self._text))
            return
        yield from self._inside(None, apart)
        while not self._ended:
            self._more()
        if self._text.strip(_BLANKS):
            raise self._refuse("text after the end of the document", 0)

    def _inside(self, member: str | None, apart: Collection[str]) -> Iterator[Slice]:
        """Slices of the object or array that the text begins with; the text then goes on behind it."""
        opening = self._text[:1]
        self._skip(1)
        comma, empty = False, True  # what came last; whether there was any slice yet
        while True:
            if apart and (found := self._enter(apart)) is not None:
                name, before = found
                if before:
                    yield Slice(None, before)
                yield from self._inside(name, ())
                comma, empty = self._separator(), False
                if not comma:
                    self._skip(1)
                    return
                continue
            values, used, closed = self._next(opening, comma)
            if used:
                if values or (closed and empty and member is None):
                    yield Slice(member, values or ([] if opening == b"[" else {}))
                self._skip(used)
                if closed:
                    return
                comma, empty = True, False
            elif self._ended:
                raise self._refuse("it ends in the middle", len(self._text))
            else:
                self._more(len(self._text))  # one value is larger than the window
            if len(self._text) < WINDOW // 2 and not self._ended:
                self._more()

    def _next(self, opening: bytes, comma: bool) -> tuple[Any, int, bool]:
        """(values, bytes used, whether that is the end) of the next slice; 0 bytes where none is complete."""
        values, used = self._guess(opening)
        if used:
            return values, used, False
        at, closed = _boundary(self._text)
        if at < 0:
            return None, 0, False
        if closed and self._text[at] != _CLOSING[opening][0]:
            raise self._refuse("the wrong bracket", at)
        if not closed or self._text[:at].strip(_BLANKS):
            values = self._parse(self._text[:at], opening)
        elif comma:
            raise self._refuse("a comma with nothing after it", at)
        return values, at + 1, closed

    def _guess(self, opening: bytes) -> tuple[Any, int]:
        """(values, bytes used) of a slice that ends where it most probably can; (None, 0) where it cannot.

        Text that begins between two members and is an object when put in braces ends between members, too.
        """
        import orjson

        pattern = b"]," if opening == b"{" else b"},"
        at = len(self._text)
        if self._ended:
            return None, 0
        for _ in range(_GUESSES):
            at = self._text.rfind(pattern, 0, at)
            if at < 0:
                break
            text = _enclosed(opening, memoryview(self._text)[: at + 1])
            try:
                return _exact(orjson.loads(text), text), at + 2
            except orjson.JSONDecodeError:
                continue
        return None, 0

    def _enter(self, apart: Collection[str]) -> tuple[str, dict[str, Any]] | None:
        """(name of a member that comes apart, small members before it); the text then begins with its value."""
        match = _CONTAINER.match(self._text)
        if match is None:
            return None
        name = self._parse(match[2])
        if name not in apart:
            return None
        small = match[1].rstrip(_BLANKS)[:-1]
        before = self._parse(small, b"{") if small else {}
        self._skip(match.end())
        return str(name), before

    def _separator(self) -> bool:
        """Whether a comma (skipped) comes next, and not the end of the root."""
        self._skip(0)
        if self._text[:1] == b",":
            self._skip(1)
            return True
        if self._text[:1] != b"}":
            raise self._refuse("expected a comma or the end of the object", 0)
        return False

    def _more(self, at_least: int = WINDOW) -> None:
        count = max(at_least, WINDOW)
        piece = self._file.read(count)
        self._ended = len(piece) < count
        self._text += piece

    def _skip(self, count: int) -> None:
        """Leave `count` bytes and the blanks after them."""
        before = len(self._text)
        self._text = self._text[count:].lstrip(_BLANKS)
        while not self._text and not self._ended:
            self._more()
            before += len(self._text)
            self._text = self._text.lstrip(_BLANKS)
        self._start += before - len(self._text)

    def _parse(self, text: bytes, opening: bytes = b"") -> Any:
        """`text`, put in the brackets that it lacks. orjson refuses NaN and lone surrogates; json takes them."""
        import orjson

        text = _enclosed(opening, text)
        try:
            return _exact(orjson.loads(text), text)
        except orjson.JSONDecodeError as first:
            try:
                return json.loads(text)
            except UnicodeDecodeError as exc:
                around = text[max(exc.start - 40, 0) : exc.end + 20].decode(errors="backslashreplace")
                raise self._refuse(f"not UTF-8: {around!a}", exc.start - len(opening)) from None
            except (ValueError, RecursionError) as exc:
                whole = not opening and not self._start  # then lines and columns are those of the document
                reason = "nested too deeply" if isinstance(exc, RecursionError) else str(first) if whole else first.msg
                raise self._refuse(reason, first.pos - len(opening)) from None

    def _refuse(self, reason: str, at: int) -> SourceError:
        return SourceError(self._source, f"not JSON: {reason} (at byte {max(self._start + at, 0):,})")


class _Positioned(io.RawIOBase):
    """A file read with a position of its own, however many readers share its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at = descriptor, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, os.fstat(self._descriptor).st_size)
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._descriptor, [buffer], self._at)
        self._at += count
        return count


def _exact(values: Any, text: bytes) -> Any:
    """`values` of `text`, with whole numbers of any size inside of objects; orjson makes floats of large ones."""
    return json.loads(text) if text.find(b"{", 1) > 0 and _LONG.search(text) else values


def _enclosed(opening: bytes, text: bytes | memoryview) -> bytes:
    return b"".join((opening, text, _CLOSING[opening]))


def _boundary(text: bytes) -> tuple[int, bool]:
    """(where the last comma between members is, False), or (where the object or array ends, True); -1: nowhere."""
    depth, last = 0, -1
    for match in _TOKEN.finditer(text):
        at = match.start()
        token = text[at]
        if token == 0x2C:  # ,
            if not depth:
                last = at
        elif token in b"{[":
            depth += match.end() == at + 1  # else an array of its own, with its end
        elif token in b"}]":
            if not depth:
                return at, True
            depth -= 1
    return last, False
