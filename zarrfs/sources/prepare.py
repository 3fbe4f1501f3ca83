"""The program of the child process that child.py starts: it fetches, detects and compiles a document.

Run as python -m zarrfs.sources.prepare, it reads its request from standard input and writes the answer to standard
output. Its memory, threads and event loops end with it; only the index file and the plan remain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import itertools
import json
import os
import signal
import stat
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from zarrfs.archives.source_kinds import FLUX, is_flux
from zarrfs.config.options import TABLE, Options
from zarrfs.config.redaction import without_secrets
from zarrfs.config.urls import parent
from zarrfs.documents.compilation import Compilation
from zarrfs.documents.compressed import is_zip
from zarrfs.documents.data_files import why_no_source
from zarrfs.documents.document import Document
from zarrfs.documents.json_document import JsonDocument
from zarrfs.documents.plan import Plan, discard
from zarrfs.errors import SourceError, UsageError, reason_of
from zarrfs.net.responses import too_large
from zarrfs.references.parse import SLICED_MEMBERS
from zarrfs.sources.index_cache import WAIT, Index, IndexCache
from zarrfs.store.indexfile import INDEX_VERSION, IndexWriter
from zarrfs.system.processes import end_with_parent

_PEEK = 512  # bytes needed to recognise a file
# Kinds of documents in the order of detection: modules with detect(head) and compile_document(document, compilation).
DOCUMENT_KINDS = {"archive": "zarrfs.archives.parse", "references": "zarrfs.references.parse"}


def prepare(source: str, options: Options, content: bytes = b"") -> Plan:
    """Make the plan of `source` in this process. Raise SourceError or UsageError.

    sources.plan_source() calls it, usually in a child. `content`: the document, if only the parent can read it.
    """
    if options.type in (None, "icechunk") and os.path.isdir(source):
        return _plan_repository(source, options)
    deadline = time.monotonic() + WAIT  # for waiting for other processes
    with contextlib.ExitStack() as until_compiled:
        if content:
            found: Document | Plan = Document(source, content, parent(source), None)
        elif is_flux(source):
            found = _fetch_flux(source, options)
        elif "://" in source or "::" in source:
            found = fetch_remote(source, options, deadline, until_compiled)
        else:
            found = fetch_local(source, options)
        if isinstance(found, Plan):
            return found
        until_compiled.enter_context(contextlib.closing(found))
        with found.open() as file:
            if wrong := why_no_source(file.read(_PEEK)):
                raise SourceError(found.source, wrong)
        options = _for_blobs(options, found.blobs)
        if options.type == "zarr":
            raise SourceError(source, "is a file; a Zarr store is a directory (or a zip file)")
        return compile_document(found, options, deadline)


def remembered(path: str, options: Options) -> Plan | None:
    """Plan a local document if its attributes from stat(2) identify an index in the cache directory, else None."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(descriptor)
        document = Document(path, descriptor, os.path.dirname(path) + "/", status.st_mtime_ns)
        opened.enter_context(contextlib.closing(document))
        if not stat.S_ISREG(status.st_mode) or options.type == "zarr" or not document.settled():
            return None
        cache = IndexCache()
        known = cache.find(_key(document.stamp(), options))
        return None if known is None else _plan(document, cache, known)


def _plan_repository(path: str, options: Options) -> Plan:
    from zarrfs.sources.icechunk import is_repository, plan_local
    from zarrfs.sources.zarrstore import plan_directory

    if options.type == "icechunk" or is_repository(path):
        return plan_local(path, options)
    return plan_directory(path, path, options)


def _for_blobs(options: Options, blobs: tuple[str, ...]) -> Options:
    """Return the options for a document from Flux: by default, it is an archive, and its blobs are in `blobs`."""
    if not blobs:
        return options
    return dataclasses.replace(options, type=options.type or "archive", blobs=options.blobs or blobs)


def _fetch_flux(source: str, options: Options) -> Document:
    from zarrfs.archives import flux

    data = flux.document(source, options.request_timeout)
    if len(data) > options.document_limit:
        raise SourceError(source, too_large(source, options.document_limit).reason)
    return Document(source, data, "", None, blobs=(FLUX,))


def fetch_local(path: str, options: Options) -> Document | Plan:
    """Open a local document, or plan a local zip file. `path` is absolute."""
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SourceError(path, "is neither a directory nor a regular file")
            head = file.read(_PEEK)
            data = -1 if is_zip(head) else os.dup(file.fileno())
    except IsADirectoryError:
        raise SourceError(path, "is a directory; a document is a file") from None
    except OSError as exc:
        raise SourceError(path, reason_of(exc)) from exc
    if is_zip(head):
        from zarrfs.sources.zarrstore import plan_remote

        plan = plan_remote(f"zip://::file://{path}", options)  # it may hold a set in the Parquet layout
        return dataclasses.replace(plan, source=path, mtime_ns=status.st_mtime_ns)
    return Document(path, data, os.path.dirname(path) + "/", status.st_mtime_ns)


def fetch_remote(url: str, options: Options, deadline: float, until_compiled: contextlib.ExitStack) -> Document | Plan:
    """Fetch a document behind an fsspec URL, or plan the Zarr store that the URL turns out to be.

    Until `deadline`, wait for another process that fetches and compiles the same version. If this process compiles it,
    `until_compiled` holds the lock.
    """
    from zarrfs.sources.fetching import read_document
    from zarrfs.sources.zarrstore import plan_remote

    cache = IndexCache()
    known: Index | None = None

    def recalled(stamp: str) -> bool:
        nonlocal known
        known = until_compiled.enter_context(cache.locked(_key(stamp, options), deadline))
        return known is not None

    found = read_document(url, options, cache.documents(), recalled) if options.type != "zarr" else None
    if found is None:
        return plan_remote(url, options)
    shown = without_secrets(url)
    origin = "" if url.startswith("memory:") else shown
    base = parent(url)
    document = Document(shown, b"" if found.data is None else found.data, base, found.mtime_ns, origin, found.stamp)
    return document if known is None else _plan(document, cache, known)


