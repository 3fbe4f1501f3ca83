"""The compiler of reference sets in JSON, versions 0 and 1, to an index.

Source: the fsspec reference set specification; docs/sources.md.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from zarrfs.config.urls import data_in, is_data
from zarrfs.documents.compilation import Compilation
from zarrfs.documents.json_document import JsonDocument
from zarrfs.references.gen import RENDERED_MAX, Gen, TemplateError, json_type, read_gen
from zarrfs.references.keys import BASE64, ZARR_METADATA, decode_base64, printable, set_key_rule
from zarrfs.store.api import KEY_MAX, NAME_MAX
from zarrfs.store.indexfile import ROOT, IndexWriter

if TYPE_CHECKING:
    from zarrfs.references.templates import Templates

OFFSET_MAX = 2**63 - 1  # largest offset and end of a range: the largest size of a file

SLICED_MEMBERS = ("refs",)  # the member that is parsed in separate slices
_MEMBERS = {"version", "templates", "gen", "refs"}
_NUMBER = re.compile(r"\s*(-?[0-9]+)\s*", re.ASCII)
_SHORT = NAME_MAX // 4  # characters that fit in a name whatever their length in UTF-8
_REMEMBERED = 200_000  # directories and URLs cached
_REPORTED_MAX = 20  # unknown members with a warning each; there may be very many, if they are misplaced entries
_json_text = json.JSONEncoder(separators=(",", ":")).encode

Pairs = Iterable[tuple[str, Any]]  # (key, value) as in a set of version 0


class _Bad(Exception):
    """The rule that a key or its value breaks."""


def detect(document: object) -> bool:
    """Return whether (the head of) a document looks like a reference set.

    For a set of version 0, one member that looks like a reference suffices.
    """
    if not isinstance(document, dict):
        return False
    if "version" in document:
        return not _MEMBERS.isdisjoint(document.keys() - {"version"}) or len(document) == 1
    if not document or "refs" in document:
        return True
    return any(_like_reference(key, value) for key, value in document.items())


def compile_document(document: JsonDocument, compilation: Compilation) -> None:
    """Compile a reference set into `compilation.writer`.

    An entry whose reference breaks a rule is listed, and reading it fails; one whose key cannot be a path is left out.
    Each causes a warning. Raise SourceError for a fault in the rest of the document or in a template.
    """
    head = document.head(SLICED_MEMBERS)
    if not isinstance(head, dict):
        raise compilation.refuse(f"a reference set is a JSON object, not {json_type(head)}")
    entries = _Entries(compilation)
    # without any member of version 1 at its beginning, it is of version 0, and is not searched for its version
    if "version" in head or (not _MEMBERS.isdisjoint(head) and document.members(("version",), SLICED_MEMBERS)):
        _Version1(document, entries, compilation).compile()
    else:
        urls = _Urls(compilation.writer, None)
        for part in document.slices():
            if "refs" in part.values:
                compilation.warn(
                    'refs: without "version" this is a set of version 0, and refs a file in it; '
                    'a set of version 1 says "version": 1'
                )
            if "version" in part.values:
                raise compilation.refuse("comes behind entries of a set of version 0, which has no version", "version")
            entries.add(part.values.items(), urls)
    entries.finish()


class _Version1:
    """The compiler of a set of version 1."""

    def __init__(self, document: JsonDocument, entries: _Entries, compilation: Compilation) -> None:
        self._document, self._entries, self._compilation = document, entries, compilation
        self._members: dict[str, Any] = {}
        self._named: dict[str, str] | None = None
        self._made: Templates | None = None
        self._gens: list[Gen] = []
        self._unknown = 0  # number of members that are not in the specification

    def compile(self) -> None:
        """Compile the document: refs first, because entries made by gen replace those of refs."""
        urls = _Urls(self._compilation.writer, lambda text: self._templates().text(text))
        for member, values in self._document.slices(SLICED_MEMBERS):
            refs = values if member else values.get("refs", {})
            if not member:
                self._take(values)
            if isinstance(refs, dict):
                self._entries.add(refs.items(), urls)
            else:
                raise self._compilation.refuse(f"expected an object, not {json_type(refs)}", "refs")
        if "version" not in self._members:  # the head had it: another program has written the file
            raise self._compilation.refuse("the document changed while it was read")
        if self._unknown > _REPORTED_MAX:
            more = self._unknown - _REPORTED_MAX
            self._compilation.warn(f"{more:,} more members that no reference set of version 1 has: ignored")
        for gen in self._gens:
            try:
                self._generate(gen)
            except TemplateError as exc:
                raise self._compilation.refuse(exc.rule, exc.entry and printable(exc.entry)) from None

    def _generate(self, gen: Gen) -> None:
        """Add the entries of one item of gen. Raise TemplateError."""
        urls = _Urls(self._compilation.writer, None)  # gen's URLs are rendered already
        made = ((row[0], row[1:]) for row in self._templates().rows(gen))
        self._entries.add(made, urls, gen.where)

    def _take(self, values: dict[str, Any]) -> None:
        """Check and keep members of the root other than refs."""
        compilation = self._compilation
        version = values.get("version", 1)
        if type(version) is not int or version != 1:
            raise compilation.refuse(
                f"must be the number 1, not {json_type(version)} (version 0 has no such member)", "version"
            )
        for name in values:
            if name in _MEMBERS:
                continue
            self._unknown += 1
            if self._unknown <= _REPORTED_MAX:
                compilation.warn(f"{printable(name)}: not a member of a reference set of version 1: ignored")
        self._members |= values
        self._members.pop("refs", None)
        if "templates" in values:
            self._sources()
        if "gen" in values:
            try:
                self._gens = read_gen(values["gen"], self._sources().keys())
            except TemplateError as exc:
                raise compilation.refuse(exc.rule, exc.entry and printable(exc.entry)) from None

    def _sources(self) -> dict[str, str]:
        """Return the checked member `templates`, searching the whole document if it has not been read yet."""
        if self._named is None:
            if "templates" not in self._members:
                self._members["templates"] = {}
                self._members |= self._document.members(("templates",), SLICED_MEMBERS)
            sources = self._members["templates"]
            if not isinstance(sources, dict):
                raise self._compilation.refuse(f"expected an object, not {json_type(sources)}", "templates")
            self._named = {}
            for name, source in sources.items():
                if isinstance(source, str):
                    self._named[name] = source
                else:
                    rule = f"expected a string, not {json_type(source)}"
                    raise self._compilation.refuse(rule, printable(f"templates.{name}"))
        return self._named

    def _templates(self) -> Templates:
        if self._made is None:
            from zarrfs.references.templates import Templates  # most sets need no jinja2

            self._made = Templates(self._sources())
        return self._made


class _Urls:
    """The targets of one part of a document, by URL. `render` expands a URL with templates; None: never expand."""

    def __init__(self, writer: IndexWriter, render: Callable[[str], str] | None) -> None:
        self._writer, self._render = writer, render
        self.known: dict[str, int] = {}  # URL as written -> id of the target

    def url(self, raw: Any) -> str:
        """Expand `raw`, and remember its target unless it is a data: URL. Raise _Bad or TemplateError."""
        if type(raw) is not str:
            raise _Bad(f"url: expected a string, not {json_type(raw)}")
        url = self._render(raw) if self._render is not None and "{{" in raw else raw
        if not url:
            raise _Bad("url: empty")
        if "\0" in url:
            raise _Bad("url: a NUL character")
        if _size(url) is None:
            raise _Bad("url: a lone surrogate, which UTF-8 cannot hold")
        if is_data(url):
            return url
        if len(url) > RENDERED_MAX:
            raise _Bad(f"url: over {RENDERED_MAX} characters")
        if len(self.known) > _REMEMBERED:
            self.known.clear()
        self.known[raw] = self._writer.target_id(url)
        return url


class _Entries:
    """A writer of entries to the index, which checks their keys and values."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation, self._writer = compilation, compilation.writer
        self._directories: dict[str, int] = {"": ROOT}  # checked prefixes -> ids
        self._stripped: tuple[int, str] | None = None  # (count of keys with a leading "/", the first one)

    def add(self, pairs: Pairs, urls: _Urls, gen: str = "") -> None:
        """Add entries; a later entry of a key replaces an earlier one. `gen`: the item of gen that made them."""
        directories, known = self._directories, urls.known
        rows: list[tuple[int, str, int, int, int]] = []
        for key, value in pairs:
            kind = type(value)
            if (kind is list or kind is tuple) and len(value) == 3:  # fast path: nearly all entries are valid ranges
                url, offset, length = value
                prefix, _, name = key.rpartition("/")
                if (
                    type(url) is str
                    and type(offset) is int
                    and type(length) is int
                    and (parent := directories.get(prefix)) is not None
                    and (target := known.get(url)) is not None
                    and offset >= 0
                    and length >= 0
                    and offset + length <= OFFSET_MAX
                    and 0 < len(name) <= _SHORT
                    and name.isprintable()  # excludes NUL and lone surrogates
                    and name != "."
                    and name != ".."
                    and (prefix or key[0] != "/")
                ):
                    rows.append((parent, name, length, target, offset))
                    continue
            self._writer.ranges(rows)
            rows.clear()
            self._add_one(key, value, urls, gen)
        self._writer.ranges(rows)

    def finish(self) -> None:
        """Report keys with a leading slash, and resolve conflicts of keys that are both a file and a directory."""
        if self._stripped:
            count, first = self._stripped
            self._compilation.warn(f'{printable(first)}: a leading "/" is taken off ({count:,} such keys)')
        for key in self._writer.conflicts():
            self._compilation.skip(printable(key), "a file and a directory: the directory wins")

    def _add_one(self, key: str, value: Any, urls: _Urls, gen: str) -> None:
        """Add an entry of any form, with all checks."""
        compilation = self._compilation
        entry, suffix = printable(key), f" ({gen})" if gen else ""
        try:
            key = self._checked(key)
        except _Bad as bad:
            compilation.skip(entry, f"{bad}{suffix}")
            return
        try:
            self._write(key, value, urls, bool(gen))
            parent = key.rpartition("/")[0]
            if len(parent.encode()) < KEY_MAX - NAME_MAX:  # any short name below it makes a valid key
                if len(self._directories) > _REMEMBERED:
                    self._directories.clear()
                self._directories[parent] = self._writer.directory_id(parent)
        except _Bad as bad:
            compilation.broken(key, entry, f"{bad}{suffix}")
        except TemplateError as exc:
            raise compilation.refuse(f"url {value[0]!r:.80}: {exc.rule}", entry) from None

    def _write(self, key: str, value: Any, urls: _Urls, generated: bool) -> None:
        if type(value) is str:
            self._writer.inline(key, _inline(value))
        elif isinstance(value, dict):
            self._writer.inline(key, _object_text(value).encode())
        elif not isinstance(value, list | tuple):
            raise _Bad(f"expected a string, an object or an array, not {json_type(value)}")
        elif len(value) == 3:
            offset, length = map(_number, value[1:]) if generated else value[1:]
            _check_range(offset, length)
            if is_data(url := urls.url(value[0])):
                self._writer.inline(key, _part(_data(url), offset, length))
            else:
                self._writer.range(key, url, offset, length)
        elif len(value) == 1:
            if is_data(url := urls.url(value[0])):
                self._writer.inline(key, _data(url))
            else:
                self._writer.whole(key, url)
        else:
            raise _Bad(f"expected [url] or [url, offset, length], not an array of {len(value)}")

    def _checked(self, key: str) -> str:
        """Return `key` without a leading slash. Raise _Bad."""
        if _size(key) is None:
            raise _Bad("a key with a lone surrogate, which UTF-8 cannot hold")
        if key[:1] == "/":
            count, first = self._stripped or (0, key)
            self._stripped = count + 1, first
            key = key[1:]
        rule = set_key_rule(key)
        if rule:
            raise _Bad(f"not a key: {rule}")
        return key


