"""Reference sets, versions 0 and 1, compiled to an index.

Source: the fsspec reference set specification; where it is silent, docs/reference-sets.md says what we do.
"""

from __future__ import annotations

import binascii
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from zarrfs.sources.compilation import Compilation
from zarrfs.sources.gen import RENDERED_MAX, Gen, TemplateError, json_type, read_gen
from zarrfs.store.api import NAME_MAX, key_rule

if TYPE_CHECKING:
    from zarrfs.sources.templates import Templates

KEY_MAX = 4095  # bytes: Linux takes no longer path
DEPTH_MAX = 100  # directories of a key: each costs a row and a path, however short its own name
OFFSET_MAX = 2**63 - 1  # of an offset, and of the end of a range: what a file can have

_MEMBERS = {"version", "templates", "gen", "refs"}
_ZARR_METADATA = (".zgroup", ".zarray", ".zattrs", ".zmetadata", "zarr.json")
_BLANKS = b" \t\r\n\v\f"
_NUMBER = re.compile(r"\s*(-?[0-9]+)\s*", re.ASCII)
_SHOWN = 400  # characters of a key in a message
_json_text = json.JSONEncoder(separators=(",", ":")).encode

Entry = tuple[str, str | list[Any] | None, bytes | None]  # key, value, bytes of an inline value


class _Bad(Exception):
    """A key that is left out, and the rule that it or its value breaks."""


def detect(document: object) -> bool:
    """Whether parsed JSON looks like a reference set. Version 0 has no mark: one reference in it will do."""
    if not isinstance(document, dict):
        return False
    if "version" in document:
        return not _MEMBERS.isdisjoint(document.keys() - {"version"}) or document == {"version": 1}
    if not document or "refs" in document:
        return True
    return any(_like_reference(key, value) for key, value in document.items())


def compile_document(document: object, compilation: Compilation) -> None:
    """Compile a reference set into `compilation.writer`.

    Raises SourceError for what no key can be blamed for (or, with -o strict, for any bad key).
    """
    writer = compilation.writer
    for key, value, data in _entries(document, compilation):
        if data is not None:
            writer.inline(key, data)
        elif value is None:
            writer.discard(key)
        elif len(value) == 3:
            writer.range(key, *value)
        else:
            writer.whole(key, value[0])
    for key in writer.conflicts():
        compilation.skip(_shown(key), "a file and a directory: the directory wins")


def expand(document: object, compilation: Compilation) -> Iterator[tuple[str, str | list[Any] | None]]:
    """The (key, value) pairs of the equivalent version 0 set, one at a time; bad ones go to compilation.skip.

    A value is a text, [url] or [url, offset, length]. A key that comes again replaces the earlier one; None
    stands for a generated value that is bad, and removes it. Raises SourceError as compile_document does.
    """
    for key, value, _data in _entries(document, compilation):
        yield key, value


def _entries(document: object, compilation: Compilation) -> Iterator[Entry]:
    if not isinstance(document, dict):
        raise compilation.refuse(f"a reference set is a JSON object, not {json_type(document)}")
    if "version" in document:
        try:
            yield from _version_1(document, compilation)
        except TemplateError as exc:
            raise compilation.refuse(exc.rule, exc.entry and _shown(exc.entry)) from None
        return
    if "refs" in document:
        compilation.warn(
            'refs: without "version" this is a set of version 0, and refs a file in it; '
            'a set of version 1 says "version": 1'
        )
    yield from _refs(document, _Checks(None), compilation)


def _version_1(document: dict[str, Any], compilation: Compilation) -> Iterator[Entry]:
    version = document["version"]
    if type(version) is not int or version != 1:
        raise compilation.refuse(
            f"must be the number 1, not {json_type(version)} (version 0 has no such member)", "version"
        )
    for name in document:
        if name not in _MEMBERS:
            compilation.warn(f"{_shown(name)}: not a member of a reference set of version 1: ignored")
    sources, refs = document.get("templates", {}), document.get("refs", {})
    for name, member in ("templates", sources), ("refs", refs):
        if not isinstance(member, dict):
            raise compilation.refuse(f"expected an object, not {json_type(member)}", name)
    for name, source in sources.items():
        if not isinstance(source, str):
            raise TemplateError(f"expected a string, not {json_type(source)}", f"templates.{name}")
    gens = read_gen(document.get("gen", []), sources.keys(), compilation.options.gen_limit)

    @functools.cache
    def templates() -> Templates:
        from zarrfs.sources.templates import Templates  # most sets use none, and need no jinja2

        return Templates(sources)

    checks = _Checks(templates)
    yield from _refs(refs, checks, compilation)
    for gen in gens:
        yield from _generated(gen, templates(), checks, compilation)


def _refs(refs: dict[str, Any], checks: _Checks, compilation: Compilation) -> Iterator[Entry]:
    """The entries of a version 0 set, or of the member refs."""
    for key, value in refs.items():
        try:
            checks.key(key)
            if type(value) is list:
                entry: Entry = key, checks.reference(value), None
            elif type(value) is str:
                entry = key, value, _inline(value)
            else:
                text = _object_text(value)
                entry = key, text, text.encode()
        except _Bad as bad:
            compilation.skip(_shown(key), str(bad))
        except TemplateError as exc:
            raise compilation.refuse(f"url {value[0]!r:.80}: {exc.rule}", _shown(key)) from None
        else:
            yield entry