def compile_document(document: Document, options: Options, deadline: float) -> Plan:
    """Plan a document, with its index from the cache directory or compiled now."""
    cache = IndexCache()
    return _plan(document, cache, _index(document, options, cache, deadline))


def _plan(document: Document, cache: IndexCache, index: Index) -> Plan:
    path, notes = index
    return Plan(
        document.source, notes["kind"], index=path, temporary=cache.temporary, origin=document.origin,
        base=document.base, mtime_ns=document.mtime_ns,
        warnings=tuple(json.loads(notes["warnings"])), digest=notes.get("document", ""), blobs=document.blobs,
    )  # fmt: skip


def _index(document: Document, options: Options, cache: IndexCache, deadline: float) -> Index:
    """Return the index of a document: from the cache, from a process waited for, or compiled now."""
    settled = document.settled()
    key = _key(document.stamp() if settled else document.digest().hex(), options)
    # fetch_remote() has locked the version of a document from a URL before fetching it
    mine = document.fetched and settled
    with cache.locked(key, 0 if mine else deadline) as known:
        return known or _compile(document, options, cache, key)


def _key(version: str, options: Options) -> str:
    """Return the key of an index: a hash of the document's version and of all options that change the index."""
    shape = INDEX_VERSION, version, options.type, bool(options.blobs)
    return hashlib.sha256(repr(shape).encode("utf-8", "surrogateescape")).hexdigest()


def _compile(document: Document, options: Options, cache: IndexCache, key: str) -> Index:
    """Find the index of the document's content, or compile it, and keep it under `key`, too.

    So a document is compiled once although it is mounted right after it was written, moved or touched. Raise
    SourceError if that fails, or if the document changes meanwhile.
    """
    before, content = document.stamp(), document.digest()
    by_content = _key(content.hex(), options)
    if (known := cache.find(by_content)) is not None and document.stamp() == before:
        return cache.link(by_content, key), known[1]
    with cache.new(document.source) as scratch:
        notes = _write(document, options, scratch, content)
        changed = document.stamp() != before or (not document.settled() and document.digest() != content)
        if not document.fetched and changed:
            raise SourceError(document.source, "changes while it is read")
        cache.keep(scratch, by_content)
        return cache.link(by_content, key), notes


def _write(document: Document, options: Options, path: str, content: bytes) -> dict[str, str]:
    """Compile a document with the SHA-256 `content` to the new index file `path`; return its notes."""
    parsed = JsonDocument(document, options.document_limit)
    kind, compile_ = _detect(parsed, options)
    with IndexWriter(path) as writer:
        compilation = Compilation(document.source, writer, options)
        compile_(parsed, compilation)
        notes = {"kind": kind, "source": document.source, "warnings": json.dumps(compilation.reported_warnings())}
        notes["document"] = content.hex()
        writer.commit(notes.items())
    return notes


def _detect(document: JsonDocument, options: Options) -> tuple[str, Callable[[JsonDocument, Compilation], None]]:
    parts = (values if member is None else {member: values} for member, values in document.slices(SLICED_MEMBERS))
    for known in itertools.chain((document.head(SLICED_MEMBERS),), parts):
        for kind, module_name in DOCUMENT_KINDS.items():
            if options.type in (None, kind):
                module = importlib.import_module(module_name)
                if options.type == kind or module.detect(known):
                    return kind, module.compile_document
    raise SourceError(document.source, "neither a reference set nor a file archive; see -o type=")


def _end(*_: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # while temporary files are removed
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide the warnings of abandoned loops and nurseries
    raise SystemExit(130)


def answer(request: bytes) -> bytes:
    """Answer {"source", "options", "parent", "content"} with the parts of a plan, or of a SourceError, or {"usage"}.

    This function changes signal handlers and disables the garbage collector for good: call it only in a child of the
    process `parent` that does nothing else.
    """
    gc.disable()  # this process is short-lived, with millions of small objects and few cycles
    others = (signal.SIGINT, signal.SIGHUP)  # stay ignored if they are, as with nohup(1)
    ends = [signal.SIGTERM, *(number for number in others if signal.getsignal(number) != signal.SIG_IGN)]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends templates that take too long
    for number in ends:  # so that unfinished indexes are removed; the parent reports the error
        signal.signal(number, _end)
    held = signal.SIGTERM, signal.SIGALRM, signal.SIGPROF, *others
    signal.pthread_sigmask(signal.SIG_UNBLOCK, held)  # the parent may have blocked them
    asked = json.loads(request)
    end_with_parent(asked["parent"], signal.SIGTERM)
    given = asked["options"]
    given |= {name: tuple(given[name]) for name, opt in TABLE.items() if opt.many}
    source, plan = asked["source"], None
    reply: dict[str, Any]
    try:
        plan = prepare(source, Options(**given), b64decode(asked["content"]))
        return json.dumps(dataclasses.asdict(plan)).encode()
    except UsageError as exc:
        reply = {"usage": str(exc)}
    except SourceError as exc:
        reply = {"source": exc.source, "rule": exc.rule, "entry": exc.entry}
    except MemoryError:
        rule = "reading it takes more memory than there is"
        reply = {"source": without_secrets(source), "rule": rule, "entry": None}
    except SystemExit:  # raised by _end()
        if plan is not None:
            discard(plan)
        raise
    return json.dumps(reply).encode()


if __name__ == "__main__":
    try:
        sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))
    except SystemExit:
        os._exit(130)
