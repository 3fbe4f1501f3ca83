"""Fetch documents at URLs, without holding large ones in memory, and distinguish them from stores."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import split_chain, without_secrets
from zarrfs.documents.compressed import is_compressed
from zarrfs.documents.data_files import why_no_source
from zarrfs.errors import AccessDenied, ReadError, SourceError, TargetChanged, TargetMissing
from zarrfs.net.responses import Entry, Fetched, System, too_large
from zarrfs.net.versions import differs
from zarrfs.system.memory import memory_limit

if TYPE_CHECKING:  # importing these takes longer than everything else here
    from zarrfs.store.remotefiles import RemoteFiles

T = TypeVar("T")
Known = Callable[[str], bool]

_PEEK = 4096  # bytes needed to recognise a document
_SETTLED_NS = 3_000_000_000  # as in documents.document, but for servers with times in whole seconds
_STEP = 32 << 20  # bytes of one request; a smaller document takes one request
_MEMORY = 64 << 20  # bytes cached and in flight while a document is fetched


class FetchedDocument(NamedTuple):
    """A document at a URL."""

    data: bytes | int | None  # bytes, or the descriptor of an unlinked file; None: not fetched, as the caller knows it
    mtime_ns: int | None  # if the server reports it
    stamp: str = ""  # identifies this version; "" if nothing does


def read_document(
    url: str, options: Options, directory: str | None = None, known: Known = lambda stamp: False
) -> FetchedDocument | None:
    """Fetch the document at `url`. Return None if there is a store or no document. Raise SourceError.

    A document is a file whose name ends in ".json" or whose first character is "{" or "[", or a compressed
    file. A large document is written to a file in `directory` (None: the system's temporary directory).
    `known(stamp)` returns whether the caller already has an index of this version; the document is then not fetched.
    """

    async def read(files: RemoteFiles, url: str, options: Options) -> FetchedDocument | None:
        return await _read_document(files, url, options, directory, known)

    if len(urls.protocols(url)) < 2:  # the members of a zip file may need more
        options = dataclasses.replace(options, memory_limit=min(memory_limit(options), _MEMORY))
    return run(url, options, read)


def run(url: str, options: Options, function: Callable[[RemoteFiles, str, Options], Awaitable[T]]) -> T:
    """Run `function(files, url, options)` in a new trio loop, without waiting for outages.

    Raise its ReadError as SourceError.
    """
    import trio

    from zarrfs.concurrency import tasks

    async def main() -> T:
        from zarrfs.store.remotefiles import RemoteFiles

        files: RemoteFiles | None = None
        try:
            files = RemoteFiles(dataclasses.replace(options, wait_for_outages="none"))  # an outage is an error
            return await function(files, url, options)
        except ReadError as exc:
            raise SourceError(without_secrets(url), exc.reason) from exc
        finally:
            if files is not None:
                with trio.CancelScope(shield=True):
                    await files.aclose()

    if not trio.lowlevel.in_trio_run():
        return tasks.run(main)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as other:  # a Python program that runs in trio opens a store at a memory: URL
        return other.submit(tasks.run, main).result()


async def head(files: RemoteFiles, system: System, path: str) -> bytes:
    """Return the first bytes of a file; b"" if it does not exist or access is denied."""
    try:
        return bytes((await _fetch(files, system, path, _PEEK)).data)
    except (TargetMissing, AccessDenied):
        return b""


async def _fetch(files: RemoteFiles, system: System, path: str, stop: int | None) -> Fetched:
    """Fetch the first `stop` bytes of a file, or all of it (None), bypassing the cache."""
    found: Fetched = await files.blocks.ranges.call(system, path, lambda: system.fetch(path, 0, stop))
    return found


async def _read_document(
    files: RemoteFiles, url: str, options: Options, directory: str | None, known: Known
) -> FetchedDocument | None:
    if url.partition("?")[0].endswith("/"):
        return None
    system, path = await files.find(url)
    try:
        entry = await files.stat_at(system, path)
    except (TargetMissing, AccessDenied, NotADirectoryError) as exc:
        if isinstance(exc, AccessDenied) and _name(url).endswith(".json"):
            raise
        return None  # plan_remote() then looks for a store, and reports errors
    if entry.directory:
        return None
    place = system.identity(path)  # has the endpoint: one URL may name objects at two of them
    stamp = _stamp(place, entry)
    if stamp and known(stamp):
        return FetchedDocument(None, entry.mtime_ns, stamp)
    doubtful = options.type is None or (options.type == "references" and entry.html)
    if (doubtful or options.type == "archive") and not _name(url).endswith(".json"):
        if entry.html and options.type is None:
            return None
        start = bytes((await _fetch(files, system, path, _PEEK)).data)
        if wrong := why_no_source(start):
            raise SourceError(without_secrets(url), wrong)
        json = start.lstrip()[:1] in (b"{", b"[")
        if doubtful and not json and not is_compressed(start):
            return None
    data = None if entry.size is None else await _download(files, system, path, entry, options, directory)
    if data is not None:
        return FetchedDocument(data, entry.mtime_ns, stamp)
    whole = await _fetch(files, system, path, None)
    # The file may have been replaced since, and a proxy cache may answer HEAD with another version than GET.
    stamp = "" if differs(entry.tag, entry.size, whole) else stamp
    return FetchedDocument(bytes(whole.data), entry.mtime_ns, stamp)


def _stamp(place: str, entry: Entry) -> str:
    """Return an identifier of the version of the file at `place`; "" if nothing identifies it.

    Many servers derive ETags from time and size. A file that was changed within the last seconds has no identifier,
    because its next change may have the same time.
    """
    fresh = entry.mtime_ns is not None and time.time_ns() - entry.mtime_ns < _SETTLED_NS
    if entry.tag is None or not entry.strong or fresh:
        return ""
    return hashlib.sha256(repr((place, entry.tag, entry.size)).encode("utf-8", "surrogateescape")).hexdigest()


async def _download(
    files: RemoteFiles, system: System, path: str, entry: Entry, options: Options, directory: str | None
) -> int | None:
    """Download a file in steps to an unlinked file; return its descriptor.

    Return None if the caller should fetch the file in one request: if it is small, if the server ignores ranges or has
    another version than `entry`, or if the disk is full.
    """
    size = entry.size or 0
    if size > options.document_limit:
        raise too_large(system.shown(path), options.document_limit)
    if size <= _STEP:
        return None
    if not (await _fetch(files, system, path, _PEEK)).ranged:
        return None  # the server ignores ranges: every step would transfer the whole file
    expected = entry if entry.tag else None  # None: all steps must have the version of the first
    with contextlib.suppress(OSError, TargetChanged), tempfile.TemporaryFile(dir=directory) as file:
        for start in range(0, size, _STEP):
            file.write(await files.read_at(system, path, start, min(_STEP, size - start), 0, size, expected))
        file.flush()
        return os.dup(file.fileno())
    return None  # the disk is full (memory may have room), or the version is another one


def _name(url: str) -> str:
    return split_chain(url)[0].partition("?")[0].rpartition("/")[2].lower()