def _check_range(offset: Any, length: Any) -> None:
    """Raise _Bad unless both are integers of at least 0 whose sum does not exceed OFFSET_MAX."""
    for name, number in ("offset", offset), ("length", length):
        if type(number) is float and number > OFFSET_MAX:  # orjson parses larger integers as floats
            raise _Bad("offset + length is over 2^63 - 1")
        if type(number) is not int:
            raise _Bad(f"{name}: expected a whole number, not {json_type(number)}")
        if number < 0:
            raise _Bad(f"{name}: negative")
    if offset + length > OFFSET_MAX:
        raise _Bad("offset + length is over 2^63 - 1")


def _inline(text: str) -> bytes:
    """Return the bytes of an inline value. Raise _Bad."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise _Bad("text with a lone surrogate, which UTF-8 cannot hold") from None
    if not data.startswith(BASE64):
        return data
    try:
        return decode_base64(data)
    except binascii.Error as exc:
        raise _Bad(f"malformed base64: {str(exc).lower()}") from None


def _data(url: str) -> bytes:
    """Return the bytes in a data: URL, which may have any length. Raise _Bad."""
    try:
        return data_in(url)
    except ValueError as exc:
        raise _Bad(f"malformed data: URL: {str(exc).lower()}") from None


def _part(data: bytes, offset: int, length: int) -> bytes:
    if offset + length > len(data):
        raise _Bad(f"bytes [{offset}, {offset + length}) of a data: URL with {len(data)} bytes")
    return data[offset : offset + length]


def _size(text: str) -> int | None:
    """Return the length of `text` in UTF-8; None if it cannot be encoded."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _number(value: int | str) -> int:
    """Return an offset or length made by gen, which may be rendered text, as an int. Raise _Bad."""
    if isinstance(value, int):
        return value
    match = _NUMBER.fullmatch(value)
    if match is None:
        raise _Bad(f"expected a whole number, not {value!r:.40}")
    if len(match[1]) > 40:  # far beyond any file, unless padded with zeros
        raise _Bad("offset + length is over 2^63 - 1")
    return int(match[1])


def _object_text(value: dict[str, Any]) -> str:
    """Return the text of an inline JSON object: compact ASCII, members in the order of the document."""
    try:
        return _json_text(value)
    except RecursionError:
        raise _Bad("an object nested too deeply") from None


def _like_reference(key: str, value: object) -> bool:
    if isinstance(value, list):
        return len(value) in (1, 3) and isinstance(value[0], str)
    return isinstance(value, str) or (isinstance(value, dict) and key.endswith(ZARR_METADATA))
