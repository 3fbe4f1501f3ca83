"""JSON documents of any size, decompressed and parsed about a megabyte at a time.

Only JsonDocument.whole() holds a whole document in memory.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple

from zarrfs.documents.compressed import expanding
from zarrfs.documents.document import Document
from zarrfs.errors import SourceError

WINDOW = 1 << 20  # bytes parsed at a time; more if a single value is larger
_PIECE = 1 << 20  # bytes searched for long numbers at a time
_GUESSES = 3  # candidate ends of a slice tried before the text is scanned


def repeated(pattern: bytes) -> bytes:
    """Return a pattern that matches `pattern` as often as possible, and never backtracks over a match.

    CPython before 3.11.5 matches `(?:...)*+` wrongly (its issue 106052). The atomic group used there takes memory for
    each match.
    """
    return b"(?:%b)*+" % pattern if sys.version_info >= (3, 11, 5) else b"(?>(?:%b)*)" % pattern


# All quantifiers are possessive: the matcher never backtracks over bytes it has seen.
_STRING = b'"' + repeated(rb'[^"\\]++|\\.') + b'"'
_FLAT = repeated(rb'[^"\[\]{}]++|' + _STRING)  # text without brackets
_CLOSED = _STRING + rb"|\{" + _FLAT + rb"\}|\[" + _FLAT + rb"\]"  # strings, and containers without nested ones
_PARTS = repeated(rb'[^",\[\]{}]++|' + _CLOSED)
_SMALL = rb"\s*+" + _STRING + rb"\s*+:\s*+(?:" + _CLOSED + rb'|[^",\[\]{}]++)\s*+,'
_CONTAINER = re.compile(b"(" + repeated(_SMALL) + rb")\s*+(" + _STRING + rb")\s*+:\s*+(?=[{\[])", re.DOTALL)
_MEMBERS = re.compile(repeated(_PARTS + b","), re.DOTALL)
_MEMBER = re.compile(_PARTS, re.DOTALL)
_NESTED = re.compile(repeated(rb'[^"\[\]{}]++|' + _CLOSED), re.DOTALL)
_STRING_REST = re.compile(repeated(rb'[^"\\]++|\\.') + rb'("?)', re.DOTALL)
_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else 0 for byte in range(256))
_LONG = b"0" * 19  # a number with this many digits, mapped by _DIGITS, may not fit 64 bits
_BLANKS = b" \t\r\n"
_BLANK = re.compile(rb"[ \t\r\n]*+")
_OBJECT, _ARRAY, _COMMA = b"{[,"
_CLOSING = {_OBJECT: ord("}"), _ARRAY: ord("]")}
_EMPTY: dict[int, Callable[[], Any]] = {_OBJECT: dict, _ARRAY: list}
DEPTH_MAX = 1024  # levels of nested objects and arrays: neither parser accepts more


class Slice(NamedTuple):
    """Consecutive members of an object (a dict), or items of an array (a list)."""

    member: str | None  # the member of the root that the values belong to; None: the root itself
    values: Any  # a dict or a list; the root itself if it is neither object nor array


class JsonDocument:
    """A JSON document, parsed in slices.

    Every method raises SourceError if the text is not JSON, or is compressed and expands to more than `limit` bytes.
    The reader calls `progress` with its position in the document (bytes, as fetched) after every slice.
    """

    def __init__(
        self, document: Document, limit: int, progress: Callable[[int], object] = lambda position: None
    ) -> None:
        self.source = document.source
        self._document, self._limit, self._progress = document, limit, progress
        self._heads: dict[tuple[str, ...], Any] = {}

    def slices(self, apart: Collection[str] = ()) -> Iterator[Slice]:
        """Yield the whole document in slices, in the order of the text.

        A member of the root that `apart` names comes in separate slices if it does not fit in one slice. The first
        slice of such a member, or of an array, may be empty.
        """
        self._heads.clear()  # to free memory: a head may be large
        with self._document.open() as raw:
            reader = _Reader(expanding(raw, self._limit, self.source), self.source)
            for found in reader.slices(apart):
                yield found
                self._progress(raw.tell())

    def head(self, apart: Collection[str] = ()) -> Any:
        """Return the first members or items of the document, enough to detect its kind."""
        if tuple(apart) not in self._heads:
            self._heads[tuple(apart)] = self._head(apart)
        return self._heads[tuple(apart)]

    def _head(self, apart: Collection[str]) -> Any:
        slices = self.slices(apart)
        member, values = next(slices)
        found = {member: values} if member else values
        if isinstance(found, dict) and len(found) == 1 and not member:
            for member, values in slices:
                return found | ({member: values} if member else values)
        return found

    def members(self, names: Collection[str], apart: Collection[str] = ()) -> dict[str, Any]:
        """Return the members of the root named in `names`, except those that come in separate slices."""
        found: dict[str, Any] = {}
        for member, values in self.slices(apart):
            if member is None and isinstance(values, dict):
                found |= {name: values[name] for name in names if name in values}
        return found

    def whole(self) -> Any:
        """Parse the whole document and return it."""
        parts = list(self.slices())
        first = parts[0].values
        for part in parts[1:]:
            if isinstance(first, dict):
                first.update(part.values)
            else:
                first.extend(part.values)
        return first


class _Scan:
    """A scanner for the ends of members in a growing text, which reads each byte a bounded number of times."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start again after the first byte of the text, which is the bracket or comma before a member."""
        self.at, self.depth, self.in_string = 1, 0, False
        self.comma = -1  # position of the last comma between members, or -1
        self.end = -1  # position of the bracket that closes the object or array, or -1

    def drop(self, count: int) -> None:
        """Adjust all positions after the text has lost its first `count` bytes."""
        if self.at <= count:
            self.restart()
        else:
            self.at -= count
            self.comma = self.comma - count if self.comma > count else -1

    def read(self, text: bytearray) -> None:
        """Scan until the text or the object ends, or nesting exceeds DEPTH_MAX."""
        while self.at < len(text) and self.end < 0 and self.depth <= DEPTH_MAX:
            if self.in_string:
                self._end_string(text)
                if self.in_string:
                    return
            if not self.depth:
                behind = _matched(_MEMBERS, text, self.at).end()
                self.comma = behind - 1 if behind > self.at else self.comma
                self.at = behind
            self.at = _matched(_NESTED if self.depth else _MEMBER, text, self.at).end()
            if self.at < len(text):
                self._take(text[self.at])

    def _end_string(self, text: bytearray) -> None:
        stop = text.find(b'"', self.at)
        end = len(text) if stop < 0 else stop
        if text.find(b"\\", self.at, end) < 0:  # ten times as fast as the pattern; few long values have escapes
            self.at, self.in_string = end + (stop >= 0), stop < 0
        else:
            match = _matched(_STRING_REST, text, self.at)
            self.at, self.in_string = match.end(), not match[1]

    def _take(self, token: int) -> None:
        if token == 0x22:
            self.in_string = True
        elif token in b"{[":
            self.depth += 1
        elif self.depth:
            self.depth -= 1
        else:
            self.end = self.at
        self.at += 1


