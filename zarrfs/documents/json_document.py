"""JSON documents of any size, decompressed and parsed a quarter of a megabyte at a time.

Only JsonDocument.whole() holds a whole document in memory.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator
from typing import IO, Any, NamedTuple

from zarrfs.documents.compressed import expanding
from zarrfs.documents.document import Document
from zarrfs.errors import SourceError

WINDOW = 256 << 10  # bytes read at a time; more if a single value is larger
_FIRST = 4096  # characters at the beginning of the root in which a member that comes in separate slices is looked for
_LIKELY = ("],", "},", '",')  # ends of members, the most frequent first
_CLOSING = {"{": "}", "[": "]"}
_BLANKS = re.compile(r"[ \t\r\n]*+")
_DECODER = json.JSONDecoder()
_WORD = 16  # characters of the longest token other than strings and numbers, and of an escape
_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else 0 for byte in range(256))
_LONG = b"0" * 19  # a number with this many digits, mapped by _DIGITS, may not fit 64 bits


class Slice(NamedTuple):
    """Consecutive members of an object (a dict), or items of an array (a list)."""

    member: str | None  # the member of the root that the values belong to; None: the root itself
    values: Any  # a dict or a list; the root itself if it is neither object nor array


class JsonDocument:
    """A JSON document, parsed in slices.

    Every method raises SourceError if the text is not JSON, or is compressed and expands to more than `limit` bytes.
    """

    def __init__(self, document: Document, limit: int) -> None:
        self.source = document.source
        self._document, self._limit = document, limit

    def slices(self, apart: Collection[str] = ()) -> Iterator[Slice]:
        """Yield the whole document in slices, in the order of the text.

        A member of the root that `apart` names comes in separate slices if it does not fit in one slice. The first
        slice of such a member, or of an array, may be empty.
        """
        with self._document.open() as raw:
            reader = _Reader(expanding(raw, self._limit, self.source), self.source)
            yield from reader.slices(apart)

    def head(self, apart: Collection[str] = ()) -> Any:
        """Return the first members or items of the document, enough to detect its kind."""
        slices = self.slices(apart)
        member, values = next(slices)
        found = {member: values} if member else values
        if isinstance(found, dict) and len(found) == 1 and not member:
            for member, values in slices:
                return found | ({member: values} if member else values)
        return found

    def members(self, names: Collection[str], apart: Collection[str] = ()) -> dict[str, Any]:
        """Return the members of the root named in `names`, except those that come in separate slices."""
        roots = (values for member, values in self.slices(apart) if member is None and isinstance(values, dict))
        return {name: values[name] for values in roots for name in names if name in values}

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


class _Reader:
    """The text of one document, from which slices are cut: the next member begins at `_at`."""

    def __init__(self, file: IO[bytes], source: str) -> None:
        self._file, self._source = file, source
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0
        self._edge = 0
        self._start = 0  # position of _text in the document, in bytes
        self._ended = False  # whether _text reaches the end of the document

    def slices(self, apart: Collection[str]) -> Iterator[Slice]:
        """Implement JsonDocument.slices."""
        opening = self._token()
        values = _parsed(self._text) if self._ended else None
        if values is not None:
            yield Slice(None, values)
            return
        if opening not in _CLOSING:
            yield Slice(None, self._value())
        else:
            yield from self._inside(None, apart)
        if self._token():
            raise self._refuse("text after the end of the document", self._at)

    def _inside(self, member: str | None, apart: Collection[str]) -> Iterator[Slice]:
        """Yield slices of the object or array that begins at `_at`, and end behind it.

        The members before `_edge` are parsed one by one.
        """
        opening = self._text[self._at]
        new: type[Any] = dict if opening == "{" else list
        self._at += 1
        values: Any = new()
        if self._token() == _CLOSING[opening]:
            self._at += 1
            yield Slice(member, values)
            return
        self._edge = self._at + (_FIRST if apart else 0)
        while True:
            if self._at >= self._edge:
                if values:
                    yield Slice(member, values)
                values = None  # free the memory before reading more
                if len(self._text) - self._at < WINDOW // 2 and not self._ended:
                    self._more()
                values, stop = self._guess(opening)
                if stop:
                    self._at = stop
                    continue
                values, self._edge = new(), len(self._text)
            if opening == "[":
                values.append(self._value())
            else:
                name = self._name()
                if name in apart and self._token() == "{":
                    if values:
                        yield Slice(member, values)
                    values = {}
                    yield from self._inside(name, ())
                else:
                    values[name] = self._value()
            token = self._token()
            self._at += 1
            if token == _CLOSING[opening]:
                break
            if token != ",":
                raise self._refuse("it ends in the middle" if not token else "expected a comma", self._at - 1)
        if values:
            yield Slice(member, values)

    def _guess(self, opening: str) -> tuple[Any, int]:
        """Return (values, the position behind its comma) of a slice that ends at a likely place, or (None, 0).

        Text that starts between two members and parses as an object once in braces also ends between two members.
        """
        for pattern in _LIKELY:
            stop = self._text.rfind(pattern, self._at) + 1
            if stop:
                values = _parsed(opening + self._text[self._at : stop] + _CLOSING[opening])
                if values is not None:
                    return values, stop + 1
        return None, 0

    def _name(self) -> str:
        """Parse the name of a member, and its colon."""
        if self._token() != '"':
            raise self._refuse("expected a name in double quotes", self._at)
        name = self._value()
        if self._token() != ":":
            raise self._refuse("expected a colon", self._at)
        self._at += 1
        return str(name)

    def _value(self) -> Any:
        """Parse the value at `_at`, and read more text until it is complete."""
        self._token()
        while True:
            try:
                value, stop = _DECODER.raw_decode(self._text, self._at)
                if stop < len(self._text) - 2 or self._ended:  # otherwise, a number may go on, such as 1e+
                    self._at = stop
                    return value
            except RecursionError:
                raise self._refuse("nested too deeply", self._at) from None
            except json.JSONDecodeError as exc:
                incomplete = exc.pos > len(self._text) - _WORD or exc.msg.startswith("Unterminated string")
                if self._ended or not incomplete:
                    raise self._refuse(exc.msg, exc.pos) from None
            except ValueError as exc:  # an integer of thousands of digits
                raise self._refuse(str(exc), self._at) from None
            self._more()

    def _token(self) -> str:
        """Move to the next character that is not a blank, and return it; "" at the end of the document."""
        while True:
            match = _BLANKS.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def _more(self) -> None:
        """Drop the text before `_at`, and read a window, or half of what is left if that is more."""
        self._start = self._position(self._at)
        self._text, self._edge, self._at = self._text[self._at :], self._edge - self._at, 0
        count = max(WINDOW, len(self._text) // 2)
        piece = self._file.read(count)
        self._ended = len(piece) < count
        try:
            self._text += self._decoder.decode(piece, self._ended)
        except UnicodeDecodeError as exc:
            before, after = self._text[-40:].encode() + exc.object[: exc.start], exc.object[exc.start : exc.end + 20]
            around = (before[-40:] + after).decode(errors="backslashreplace")
            raise self._refuse(f"not UTF-8: {around!a}", len(self._text), exc.start) from None

    def _refuse(self, reason: str, at: int, more: int = 0) -> SourceError:
        return SourceError(self._source, f"not JSON: {reason} (at byte {self._position(at) + more:,})")

    def _position(self, at: int) -> int:
        return self._start + len(self._text[:at].encode())


def _parsed(text: str) -> Any:
    """Parse an object or array by orjson; None if it is not JSON, or orjson would make floats of large integers.

    In an array of an object, such a float is an invalid reference all the same.
    """
    import orjson

    data = text.encode()
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError:  # also for NaN and lone surrogates, which json accepts
        return None
    return None if data.find(b"{", 1) > 0 and _LONG in data.translate(_DIGITS) else values
