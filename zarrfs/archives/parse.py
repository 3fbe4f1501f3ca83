"""Compiler of file archives to an index: lists, dictionaries, and jobspecs that contain an archive.

Sources: RFC 37 (file archive format), RFC 14 (attributes.system.files of a jobspec), RFC 10 (blobrefs). Where
the RFC leaves a choice, docs/archives.md decides: an entry that breaks a rule makes the whole archive invalid, and
harmless oddities are ignored with one warning of each kind.
"""

from __future__ import annotations

import binascii
import heapq
import json
import stat
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from zarrfs.archives.blobrefs import canonical, sized
from zarrfs.archives.document_writer import MAX_SIZE, PATH_MAX, SPECIAL_FILES
from zarrfs.archives.source_kinds import NO_BLOBS, check_sources
from zarrfs.documents.compilation import Compilation
from zarrfs.documents.json_document import JsonDocument
from zarrfs.errors import SourceError
from zarrfs.references.keys import ZARR_METADATA
from zarrfs.store.api import KINDS, Kind, name_rule
from zarrfs.store.indexfile import Region, int64

_FIELDS = frozenset(("path", "mode", "mtime", "ctime", "size", "encoding", "data"))
_NOT_ENTRIES = {0: "mode has no type bits", **SPECIAL_FILES}


def detect(document: Any) -> bool:
    """Return whether a document, or the head of one, is a file archive rather than a reference set."""
    if isinstance(document, list):
        return True
    if not isinstance(document, dict) or not document:
        return False
    if _jobspec(document) is not None:
        return True
    # "refs" and "version", the keys of a reference set, may also be names of files: then each is an entry with a mode
    if any(name in document and not _is_entry(document[name]) for name in ("refs", "version")):
        return False
    if all(isinstance(value, dict) for value in document.values()):
        return any(map(_is_entry, document.values()))
    # not all values are objects: an archive with an invalid entry, or a reference set with inline JSON values
    return any(_is_surely_entry(name, value) for name, value in document.items())


def compile_document(document: JsonDocument, compilation: Compilation) -> None:
    """Compile an archive into `compilation.writer`.

    Raise SourceError, which names the entry and the rule that it breaks, or UsageError for an unusable -o blobs=.
    """
    check_sources(compilation.options.blobs)
    archive = _Archive(compilation)
    files = _files(document.whole(), compilation)
    if isinstance(files, list):
        archive.add_list(files)
    else:
        archive.add_dictionary(files)
    archive.check_parents()
    archive.write()
    archive.warn()


def without_overlaps(regions: list[Region]) -> list[Region]:
    """Return regions sorted and without overlaps. Where regions overlap, the last one in the list wins."""
    regions = [region for region in regions if region.length]
    if len(regions) < 2:
        return regions
    stops = [region.start + region.length for region in regions]
    order = sorted(range(len(regions)), key=lambda index: regions[index].start)
    ordered = [regions[index] for index in order]
    if all(one.start + one.length <= two.start for one, two in pairwise(ordered)):
        return ordered
    bounds = sorted({*stops, *(region.start for region in regions)})
    pieces: list[tuple[int, int, int]] = []  # (start, stop, index of the region)
    covering: list[int] = []  # a heap of negated indexes: the latest region is on top
    at = 0
    for low, high in pairwise(bounds):
        while at < len(order) and regions[order[at]].start <= low:
            heapq.heappush(covering, -order[at])
            at += 1
        while covering and stops[-covering[0]] <= low:
            heapq.heappop(covering)
        if not covering:
            continue
        index = -covering[0]
        if pieces and pieces[-1][1:] == (low, index):
            low = pieces.pop()[0]
        pieces.append((low, high, index))
    found = []
    for low, high, index in pieces:
        start, _, url, offset = regions[index]
        found.append(Region(low, high - low, url, offset + low - start))
    return found


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("mode")) is int


def _is_surely_entry(name: str, value: Any) -> bool:
    """Return whether a value is the entry of a file, and not an inline JSON value of a reference set."""
    if not _is_entry(value) or name.endswith(ZARR_METADATA):
        return False
    return 0 <= value["mode"] <= 0o177777 and stat.S_IFMT(value["mode"]) in KINDS


