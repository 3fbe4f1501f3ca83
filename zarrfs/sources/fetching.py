"""Documents behind URLs: distinguished from stores, and fetched without holding them in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from zarrfs.archives.dump_reader import document, run_remote, split_member
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import links, without_secrets
from zarrfs.documents.compilation import ReadingProgress
from zarrfs.documents.compressed import is_compressed, is_tar
from zarrfs.documents.data_files import why_no_source
from zarrfs.errors import AccessDenied, ReadError, SourceError, TargetChanged, TargetMissing
from zarrfs.net.responses import Entry, Fetched, System, too_large
from zarrfs.net.versions import differs
from zarrfs.store.indexfile import MAGIC
from zarrfs.system.memory import memory_limit

if TYPE_CHECKING:  # importing these takes longer than everything else here
    import outcome

    from zarrfs.store.remotefiles import RemoteFiles

T = TypeVar("T")
Known = Callable[[str, bool], bool]

_PEEK = 4096  # bytes needed to recognise a document
_SETTLED_NS = 3_000_000_000  # as Document.settled(), for servers with times in whole seconds
_STEP = 32 << 20  # bytes of one request; smaller documents take one
_MEMORY = 64 << 20  # bytes cached and in flight while a document is fetched


class FetchedDocument(NamedTuple):
    """A document behind a URL."""

    data: bytes | int | None  # bytes, or the descriptor of an unlinked file; None: known, not fetched
    mtime_ns: int | None  # if the server reports it
    stamp: str = ""  # a name for this version; "" if nothing identifies it
    dump: bool = False  # it came from a tar of flux dump


def read_document(
    url: str, options: Options, directory: str | None = None, known: Known = lambda stamp, dump: False
) -> FetchedDocument | None:
    """Fetch the document at `url`. Returns None if there is a store, or no document. Raises SourceError.

    A document is a file whose name ends in ".json", whose first character is "{" or "[", an index, a compressed
    file, or the archive in a tar of flux dump. A large one goes to a file in `directory` (None: the system's
    temporary directory). `known(stamp, dump)` says whether the caller already has an index of the version, of which
    `dump` says whether it is in such a tar; the document is then not fetched.
    """

    async def read(files: RemoteFiles, url: str, options: Options) -> FetchedDocument | None:
        return await _read_document(files, url, options, directory, known)

    if len(urls.protocols(url)) < 2:  # the index of an archive may need more
        options = dataclasses.replace(options, memory_limit=min(memory_limit(options), _MEMORY))
    return run(url, options, read)


def run(url: str, options: Options, function: Callable[[RemoteFiles, str, Options], Awaitable[T]]) -> T:
    """Run `function` on a trio loop of its own; a ReadError becomes a SourceError. No outage is waited for."""
    import trio

    async def main() -> T:
        from zarrfs.store.remotefiles import RemoteFiles

        files: RemoteFiles | None = None
        try:
            files = RemoteFiles(dataclasses.replace(options, patience="none"))  # the caller waits for no outage
            return await function(files, url, options)
        except ReadError as exc:
            raise SourceError(without_secrets(url), exc.reason) from exc
        finally:
            if files is not None:
                with trio.CancelScope(shield=True):
                    await files.aclose()

    if not trio.lowlevel.in_trio_run():
        return trio.run(main)
    # A caller that runs in trio gets a loop in another thread.
    import threading

    import outcome

    results: list[outcome.Outcome[T]] = []
    thread = threading.Thread(target=lambda: results.append(outcome.capture(trio.run, main)))
    thread.start()
    thread.join()
    return results[0].unwrap()


async def head(files: RemoteFiles, system: System, path: str) -> bytes:
    """Read the first bytes of a file; b"" if there is none."""
    try:
        return bytes((await _fetch(files, system, path, _PEEK)).data)
    except (TargetMissing, AccessDenied):
        return b""


async def _fetch(files: RemoteFiles, system: System, path: str, stop: int | None) -> Fetched:
    """Fetch the first `stop` bytes of a file, or all of it, uncached."""
    found: Fetched = await files.blocks.ranges.call(system, path, lambda: system.fetch(path, 0, stop))
    return found


async def _read_document(
    files: RemoteFiles, url: str, options: Options, directory: str | None, known: Known
) -> FetchedDocument | None:
    if url.partition("?")[0].endswith("/"):
        return None
    url, member = split_member(url)
    system, path = await files.find(url)
    try:
        entry = await files.stat_at(system, path)
    except (TargetMissing, AccessDenied, NotADirectoryError):
        return None  # plan_remote then looks for a store, and reports what is wrong
    if entry.directory:
        return None
    place = system.identity(path)  # which also names the endpoint, for two of which one URL may stand
    stamp, in_tar = _stamp(place, entry), _stamp(f"{place}#{member}", entry)
    for version, dump in (stamp, False), (in_tar, True):
        if version and known(version, dump):
            return FetchedDocument(None, entry.mtime_ns, version, dump)
    doubtful = options.type is None or (options.type == "references" and entry.html)
    if (doubtful or options.type == "archive") and not _name(url).endswith(".json"):
        if entry.html and options.type is None:
            return None
        beginning = await _fetch(files, system, path, _PEEK)
        start = bytes(beginning.data)
        if is_tar(start):
            in_tar = "" if differs(entry.tag, entry.size, beginning) else in_tar
            return FetchedDocument(await _from_dump(files, url, member, options), entry.mtime_ns, in_tar, dump=True)
        if wrong := why_no_source(start):
            raise SourceError(without_secrets(url), wrong)
        json = start.lstrip()[:1] in (b"{", b"[")
        if doubtful and not json and not is_compressed(start) and not start.startswith(MAGIC):
            return None
    data = None if entry.size is None else await _download(files, system, path, entry, options, directory)
    if data is not None:
        return FetchedDocument(data, entry.mtime_ns, stamp)
    whole = await _fetch(files, system, path, None)
    # The file may have been replaced since, and a cache on the way may answer HEAD with another version than GET.
    stamp = "" if differs(entry.tag, entry.size, whole) else stamp
    return FetchedDocument(bytes(whole.data), entry.mtime_ns, stamp)


async def _from_dump(files: RemoteFiles, url: str, member: str, options: Options) -> bytes:
    """Read the archive `member` of a dump tar."""
    size = await files.size(url)
    return await run_remote(document(size, member, without_secrets(url), options.document_limit), files, url, size)


def _stamp(place: str, entry: Entry) -> str:
    """Return a name for a version of what is at `place`; "" if nothing identifies it.

    Many servers derive ETags from time and size, so a file changed within the last seconds has no name: its next
    change may have the same time.
    """
    fresh = entry.mtime_ns is not None and time.time_ns() - entry.mtime_ns < _SETTLED_NS
    if entry.tag is None or not entry.strong or fresh:
        return ""
    return hashlib.sha256(repr((place, entry.tag, entry.size)).encode("utf-8", "surrogateescape")).hexdigest()


async def _download(
    files: RemoteFiles, system: System, path: str, entry: Entry, options: Options, directory: str | None
) -> int | None:
    """Download a file to an unlinked file; return its descriptor, or None if one request is better.

    That is so if the server has another version than `entry`, too.
    """
    size = entry.size or 0
    if size > options.document_limit:
        raise too_large(system.shown(path), options.document_limit)
    if size <= _STEP:
        return None
    if not (await _fetch(files, system, path, _PEEK)).ranged:
        return None  # the server ignores ranges: every step would transfer the whole
    shown = ReadingProgress(without_secrets(system.shown(path)), size, options.log_level == "error", "fetching")
    expected = entry if entry.tag else None  # else all steps are of the version of the first
    with contextlib.suppress(OSError, TargetChanged), shown, tempfile.TemporaryFile(dir=directory) as file:
        for start in range(0, size, _STEP):
            shown(start)
            file.write(await files.read_at(system, path, start, min(_STEP, size - start), 0, size, expected))
        file.flush()
        return os.dup(file.fileno())
    return None  # no room on the disk, which memory may have, or another version


def _name(url: str) -> str:
    return links(url)[0].partition("?")[0].rpartition("/")[2].lower()