def _generated(
    gen: Gen, templates: Templates, checks: _Checks, compilation: Compilation
) -> Iterator[Entry]:
    """The entries of one item of gen."""
    for key, url, *numbers in templates.rows(gen):
        try:
            checks.key(key)
        except _Bad as bad:
            compilation.skip(_shown(key), f"{bad} ({gen.where})")
            continue
        value: list[Any] | None
        try:
            value = [checks.url(url), *map(_number, numbers)]
            if numbers:
                checks.range(value[1], value[2])
        except _Bad as bad:
            compilation.skip(_shown(key), f"{bad} ({gen.where})")
            value = None
        yield key, value, None


def _inline(text: str) -> bytes:
    """The bytes that an inline value stands for."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise _Bad("text with a lone surrogate, which UTF-8 cannot hold") from None
    if not data.startswith(b"base64:"):
        return data
    try:
        return binascii.a2b_base64(data[7:].translate(None, _BLANKS), strict_mode=True)
    except binascii.Error as exc:
        raise _Bad(f"malformed base64: {str(exc).lower()}") from None


class _Checks:
    """What keys and references must be; remembers parents and URLs, which thousands of keys share."""

    def __init__(self, templates: Callable[[], Templates] | None) -> None:
        self._templates = templates
        self._parents = {""}
        self._urls: dict[str, str] = {}  # as written -> rendered
        self._last: str | None = None

    def key(self, key: str) -> None:
        """Raises _Bad."""
        parent, _, name = key.rpartition("/")
        if (
            parent in self._parents
            and key.isascii()
            and 0 < len(name) <= NAME_MAX
            and name not in (".", "..")
            and "\0" not in name
            and (parent or key[0] != "/")
        ):
            return
        try:
            size = len(key.encode())
        except UnicodeEncodeError:
            raise _Bad("a key with a lone surrogate, which UTF-8 cannot hold") from None
        rule = key_rule(key)
        if size > KEY_MAX:
            rule = f"a key over {KEY_MAX} bytes"
        elif key.count("/") > DEPTH_MAX:
            rule = f"over {DEPTH_MAX} directories deep"
        if rule:
            raise _Bad(f"not a key: {rule}")
        if len(parent) < KEY_MAX - NAME_MAX:
            self._parents.add(parent)

    def reference(self, value: list[Any]) -> list[Any]:
        """[url] or [url, offset, length], with the URL rendered. Raises _Bad, or TemplateError."""
        if len(value) == 3:
            self.range(value[1], value[2])
        elif len(value) != 1:
            raise _Bad(f"expected [url] or [url, offset, length], not an array of {len(value)}")
        raw = value[0]
        if type(raw) is not str:
            raise _Bad(f"url: expected a string, not {json_type(raw)}")
        url = self._urls.get(raw)
        if url is None:
            url = raw
            if self._templates is not None and "{{" in raw:
                url = self._templates().text(raw)
            self._urls[raw] = self._url(url)
        return value if url is raw else [url, *value[1:]]

    def url(self, url: str) -> str:
        """A URL made by gen. Raises _Bad."""
        if url != self._last:  # neighbours mostly share it
            self._last = self._url(url)
        return url

    @staticmethod
    def range(offset: Any, length: Any) -> None:
        """Raises _Bad unless both are whole numbers from 0 on whose sum a file can have."""
        if (
            type(offset) is int
            and type(length) is int
            and offset >= 0
            and length >= 0
            and offset + length <= OFFSET_MAX
        ):
            return
        for name, number in ("offset", offset), ("length", length):
            if type(number) is not int:
                raise _Bad(f"{name}: expected a whole number, not {json_type(number)}")
            if number < 0:
                raise _Bad(f"{name}: negative")
        raise _Bad("offset + length is over 2^63 - 1")

    @staticmethod
    def _url(url: str) -> str:
        if not url:
            raise _Bad("url: empty")
        if "\0" in url:
            raise _Bad("url: a NUL character")
        if len(url) > RENDERED_MAX:
            raise _Bad(f"url: over {RENDERED_MAX} characters")
        try:
            url.encode()
        except UnicodeEncodeError:
            raise _Bad("url: a lone surrogate, which UTF-8 cannot hold") from None
        return url


def _number(text: str) -> int:
    """A rendered offset or length."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise _Bad(f"expected a whole number, not {text!r:.40}")
    if len(match[1]) > 40:  # leading zeros aside, far beyond any file
        raise _Bad("offset + length is over 2^63 - 1")
    return int(match[1])


def _object_text(value: object) -> str:
    """The text of an inline JSON object: compact, in the order of the document, in ASCII."""
    if not isinstance(value, dict):
        raise _Bad(f"expected a string, an object or an array, not {json_type(value)}")
    try:
        return _json_text(value)
    except RecursionError:
        raise _Bad("an object nested too deeply") from None


def _like_reference(key: str, value: object) -> bool:
    if isinstance(value, list):
        return len(value) in (1, 3) and isinstance(value[0], str)
    return isinstance(value, str) or (isinstance(value, dict) and key.endswith(_ZARR_METADATA))


def _shown(key: str) -> str:
    """`key` as a message shows it: one printable line of bounded length."""
    if key.isprintable() and len(key) <= _SHOWN:
        return key
    cut = key if len(key) <= _SHOWN else key[:_SHOWN] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