def _jobspec(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the jobspec: `document`, or its value "jobspec", as in the info of a job shell; None if there is none."""
    inner = document.get("jobspec")
    if isinstance(inner, dict) and not _is_entry(inner) and "attributes" in inner:
        document = inner
    attributes = document.get("attributes")
    if not isinstance(attributes, dict) or _is_entry(attributes):
        return None
    system = attributes.get("system")
    if isinstance(system, dict) and "files" in system:
        return document
    return document if {"resources", "tasks"} <= document.keys() else None


def _files(document: Any, compilation: Compilation) -> list[Any] | dict[str, Any]:
    """Return the list or dictionary of entries."""
    if isinstance(document, dict):
        jobspec = _jobspec(document)
        if jobspec is None:
            return document
        system = jobspec["attributes"].get("system")
        if not isinstance(system, dict) or "files" not in system:
            raise compilation.refuse("a jobspec without files (attributes.system.files)")
        document = system["files"]
    if isinstance(document, list | dict):
        return document
    raise compilation.refuse("an archive is a list or an object of entries")


class _ArchiveEntry(NamedTuple):
    """An entry whose path, mode and mtime are checked, but not its content."""

    shown: str
    kind: Kind
    mode: int
    mtime_ns: int | None
    fields: dict[str, Any]


class _Archive:
    """The state of compiling one archive."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        self._writer = compilation.writer
        self._entries: dict[str, _ArchiveEntry] = {}
        self._oddities: dict[str, tuple[int, str]] = {}  # by warning: how often, and the first entry
        self._with_blobs = 0  # files

    # -- entries

    def add_list(self, files: list[Any]) -> None:
        for index, fields in enumerate(files):
            if not isinstance(fields, dict):
                raise self._refuse(f"[{index}]", "not an object")
            path = fields.get("path")
            if not isinstance(path, str):
                rule = "path is not a string" if "path" in fields else "no path"
                raise self._refuse(f"[{index}]", rule)
            self._add(path, fields, path or f"[{index}]")

    def add_dictionary(self, files: dict[str, Any]) -> None:
        for path, fields in files.items():
            if not isinstance(fields, dict):
                raise self._refuse(path, "not an object")
            if "path" in fields:
                raise self._refuse(path, "a path inside an entry of a dictionary archive")
            self._add(path, fields, path or '""')

    def _add(self, path: str, fields: dict[str, Any], shown: str) -> None:
        kind, mode = self._mode(shown, fields)
        key = self._key(path, kind, shown)
        entry = _ArchiveEntry(shown, kind, mode, self._mtime(shown, fields), fields)
        if key in self._entries:
            if self._compilation.options.strict:
                raise self._refuse(shown, "a path named more than once")
            self._odd("a path named more than once: the last one wins", shown)
        self._entries[key] = entry
        if not fields.keys() <= _FIELDS:
            self._odd("unknown keys: ignored", f"{_shown(shown)} ({_shown(min(fields.keys() - _FIELDS))})")

    def _mode(self, path: str, fields: dict[str, Any]) -> tuple[Kind, int]:
        mode = fields.get("mode")
        if type(mode) is not int:
            raise self._refuse(path, "mode is not an integer" if "mode" in fields else "no mode")
        if not 0 <= mode <= 0o177777:
            raise self._refuse(path, f"mode {_shown(mode)} is not that of a file")
        form = stat.S_IFMT(mode)
        kind = KINDS.get(form)
        if kind is None:
            what = _NOT_ENTRIES.get(form, f"an unknown type (mode {mode:o})")
            raise self._refuse(path, f"{what}: neither a file, a directory nor a symlink")
        return kind, stat.S_IMODE(mode)

    def _mtime(self, path: str, fields: dict[str, Any]) -> int | None:
        if "mtime" not in fields:
            return None
        mtime = fields["mtime"]
        if type(mtime) is not int:
            raise self._refuse(path, "mtime is not an integer")
        if not int64(mtime * 10**9):
            raise self._refuse(path, f"mtime {_shown(mtime)} does not fit 64 bits of nanoseconds")
        return mtime * 10**9

    def _key(self, path: str, kind: Kind, shown: str) -> str:
        """Check a path and return it without "." components and repeated slashes."""
        if not path:
            raise self._refuse(shown, "an empty path")
        if path[0] == "/":
            raise self._refuse(shown, "an absolute path")
        self._check_text(shown, path, "the path")
        parts = path.split("/")
        names = [part for part in parts if part not in ("", ".")]
        for name in names:
            rule = name_rule(name)
            if rule:
                raise self._refuse(shown, f"a path with {rule}")
        if kind is not Kind.DIRECTORY:
            what = "a symlink" if kind is Kind.SYMLINK else "a file"
            if not names:
                raise self._refuse(shown, f"the root is a directory, not {what}")
            if parts[-1] != names[-1]:
                raise self._refuse(shown, f"{what} whose path has a trailing slash")
        return "/".join(names)

    def _check_text(self, path: str, text: str, what: str) -> None:
        """Refuse text that the kernel would not accept as a path or as the target of a symlink."""
        if "\0" in text:
            raise self._refuse(path, f"{what} has a NUL character")
        if len(self._utf8(path, text, what)) > PATH_MAX:
            raise self._refuse(path, f"{what} is over {PATH_MAX} bytes (ENAMETOOLONG)")

    def _utf8(self, path: str, text: str, what: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as exc:
            raise self._refuse(path, f"{what} has a lone surrogate at character {exc.start}") from None

    def check_parents(self) -> None:
        """Refuse files and symlinks that have entries below them."""
        keys = sorted(self._entries)
        for key, entry in self._entries.items():
            if entry.kind is Kind.DIRECTORY:
                continue
            prefix = key + "/"
            at = bisect_left(keys, prefix)
            if at < len(keys) and keys[at].startswith(prefix):
                what = "a symlink" if entry.kind is Kind.SYMLINK else "a file"
                raise self._refuse(entry.shown, f"{what} used as the parent of {_shown(keys[at])}")

    # -- contents

    def write(self) -> None:
        """Write all entries to the index."""
        for key, entry in self._entries.items():
            if entry.kind is Kind.FILE:
                self._write_file(key, entry)
            elif entry.kind is Kind.SYMLINK:
                self._write_symlink(key, entry)
            else:
                if not entry.fields.keys().isdisjoint(("data", "size", "encoding")):
                    self._odd("data, size or encoding on a directory: ignored", entry.shown)
                self._writer.directory(key, entry.mode, entry.mtime_ns)

    def _write_symlink(self, key: str, entry: _ArchiveEntry) -> None:
        target = entry.fields.get("data")
        if not isinstance(target, str) or not target:
            raise self._refuse(entry.shown, "a symlink whose data is not its target")
        self._check_text(entry.shown, target, "the target")
        if not entry.fields.keys().isdisjoint(("size", "encoding")):
            self._odd("size or encoding on a symlink: ignored", entry.shown)
        self._writer.symlink(key, target, entry.mtime_ns)

    def _write_file(self, key: str, entry: _ArchiveEntry) -> None:
        fields = entry.fields
        size = self._size(entry)
        if "data" not in fields:
            if "encoding" in fields:
                raise self._refuse(entry.shown, "encoding without data")
            if size is None:
                raise self._refuse(entry.shown, "neither size nor data")
            self._writer.regions(key, size, (), entry.mode, entry.mtime_ns)
        elif fields.get("encoding") == "blobvec":
            if size is None:
                raise self._refuse(entry.shown, "a blobvec without size")
            given = list(self._regions(entry, size))
            regions = without_overlaps(given)
            if {region.url for region in given if region.length} - {region.url for region in regions}:
                self._odd("a region that later ones cover: its blob is not read or checked", entry.shown)
            self._with_blobs += bool(regions)
            self._writer.regions(key, size, regions, entry.mode, entry.mtime_ns)
        else:
            self._write_inline(key, entry, self._content(entry, size), size)

    def _write_inline(self, key: str, entry: _ArchiveEntry, data: bytes, size: int | None) -> None:
        if size is None:
            size = len(data)
        if size < len(data):
            raise self._refuse(entry.shown, f"size {size} is smaller than its data, {len(data)} bytes")
        if size > len(data) and not self._compilation.options.compat:
            raise self._refuse(
                entry.shown, f"size {size} is larger than its data, {len(data)} bytes (-o compat adds zeros)"
            )
        self._writer.inline(key, data, entry.mode, entry.mtime_ns, size)

    def _size(self, entry: _ArchiveEntry) -> int | None:
        if "size" not in entry.fields:
            return None
        size = entry.fields["size"]
        if type(size) is not int:
            raise self._refuse(entry.shown, "size is not an integer")
        if size < 0:
            raise self._refuse(entry.shown, f"a negative size, {_shown(size)}")
        if size > MAX_SIZE:
            raise self._refuse(entry.shown, f"size {_shown(size)} is over {MAX_SIZE}")
        return size

    def _content(self, entry: _ArchiveEntry, size: int | None) -> bytes:
        """Return the content of a file that is in the entry itself."""
        data = entry.fields["data"]
        if "encoding" not in entry.fields:
            if data == "" and size == 0:  # an empty file in a jobspec
                return b""
            return self._json(entry, data)
        encoding = entry.fields["encoding"]
        if encoding not in ("utf-8", "base64"):
            raise self._refuse(entry.shown, f"encoding {_shown(encoding)} is not utf-8, base64 or blobvec")
        if not isinstance(data, str):
            raise self._refuse(entry.shown, f"{encoding} data is not a string")
        return self._utf8(entry.shown, data, "data") if encoding == "utf-8" else self._base64(entry, data)

    def _json(self, entry: _ArchiveEntry, data: Any) -> bytes:
        """Encode JSON content: compact, with keys in the order of the document, without ASCII escapes."""
        try:
            text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except RecursionError:
            raise self._refuse(entry.shown, "JSON content nested too deeply") from None
        except ValueError:
            raise self._refuse(entry.shown, "JSON content with NaN, or a number larger than a double can be") from None
        return self._utf8(entry.shown, text, "JSON content")

    def _base64(self, entry: _ArchiveEntry, data: str) -> bytes:
        """Decode base64. Refuse everything that is malformed, except missing padding."""
        bare = data.rstrip("=")
        padding = -len(bare) % 4
        try:
            if padding == 3 or len(data) - len(bare) > padding:
                raise binascii.Error("wrong length or padding")
            return binascii.a2b_base64(bare + "=" * padding, strict_mode=True)
        except ValueError as exc:  # the base class of binascii.Error
            raise self._refuse(entry.shown, f"malformed base64: {str(exc).lower()}") from None

    def _regions(self, entry: _ArchiveEntry, size: int) -> Iterator[Region]:
        """Check and yield the regions of a blobvec, in the order of the document."""
        blobvec = entry.fields["data"]
        if not isinstance(blobvec, list):
            raise self._refuse(entry.shown, "a blobvec that is not a list")
        for index, region in enumerate(blobvec):
            if not isinstance(region, list) or len(region) != 3:
                raise self._refuse(entry.shown, f"region {index} is not [offset, size, blobref]")
            start, length, blobref = region
            if type(start) is not int or type(length) is not int:
                raise self._refuse(entry.shown, f"region {index}: offset and size are integers")
            if start < 0 or length < 0:
                raise self._refuse(entry.shown, f"region {index}: a negative offset or size")
            if length > size - start:
                raise self._refuse(entry.shown, f"region {index} ends past size {size}")
            known = canonical(blobref) if isinstance(blobref, str) else None
            if known is None:
                raise self._refuse(entry.shown, f"region {index}: {_shown(blobref)} is not a blobref")
            yield Region(start, length, sized(known, length))

    # -- errors and warnings

    def _refuse(self, path: str, rule: str) -> SourceError:
        return self._compilation.refuse(rule, _shown(path))

    def _odd(self, what: str, where: str) -> None:
        count, first = self._oddities.get(what, (0, where))
        self._oddities[what] = (count + 1, first)

    def warn(self) -> None:
        """Emit one warning of each kind."""
        for what, (count, first) in self._oddities.items():
            more = f" and {count - 1} more" if count > 1 else ""
            self._compilation.warn(f"{_shown(first)}{more}: {what}")
        if self._with_blobs and not self._compilation.options.blobs:
            what = "1 file needs" if self._with_blobs == 1 else f"{self._with_blobs} files need"
            self._compilation.warn(f"{what} {NO_BLOBS}")


def _shown(value: Any) -> str:
    """Format a value for a message: one line of at most 203 characters."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 200 else text[:200] + "..."
