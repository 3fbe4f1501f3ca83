"""Compiler of an Icechunk repository: selects the snapshot that a branch, tag or id names, and writes its index."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote

from zarrfs.concurrency.tasks import for_each
from zarrfs.config.options import Options
from zarrfs.config.redaction import split_chain, without_secrets
from zarrfs.errors import AccessDenied, SourceError, TargetMissing
from zarrfs.icechunk import files
from zarrfs.icechunk.flatbuffers import DamagedBuffer
from zarrfs.icechunk.targets import target
from zarrfs.store.api import key_rule
from zarrfs.store.indexfile import IndexWriter

T = TypeVar("T")

_AT_ONCE = 8  # manifests fetched at the same time
_END_MAX = 2**63 - 1
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
REF_NAMES = ("branch", "tag", "snapshot")
# characters, besides letters and digits, that the Rust crate object_store does not percent-encode
_PLAIN = " !$&'()+,-.:;=@_"

Fetch = Callable[[str], Awaitable[bytes]]  # returns a file by its path in the repository, or raises TargetMissing


class Selected(NamedTuple):
    """The selected snapshot, and the bytes of its file."""

    snapshot: files.Snapshot
    content: bytes
    ref: dict[str, str]  # {"branch": NAME}, {"tag": NAME} or {}

    def about(self) -> dict[str, str]:
        """Return the fields that `zarrfs info` shows."""
        from datetime import UTC, datetime

        when = datetime.fromtimestamp(self.snapshot.flushed_at / 1e6, UTC).isoformat(timespec="seconds")
        shown = {"snapshot": self.snapshot.ident, "message": self.snapshot.message, "time": when}
        return self.ref | shown


async def select(source: str, options: Options, fetch: Fetch, repo: bytes | None) -> Selected:
    """Return the snapshot that the options name; without such an option, that of the branch main.

    `repo` is the content of the file `repo`, which format 2 and later have. Raise SourceError if the options name more
    than one, if there is no such branch, tag or snapshot, or if a file is damaged or of a format that is too new.
    """
    given = {name: value for name in REF_NAMES if (value := getattr(options, name)) is not None}
    if len(given) > 1:
        raise SourceError(source, f"options {' and '.join(given)} exclude each other")
    kind, name = next(iter(given.items()), ("branch", "main"))
    if kind == "snapshot" and not files.ID.fullmatch(name):
        raise SourceError(source, f"snapshot={name}: an id has 20 characters, as 1CECHNKREP0F1RSTCMT0")
    known: files.Repository | None = None
    if repo is not None:
        known = _parsed(source, "repo", lambda: files.repository(_payload(repo, files.REPOSITORY, options)))
    ident = name
    if known is not None:
        refs = known.branches if kind == "branch" else known.tags
        if kind == "snapshot" and name not in known.snapshots:
            raise SourceError(source, f"no snapshot {name}: unknown, or expired")
        if kind != "snapshot":
            if name not in refs:
                raise SourceError(source, f"no {kind} {name!r} (there are: {_listed(refs)})")
            ident = refs[name]
    elif kind != "snapshot":
        ident = await _ref(source, kind, name, fetch)
    path = f"snapshots/{ident}"
    try:
        content = await fetch(path)
    except TargetMissing:
        what = f"no snapshot {ident}: unknown, or expired"
        raise SourceError(source, what if kind == "snapshot" else f"{kind} {name!r}: {what}") from None
    found = _parsed(
        source, path,
        lambda: files.snapshot(_payload(content, files.SNAPSHOT, options), options.document_limit),
    )  # fmt: skip
    if found.ident != ident:
        raise SourceError(source, f"damaged: is snapshot {found.ident}", path)
    return Selected(found, content, {} if kind == "snapshot" else {kind: name})


async def _ref(source: str, kind: str, name: str, fetch: Fetch) -> str:
    """Return the id of the snapshot that a branch or tag of format 1 names."""
    if "/" in name or "\0" in name:
        raise SourceError(source, f"no {kind} {name!r}: no name of one has a '/' in it")
    try:
        path, content = await _fetch_ref(kind, name, fetch)
        if kind == "tag":
            try:
                await fetch(f"{path}.deleted")
            except TargetMissing:
                pass
            else:
                raise SourceError(source, f"no tag {name!r}: it was deleted")
    except TargetMissing:
        raise SourceError(source, f"no {kind} {name!r}") from None
    try:
        ident = json.loads(content)["snapshot"]
    except (ValueError, KeyError, TypeError):
        ident = None
    if not isinstance(ident, str) or not files.ID.fullmatch(ident):
        raise SourceError(source, "damaged: names no snapshot", path)
    return ident


async def _fetch_ref(kind: str, name: str, fetch: Fetch) -> tuple[str, bytes]:
    """Return (path, content) of the file of a branch or tag. Most storages percent-encode its name, S3 does not."""
    encoded = quote(name, safe=_PLAIN).replace("~", "%7E")
    path, other = (f"refs/{kind}.{written}/ref.json" for written in (encoded, name))
    try:
        return path, await fetch(path)
    except (TargetMissing, AccessDenied):
        if path == other:
            raise
    return other, await fetch(other)


async def compile_snapshot(
    source: str, selected: Selected, options: Options, fetch: Fetch, writer: IndexWriter
) -> None:
    """Write all metadata documents and chunk references of a snapshot to an index.

    Raise SourceError if the repository is damaged or incomplete.
    """
    nodes = selected.snapshot.nodes
    wanted: dict[bytes, dict[bytes, list[tuple[files.SnapshotNode, files.Extents]]]] = {}
    mtime_ns = selected.snapshot.flushed_at * 1000
    for node in nodes:
        key = f"{node.path.strip('/')}/zarr.json".lstrip("/")
        if (rule := key_rule(key)) is not None or not node.path.startswith("/"):
            raise SourceError(source, f"a node whose path has {rule or 'no /'}", repr(node.path))
        writer.inline(key, node.document, mtime_ns=mtime_ns)
        for ident, extents in node.manifests:
            wanted.setdefault(ident, {}).setdefault(node.ident, []).append((node, extents))
    if not nodes:  # a repository without a commit
        writer.directory("")
    chunks = _Chunks(source, options, writer)

    async def one(ident: bytes) -> None:
        path = f"manifests/{files.name_of(ident)}"
        try:
            content = await fetch(path)
        except TargetMissing:
            raise SourceError(source, "the repository lacks this file, which the snapshot needs", path) from None
        _parsed(source, path, lambda: chunks.add(_payload(content, files.MANIFEST, options), wanted[ident]))

    idents = list(wanted)
    for start in range(0, len(idents), _AT_ONCE):
        await for_each(one, idents[start : start + _AT_ONCE])
    if clash := writer.conflicts():
        raise SourceError(source, "is a file and a directory", clash[0])


class _Chunks:
    """A writer of the chunks in manifests to an index."""

    def __init__(self, source: str, options: Options, writer: IndexWriter) -> None:
        self._source, self._writer = source, writer
        self._left = options.document_limit  # bytes of inline chunks and URLs; a manifest may repeat the same ones

    def add(self, buffer: bytes, wanted: dict[bytes, list[tuple[files.SnapshotNode, files.Extents]]]) -> None:
        """Add the chunks of one manifest that belong to the `wanted` arrays (by id) and are within the extents.

        Raise DamagedBuffer.
        """
        for ident, references in files.manifest(buffer):
            places = wanted.get(ident, [])  # more than one if an array refers to this manifest for several extents
            for (node, extents), copy in zip(places, itertools.tee(references, len(places)), strict=True):
                self._array(node, extents, copy)

    def _array(
        self, node: files.SnapshotNode, extents: files.Extents, references: Iterable[files.ChunkReference]
    ) -> None:  # fmt: skip
        writer = self._writer
        prefix = f"{node.path.strip('/')}/c".lstrip("/")
        for index, inline, chunk, url, tag, changed, offset, length in references:
            if len(index) != node.rank:
                raise DamagedBuffer(f"damaged: a chunk of {node.path} with {len(index)} coordinates")
            if extents and not all(low <= at < high for at, (low, high) in zip(index, extents, strict=False)):
                continue
            key = "/".join((prefix, *map(str, index)))
            if inline is not None:
                self._spend(len(inline))
                writer.inline(key, inline)
                continue
            if offset + length > _END_MAX:
                writer.broken(key, "offset + length is over 2^63 - 1")
                continue
            try:
                if chunk is not None:
                    place = f"chunks/{files.name_of(chunk)}"
                else:
                    self._spend(len(url or "") + len(tag or ""))
                    place = target(virtual_url(url or ""), tag and tag.replace("\n", " "), changed)
            except BadLocation as exc:
                writer.broken(key, str(exc))
            else:
                writer.range(key, place, offset, length)

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise DamagedBuffer("more inline chunks and URLs than the limit allows")


class BadLocation(Exception):
    """The reason why the location of a chunk cannot be read; only its reader gets an error."""


def virtual_url(location: str) -> str:
    """Return the URL or path of a virtual chunk's file. `location` is a URL.

    The percent-encoded path of a file: URL, or key in a bucket, is decoded. A file: URL stays encoded if the index
    could not hold the decoded path: bytes that are not UTF-8, or a line break, which would end the URL of a target.
    URLs of other protocols stay encoded, too, and a "::", which would make the URL a chain, is encoded in them. Raise
    BadLocation for a location that cannot be a URL of the index.
    """
    scheme, mark, rest = location.partition("://")
    scheme = scheme.lower()
    if not mark or "\n" in location or "\0" in location:
        raise BadLocation(f"its location {location[:80]!r} is not a URL")
    if scheme == "vcc":
        raise BadLocation("it is relative to a virtual chunk container, which zarrfs does not read")
    if scheme == "file":
        encoded = "/" + re.split("[?#]", rest)[0].partition("/")[2]
        path = _decoded(encoded)
        return f"file://{_without_chain(encoded)}" if path is None else path
    host, slash, key = rest.partition("/")
    if scheme in _BUCKETS:
        decoded = _decoded(re.split("[?#]", key)[0])
        url = None if decoded is None or "::" in decoded else f"{scheme}://{host}{slash}{decoded}"
    else:
        url = f"{scheme}://{host}{slash}{_without_chain(key)}"
    if url is None or len(split_chain(url)) > 1:
        shown = without_secrets(location)
        raise BadLocation(f'{shown}: its key is not UTF-8, or has a line break or "::": give the file another name')
    return url


def _without_chain(encoded: str) -> str:
    return encoded.replace("::", "%3A%3A")


def _decoded(path: str) -> str | None:
    try:
        found = unquote(path, errors="strict")
    except UnicodeDecodeError:
        return None
    return None if "\n" in found else found


def _payload(data: bytes, kind: int, options: Options) -> bytes:
    return files.payload(data, kind, options.document_limit)


def _parsed(source: str, path: str, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except DamagedBuffer as exc:
        raise SourceError(source, str(exc), path) from exc


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "") if found else "none"