class _Reader:
    """The text of one document, from which slices are cut.

    The first byte of the text is the bracket or comma before the next member. To parse members in place, without
    copying a long value, the reader overwrites that byte with an opening bracket and the byte after the last member
    with a closing one.
    """

    def __init__(self, file: IO[bytes], source: str) -> None:
        self._file, self._source = file, source
        self._text = bytearray()
        self._start = 0  # position of _text in the document
        self._gaps: list[tuple[int, int]] = []  # blanks left out: (position in _text, count)
        self._ended = False  # whether _text reaches the end of the document
        self._scan = _Scan()

    def slices(self, apart: Collection[str]) -> Iterator[Slice]:
        """Implement JsonDocument.slices."""
        self._more()
        if self._text.startswith(codecs.BOM_UTF8):
            self._drop(len(codecs.BOM_UTF8))
        while not self._text.strip(_BLANKS) and not self._ended:
            self._drop(len(self._text))
            self._more()
        self._drop(_matched(_BLANK, self._text, 0).end())
        if self._ended:
            yield Slice(None, self._load(bytes(self._text), 0))
            return
        if self._text[0] not in b"{[":
            raise self._refuse("neither an object nor an array", 0)
        yield from self._inside(None, apart)
        self._skip(0)
        if len(self._text) > 1:
            raise self._refuse("text after the end of the document", 1)

    def _inside(self, member: str | None, apart: Collection[str]) -> Iterator[Slice]:
        """Yield slices of the object or array whose bracket is the first byte of the text; end at its closing one."""
        opening = self._text[0]
        self._scan.restart()
        comma, empty = False, True  # whether the last token was a comma, and whether no slice was yielded yet
        if member is not None and _matched(_BLANK, self._text, 1).end() == len(self._text):
            yield Slice(member, _EMPTY[opening]())  # head() need not read many blanks
            empty = False
        self._skip(0)
        while True:
            if apart and len(self._text) < 4 * WINDOW and (found := self._enter(apart)) is not None:
                name, before = found
                if before:
                    yield Slice(None, before)
                yield from self._inside(name, ())
                comma, empty = self._separator(), False
                if not comma:
                    return
                continue
            values, used, closed = self._next(opening, comma)
            if used:
                self._drop(used)
                if values or (closed and empty):
                    yield Slice(member, values or _EMPTY[opening]())
                    values = None  # free the memory before reading more
                if closed:
                    return
                self._skip(0)
                comma, empty = True, False
            elif self._ended:
                raise self._refuse("it ends in the middle", len(self._text))
            else:
                if empty and (member is not None or opening == _ARRAY):  # head() need not read a long value
                    yield Slice(member, _EMPTY[opening]())
                    empty = False
                self._more(len(self._text) // 8)
            if len(self._text) < WINDOW // 2 and not self._ended:
                self._more()

    def _next(self, opening: int, comma: bool) -> tuple[Any, int, bool]:
        """Return (values, their end, whether the container ends there) of the next slice; end 0: none is complete."""
        if self._scan.at == 1:
            values, used = self._guess(opening)
            if used:
                return values, used, False
        self._scan.read(self._text)
        if self._scan.depth > DEPTH_MAX:
            raise self._refuse("nested too deeply", self._scan.at)
        closed = self._scan.end >= 0
        at = self._scan.end if closed else self._scan.comma
        if at < 0:
            return None, 0, False
        if closed:
            self._scan.restart()
            if self._text[at] != _CLOSING[opening]:
                raise self._refuse("the wrong bracket", at)
        if _matched(_BLANK, self._text, 1).end() >= at:
            if comma or not closed:
                raise self._refuse("a comma with nothing beside it", at)
            return None, at, True
        return self._parse(opening, at), at, closed

    def _guess(self, opening: int) -> tuple[Any, int]:
        """Return (values, their end) of a slice that ends at a likely place, or (None, 0) if the guesses fail.

        Text that starts between two members and parses as an object once in braces also ends between two members.
        """
        import orjson

        pattern = b"]," if opening == _OBJECT else b"},"
        at = len(self._text)
        if self._ended:
            return None, 0
        for _ in range(_GUESSES):
            at = self._text.rfind(pattern, 1, at)
            if at < 0:
                break
            try:
                return self._exact(opening, at + 1), at + 1
            except orjson.JSONDecodeError:
                self._text[at + 1] = _COMMA
        return None, 0

    def _exact(self, opening: int, stop: int) -> Any:
        """Parse the members before `stop`, keeping large integers in nested objects: orjson makes floats of them."""
        import orjson

        self._text[0], self._text[stop] = opening, _CLOSING[opening]
        with memoryview(self._text) as text, text[: stop + 1] as members:
            values = orjson.loads(members)
            if self._text.find(b"{", 1, stop) < 0 or not _has_long_number(members):
                return values
            del values  # free the memory before parsing again
            return self._again(bytes(members), 0)

    def _enter(self, apart: Collection[str]) -> tuple[str, dict[str, Any]] | None:
        """Enter the next member if it comes in separate slices; return (its name, the members before it), or None.

        Only small members may come before it. The text then begins with its value.
        """
        match = _CONTAINER.match(self._text, 1)
        if match is None:
            return None
        name = self._load(match[2], match.start(2))
        if name not in apart:
            return None
        small = match[1].rstrip(_BLANKS)[:-1]
        before = self._load(b"{" + small + b"}", match.start(1) - 1) if small else {}
        self._drop(match.end())
        return str(name), before

    def _separator(self) -> bool:
        """Make the text begin with the comma or bracket after a member of the root; return whether it is a comma."""
        self._scan.restart()
        self._skip(0)
        token = bytes(self._text[1:2])
        if token not in (b",", b"}"):
            raise self._refuse("expected a comma or the end of the object", 1)
        self._drop(1)
        if token == b",":
            self._skip(0)
        return token == b","

    def _more(self, at_least: int = 0) -> None:
        """Read more text. Reduce blanks that fill whole reads, outside strings, to one blank."""
        count, blanks, piece = max(at_least, WINDOW), 0, b""
        while not self._ended:
            piece = self._file.read(count)
            self._ended = len(piece) < count
            if not piece.isspace() or b"\v" in piece or b"\f" in piece or not self._between():
                break
            blanks += len(piece)
            piece = b""
        if blanks:
            self._gaps.append((len(self._text), blanks - 1))
            self._text += b" "
        self._text += piece

    def _between(self) -> bool:
        """Return whether the end of the text is outside any string."""
        self._scan.read(self._text)
        return not self._scan.in_string and self._scan.depth <= DEPTH_MAX

    def _skip(self, at: int) -> None:
        """Drop the text before the byte `at` and the blanks after it."""
        while True:
            self._drop(max(_matched(_BLANK, self._text, at + 1).end() - 1, 0))
            if len(self._text) > 1 or self._ended:
                return
            self._more()
            at = 0

    def _drop(self, count: int) -> None:
        del self._text[:count]
        self._start += count + sum(length for at, length in self._gaps if at <= count)
        self._gaps = [(at - count, length) for at, length in self._gaps if at > count]
        self._scan.drop(count)

    def _parse(self, opening: int, stop: int) -> Any:
        import orjson

        try:
            return self._exact(opening, stop)
        except orjson.JSONDecodeError:
            return self._load(bytes(self._text[: stop + 1]), 0)

    def _load(self, text: bytes, at: int) -> Any:
        """Parse `text`, which starts at `at`. orjson refuses NaN and lone surrogates; json accepts them."""
        import orjson

        try:
            values = orjson.loads(text)
            return self._again(text, at) if text.find(b"{", 1) > 0 and _has_long_number(text) else values
        except orjson.JSONDecodeError as first:
            try:
                return json.loads(text)
            except UnicodeDecodeError as exc:
                around = text[max(exc.start - 40, 0) : exc.end + 20].decode(errors="backslashreplace")
                raise self._refuse(f"not UTF-8: {around!a}", at + exc.start) from None
            except (ValueError, RecursionError) as exc:
                whole = self._ended and not self._start  # only then do the parser's line and column match the document
                reason = "nested too deeply" if isinstance(exc, RecursionError) else str(first) if whole else first.msg
                raise self._refuse(reason, at + first.pos) from None

    def _again(self, text: bytes, at: int) -> Any:
        """Parse `text`, which starts at `at`, with json after orjson. json may accept fewer levels of nesting."""
        try:
            return json.loads(text)
        except RecursionError:
            raise self._refuse("nested too deeply", at) from None

    def _refuse(self, reason: str, at: int) -> SourceError:
        place = self._start + at + sum(length for before, length in self._gaps if before <= at)
        return SourceError(self._source, f"not JSON: {reason} (at byte {place:,})")


def _has_long_number(text: bytes | memoryview) -> bool:
    pieces = range(0, len(text), _PIECE)
    return any(_LONG in bytes(text[at : at + _PIECE + len(_LONG)]).translate(_DIGITS) for at in pieces)


def _matched(pattern: re.Pattern[bytes], text: bytearray, at: int) -> re.Match[bytes]:
    """Match a pattern that also matches the empty text, so that there is always a match."""
    match = pattern.match(text, at)
    assert match is not None
    return match
