"""Compiler of file archives to an index: lists, dictionaries, and jobspecs that contain an archive.

Sources: RFC 37 (file archive format), RFC 14 (attributes.system.files of a jobspec), RFC 10 (blobrefs). Where
the RFC leaves a choice, docs/archives.md decides: an entry that breaks a rule is listed and cannot be read, one whose
path cannot be a path is left out, and harmless oddities are ignored with one warning of each kind.
"""

from __future__ import annotations

import base64
import json
import stat
from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

from zarrfs.archives.blobrefs import MAX_SIZE, PATH_MAX, canonical, sized
from zarrfs.archives.source_kinds import NO_BLOBS, check_sources
from zarrfs.documents.compilation import Compilation
from zarrfs.documents.json_document import JsonDocument
from zarrfs.references.keys import ZARR_METADATA
from zarrfs.store.api import KINDS, Kind, name_rule
from zarrfs.store.indexfile import Region, int64

_DIRECTORY = frozenset(("path", "mode", "mtime", "ctime"))  # the keys of an entry
_FIELDS = {Kind.DIRECTORY: _DIRECTORY, Kind.SYMLINK: _DIRECTORY | {"data"},
           Kind.FILE: _DIRECTORY | {"data", "size", "encoding"}}  # fmt: skip


def detect(document: Any) -> bool:
    """Return whether a document, or the head of one, is a file archive rather than a reference set."""
    if isinstance(document, list):
        return True
    if not isinstance(document, dict) or not document:
        return False
    if _system(document) is not None:
        return True
    # "refs" and "version", the keys of a reference set, may also be names of files: then each is an entry with a mode
    if any(name in document and not _is_entry(document[name]) for name in ("refs", "version")):
        return False
    # beside references, an object may be inline metadata with an attribute "mode"
    inline = () if all(isinstance(value, dict) for value in document.values()) else ZARR_METADATA
    return any(_is_entry(value) and not name.endswith(inline) for name, value in document.items())


def compile_document(document: JsonDocument, compilation: Compilation) -> None:
    """Compile an archive into `compilation.writer`.

    Raise SourceError for what is not an archive or not a tree, or UsageError for an unusable -o blobs=.
    """
    check_sources(compilation.options.blobs)
    archive = _Archive(compilation)
    files = _files(document.whole(), compilation)
    if isinstance(files, list):
        for index, fields in enumerate(files):
            path = fields.get("path") if isinstance(fields, dict) else None
            if isinstance(path, str):
                archive.add(path, fields, path or f"[{index}]", listed=True)
            else:
                compilation.skip(f"[{index}]", "not an object with a path that is a string")
    else:
        for path, fields in files.items():
            archive.add(path, fields, path or '""', listed=False)
    archive.check_parents()
    archive.write()


def _is_entry(value: Any) -> bool:
    mode = value.get("mode") if isinstance(value, dict) else None
    return type(mode) is int and 0 <= mode <= 0o177777 and stat.S_IFMT(mode) != 0


def _system(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return attributes.system of a jobspec: `document`, or its value "jobspec", as in the info of a job shell.

    Return {} for a jobspec without it, None if there is no jobspec.
    """
    inner = document.get("jobspec")
    if isinstance(inner, dict) and not _is_entry(inner) and "attributes" in inner:
        document = inner
    attributes = document.get("attributes")
    if not isinstance(attributes, dict) or _is_entry(attributes):
        return None
    system = attributes.get("system")
    found: dict[str, Any] = system if isinstance(system, dict) else {}
    return found if "files" in found or {"resources", "tasks"} <= document.keys() else None


def _files(document: Any, compilation: Compilation) -> list[Any] | dict[str, Any]:
    """Return the list or dictionary of entries."""
    if isinstance(document, dict) and (system := _system(document)) is not None:
        if "files" not in system:
            raise compilation.refuse("a jobspec without files (attributes.system.files)")
        document = system["files"]
    if isinstance(document, list | dict):
        return document
    raise compilation.refuse("an archive is a list or an object of entries")


class _BadEntry(Exception):
    """An entry that breaks the rule in the message."""


class _ArchiveEntry(NamedTuple):
    """An entry whose path and type are checked, but not its content."""

    shown: str
    kind: Kind
    fields: dict[str, Any]
    fault: str  # the rule that it breaks; it is then a file that cannot be read


class _Archive:
    """The state of compiling one archive."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        self._entries: dict[str, _ArchiveEntry] = {}
        self._oddities: dict[str, tuple[int, str]] = {}  # by warning: how often, and the first entry

    def add(self, path: str, fields: Any, shown: str, listed: bool) -> None:
        """Add an entry, or leave it out if its path cannot be one."""
        shown = _shown(shown)
        try:
            key = _key(path)
        except _BadEntry as exc:
            self._compilation.skip(shown, str(exc))
            return
        kind, fault = Kind.FILE, ""
        try:
            kind = _kind(fields, path, listed)
        except _BadEntry as exc:
            fault = str(exc)
        if not key and kind is not Kind.DIRECTORY:
            self._compilation.skip(shown, fault or "the root is a directory, not a file or symlink")
            return
        if key in self._entries:
            self._odd("a path named more than once: the last one wins", shown)
        self._entries[key] = _ArchiveEntry(shown, kind, fields, fault)

    def check_parents(self) -> None:
        """Refuse files and symlinks that have entries below them."""
        keys = sorted(self._entries)
        for key, entry in self._entries.items():
            at = bisect_left(keys, f"{key}/")
            if entry.kind is not Kind.DIRECTORY and at < len(keys) and keys[at].startswith(f"{key}/"):
                what = entry.fault or ("a symlink" if entry.kind is Kind.SYMLINK else "a file")
                raise self._compilation.refuse(f"{what}, and the parent of {_shown(keys[at])}", entry.shown)

    def write(self) -> None:
        """Write all entries to the index, and warn once of each kind of oddity, and of blobs without a place."""
        with_blobs = 0
        for key, entry in self._entries.items():
            try:
                with_blobs += self._write(key, entry)
            except _BadEntry as exc:
                self._compilation.broken(key, entry.shown, str(exc))
        for what, (count, first) in self._oddities.items():
            self._compilation.warn(f"{first}{f' and {count - 1} more' if count > 1 else ''}: {what}")
        if with_blobs and not self._compilation.options.blobs:
            self._compilation.warn(f"{'1 file needs' if with_blobs == 1 else f'{with_blobs} files need'} {NO_BLOBS}")

    def _write(self, key: str, entry: _ArchiveEntry) -> bool:
        """Write an entry; return whether it needs blobs."""
        if entry.fault:
            raise _BadEntry(entry.fault)
        fields, writer = entry.fields, self._compilation.writer
        mode, mtime_ns = stat.S_IMODE(fields["mode"]), self._mtime(entry)
        if unknown := fields.keys() - _FIELDS[entry.kind]:
            self._odd(f"keys that are not those of a {entry.kind.name.lower()}: ignored",
                      f"{entry.shown} ({_shown(min(unknown))})")  # fmt: skip
        if entry.kind is Kind.DIRECTORY:
            writer.directory(key, mode, mtime_ns)
        elif entry.kind is Kind.SYMLINK:
            writer.symlink(key, _target(fields.get("data")), mtime_ns)
        elif "data" not in fields:
            if "encoding" in fields:
                raise _BadEntry("encoding without data")
            writer.regions(key, _size(fields, "neither size nor data"), (), mode, mtime_ns)
        elif fields.get("encoding") == "blobvec":
            size = _size(fields, "a blobvec without size")
            regions = _regions(fields["data"], size)
            writer.regions(key, size, regions, mode, mtime_ns)
            return bool(regions)
        else:
            data = _content(fields)
            size = _size(fields) if "size" in fields else len(data)
            if size != len(data):
                raise _BadEntry(f"size {size}, but its data have {len(data)} bytes")
            writer.inline(key, data, mode, mtime_ns)
        return False

    def _mtime(self, entry: _ArchiveEntry) -> int | None:
        mtime = entry.fields.get("mtime")
        if type(mtime) is int and int64(mtime * 10**9):
            return mtime * 10**9
        if "mtime" in entry.fields:
            self._odd("mtime that is not an integer, or does not fit 64 bits of nanoseconds: ignored", entry.shown)
        return None

    def _odd(self, what: str, where: str) -> None:
        count, first = self._oddities.get(what, (0, where))
        self._oddities[what] = (count + 1, first)


# Each of these functions raises _BadEntry.


def _key(path: str) -> str:
    """Check a path and return its key, without "." and repeated slashes."""
    if not path:
        raise _BadEntry("an empty path")
    if path[0] == "/":
        raise _BadEntry("an absolute path")
    _check_text(path, "the path")
    names = [part for part in path.split("/") if part not in ("", ".")]
    if rule := next(filter(None, map(name_rule, names)), None):
        raise _BadEntry(f"a path with {rule}")
    return "/".join(names)


def _kind(fields: Any, path: str, listed: bool) -> Kind:
    if not isinstance(fields, dict):
        raise _BadEntry("not an object")
    if "path" in fields and not listed:
        raise _BadEntry("a path inside an entry of a dictionary archive")
    mode = fields.get("mode")
    form = stat.S_IFMT(mode) if type(mode) is int and 0 <= mode <= 0o177777 else None
    if form not in KINDS:
        shown = f"mode {_shown(oct(mode) if type(mode) is int else mode)}" if "mode" in fields else "no mode"
        raise _BadEntry(f"{shown}, where that of a file, a directory or a symlink is expected")
    if form != stat.S_IFDIR and path.endswith(("/", "/.")):
        raise _BadEntry("a file or symlink whose path has a trailing slash")
    return KINDS[form]


def _size(fields: dict[str, Any], missing: str = "") -> int:
    if "size" not in fields:
        raise _BadEntry(missing)
    size = fields["size"]
    if type(size) is not int or not 0 <= size <= MAX_SIZE:
        raise _BadEntry(f"size {_shown(size)} is not an integer from 0 to {MAX_SIZE}")
    return size


def _target(data: Any) -> str:
    if not isinstance(data, str) or not data:
        raise _BadEntry("a symlink whose data is not its target")
    _check_text(data, "the target")
    return data


def _check_text(text: str, what: str) -> None:
    """Refuse text that the kernel would not accept as a path or as the target of a symlink."""
    if "\0" in text:
        raise _BadEntry(f"{what} has a NUL character")
    if len(_utf8(text, what)) > PATH_MAX:
        raise _BadEntry(f"{what} is over {PATH_MAX} bytes (ENAMETOOLONG)")


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise _BadEntry(f"{what} has a lone surrogate at character {exc.start}") from None


def _content(fields: dict[str, Any]) -> bytes:
    """Return the content of a file that is in the entry itself."""
    data = fields["data"]
    if "encoding" not in fields:
        if data == "" and fields.get("size") == 0:  # an empty file in a jobspec
            return b""
        try:  # JSON content: compact, with keys in the order of the document, without ASCII escapes
            data = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except RecursionError:
            raise _BadEntry("JSON content nested too deeply") from None
        except ValueError:
            raise _BadEntry("JSON content with NaN, or a number larger than a double can be") from None
        return _utf8(data, "JSON content")
    encoding = fields["encoding"]
    if encoding not in ("utf-8", "base64"):
        raise _BadEntry(f"encoding {_shown(encoding)} is not utf-8, base64 or blobvec")
    if not isinstance(data, str):
        raise _BadEntry(f"{encoding} data is not a string")
    return _utf8(data, "data") if encoding == "utf-8" else _base64(data)


def _base64(data: str) -> bytes:
    """Decode base64. Refuse everything that is malformed, except missing padding."""
    bare = data.rstrip("=")
    padding = -len(bare) % 4
    if len(data) - len(bare) > padding:  # b64decode() of Python 3.11 would ignore it
        raise _BadEntry("malformed base64: excess padding")
    try:
        return base64.b64decode(bare + "=" * padding, validate=True)
    except ValueError as exc:
        raise _BadEntry(f"malformed base64: {str(exc).lower()}") from None


def _regions(blobvec: Any, size: int) -> list[Region]:
    """Check the regions of a blobvec and return those that are not empty, in order."""
    if not isinstance(blobvec, list):
        raise _BadEntry("a blobvec that is not a list")
    regions = []
    for index, region in enumerate(blobvec):
        if not isinstance(region, list) or list(map(type, region)) != [int, int, str]:
            raise _BadEntry(f"region {index} is not [offset, size, blobref]")
        start, length, blobref = region
        if not 0 <= start <= start + length <= size:
            raise _BadEntry(f"region {index} is not within size {size}")
        if (known := canonical(blobref)) is None:
            raise _BadEntry(f"region {index}: {_shown(blobref)} is not a blobref")
        if length:
            regions.append(Region(start, length, sized(known, length)))
    regions.sort(key=lambda region: region.start)
    for one, two in pairwise(regions):
        if one.start + one.length > two.start:
            raise _BadEntry(f"regions overlap at byte {two.start}")
    return regions


def _shown(value: Any) -> str:
    """Format a value for a message: one line of at most 203 characters."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 200 else text[:200] + "..."
