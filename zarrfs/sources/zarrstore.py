"""Zarr stores and Parquet reference sets as sources: local directories, and URLs of any fsspec file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.documents.compressed import is_zip
from zarrfs.documents.data_files import why_no_source
from zarrfs.errors import AccessDenied, NotDirectory, SourceError, TargetMissing, reason_of
from zarrfs.net.responses import System
from zarrfs.references.parquet_metadata import DOCUMENT, RECORD_SIZE, check_package, is_parquet_layout, read_set
from zarrfs.sources.fetching import head, run

if TYPE_CHECKING:  # not needed for a local directory
    from zarrfs.documents.plan import Plan
    from zarrfs.store.api import Store
    from zarrfs.store.directory import FileSystemStore
    from zarrfs.store.remote import FsspecStore
    from zarrfs.store.remotefiles import RemoteFiles

_NO_SET = "a reference set in a directory has the Parquet layout: a .zmetadata with record_size"
_A_FILE = "is a file; a Zarr store is a directory (or a zip file)"
_UNLISTED = (
    "the server shows no listings: to list an array, each chunk of its grid is requested; the members of a group must "
    "be in consolidated metadata or in -o members="
)
_PLAIN = "a plain Zarr store or directory: -o type=zarr"
_PIECE = 1 << 20  # bytes of a document read at a time


def plan_directory(source: str, path: str, options: Options) -> Plan:
    """Plan the local directory `path`: a reference set in the Parquet layout, or any other directory as a Zarr store.

    Raise SourceError if it cannot be read, if its `.zmetadata` is that of an invalid set, or if -o type=references
    requires a set and it is none.
    """
    from zarrfs.documents.plan import Plan

    path = os.path.abspath(path)
    try:
        with os.scandir(path):
            pass
    except OSError as exc:
        raise SourceError(source, reason_of(exc)) from exc
    if options.type != "zarr":
        document, mtime_ns = _document_of_set(os.path.join(path, DOCUMENT), options.document_limit)
        if is_parquet_layout(document):
            warnings = _checked_set(os.path.join(path, DOCUMENT), document)
            base = path.rstrip("/") + "/"
            return Plan(path, "references", path=path, base=base, mtime_ns=mtime_ns, warnings=warnings)
        if options.type == "references":
            raise SourceError(path, _NO_SET)
    return Plan(path, "zarr", path=path)


def open_directory(path: str, options: Options) -> FileSystemStore:
    """Open the local directory `path` as a store; `allow_path=` says where symbolic links may lead.

    Zarr stores and views follow links, because a reader of a chunk needs its bytes. Other directories show links as
    links, and so does the lower directory of `upperdir=`, except for links that lead out of it: they would point
    elsewhere in the mount. Raise SourceError.
    """
    from zarrfs.store.directory import FileSystemStore, Links

    links = Links.KEEP
    if options.view is not None:
        links = Links.FOLLOW
    elif options.upperdir is not None:
        links = Links.FOLLOW_OUT
    elif is_zarr(path):
        links = Links.FOLLOW
    return FileSystemStore(path, links=links, allowed=options.allow_path)


def is_zarr(path: str) -> bool:
    """Return whether a directory has a Zarr metadata document at its root, even if it is a dangling link."""
    from zarrfs.zarr import NODE_DOCUMENTS

    def has(name: str) -> bool:
        return os.path.lexists(os.path.join(path, name))

    # other programs also have files called "meta"
    return any(map(has, ({*NODE_DOCUMENTS} - {"meta"}) | {DOCUMENT})) or (has("meta") and has("attrs"))


def looks_like_repository(path: str) -> bool:
    """Return whether a directory may be an Icechunk repository: it has parts of the layout, and no Zarr metadata."""
    parts = ("repo", "refs")
    return os.path.isdir(os.path.join(path, "snapshots")) and any(
        os.path.lexists(os.path.join(path, part)) for part in parts
    ) and not is_zarr(path)


def _document_of_set(path: str, limit: int) -> tuple[bytes, int]:
    """Return (bytes, mtime in ns) of a `.zmetadata` if it may be that of a reference set, else (b"", 0).

    Raise SourceError if it is larger than `limit` bytes, or if it exists and cannot be read.
    """
    try:
        # O_NONBLOCK: opening a fifo must not wait for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as exc:
        if not os.path.lexists(path):
            return b"", 0
        raise SourceError(path, f"{reason_of(exc)} ({_PLAIN})") from exc
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b"", 0
        if status.st_size > limit:
            raise SourceError(path, f"more than {limit} bytes ({_PLAIN})")
        try:
            if not _holds(file, RECORD_SIZE):
                return b"", 0
            file.seek(0)
            return file.read(status.st_size), status.st_mtime_ns  # not read(limit), which would allocate that much
        except OSError as exc:
            raise SourceError(path, reason_of(exc)) from exc


def _holds(file: IO[bytes], wanted: bytes) -> bool:
    """Return whether the rest of a file contains `wanted`, reading one piece at a time."""
    piece = b""
    while more := file.read(_PIECE):
        piece = piece[1 - len(wanted) :] + more
        if wanted in piece:
            return True
    return False


def plan_remote(url: str, options: Options) -> Plan:
    """Plan the store at `url`: find out what it is and whether its server can list. Raise SourceError."""
    return run(urls.without_fragment(url), options, _plan_remote)


def open_remote(plan: Plan, options: Options) -> Store:
    """Open the store of a plan from plan_remote(), without network requests."""
    from zarrfs.store.remote import FsspecStore
    from zarrfs.store.unlisted import UnlistedStore

    assert plan.url is not None
    store = FsspecStore(plan.url, options)
    family = urls.names(urls.protocols(plan.url)[0])[0] if urls.protocols(plan.url) else ""
    if plan.lists and family not in ("http", *urls.BUCKETS):
        return store
    return UnlistedStore(store, plan.lists, options.members)


async def _plan_remote(files: RemoteFiles, url: str, options: Options) -> Plan:
    from zarrfs.documents.plan import Plan
    from zarrfs.store.remote import FsspecStore
    from zarrfs.zarr import DOCUMENTS

    shown = without_secrets(url)
    system, path = await files.find(url)
    problem: str | None
    store = FsspecStore(url, options, files)
    try:
        there, problem = await _documents_at(store), None
    except (NotADirectoryError, NotDirectory):
        there, problem = None, _A_FILE
    except (TargetMissing, AccessDenied) as exc:
        there, problem = None, exc.reason
    names, probe = there if there is not None else ([], DOCUMENTS)
    probe = DOCUMENTS if _is_web(url) else probe
    document, refused = await _root_document(files, system, path, names or probe)
    if document is not None and document[0] == DOCUMENT and options.type != "zarr" and is_parquet_layout(document[1]):
        return await _plan_set(files, system, path, url, document[1])
    if options.type == "references":
        raise SourceError(shown, problem or (refused and str(refused)) or _NO_SET)
    if options.type == "icechunk" or (options.type is None and document is None):
        from zarrfs.sources import icechunk

        repository = await icechunk.plan_remote(files, system, path, url, options)
        if repository is not None:
            return repository
        if options.type == "icechunk":
            raise SourceError(shown, problem or icechunk.NO_REPOSITORY)
    unclear = DOCUMENT in names or (document is None and there is not None)
    if refused is not None and unclear and options.type is None:
        raise SourceError(refused.where, f"{refused.reason}: it may be that of a reference set ({_PLAIN})")
    if document is not None:
        name = document[0]
        # Many web servers hide names that begin with a dot. If any other name is missing, the page is no listing.
        lists = there is not None and (name in names or name.startswith(".") or not _is_web(url))
        return Plan(shown, "zarr", url=url, lists=lists, warnings=() if lists else (_UNLISTED,))
    if there is not None:
        # the keys below a name do not show whether it is a file, an empty bucket or misspelt
        if not await store.is_flat() or (await files.stat_at(system, path)).directory:
            return Plan(shown, "zarr", url=url)
        problem = _A_FILE
    start = await head(files, system, path)
    if urls.protocols(url)[:1] != ["zip"] and is_zip(start):
        return await _plan_remote(files, f"zip://::{url}", options)
    problem = why_no_source(start) or problem
    raise SourceError(shown, problem or "no Zarr metadata there, and the server shows no listing")


async def _documents_at(store: FsspecStore) -> tuple[list[str], Sequence[str]] | None:
    """Return (documents in the root listing, others that may exist); None if the server does not list."""
    from zarrfs.zarr import DOCUMENTS

    if not await store.is_flat():
        found = await store.listed("")
        shown = {info.name for info in found or ()}
        return None if found is None else ([name for name in DOCUMENTS if name in shown], ())
    await store.first_page("")  # not the whole listing: there may be millions of entries
    known = {name: store.names.get(name) for name in DOCUMENTS}
    names = [name for name, one in known.items() if one is not None and one.entry is not None]
    return names, [name for name, one in known.items() if one is None]


async def _plan_set(files: RemoteFiles, system: System, path: str, url: str, document: bytes) -> Plan:
    """Plan the set in the Parquet layout at `url`; `document` is its `.zmetadata`."""
    from zarrfs.documents.plan import Plan

    shown = without_secrets(url)
    warnings = _checked_set(system.shown(system.child(path, DOCUMENT)), document)
    entry = await files.stat_at(system, system.child(path, DOCUMENT))
    return Plan(
        shown, "references", url=url, base=urls.directory(url), mtime_ns=entry.mtime_ns, warnings=warnings,
        origin="" if urls.is_here(url) else shown,
    )  # fmt: skip


def _checked_set(name: str, document: bytes) -> tuple[str, ...]:
    """Return the warnings about a `.zmetadata` called `name`.

    Raise SourceError if it is invalid, or if pyarrow is not installed.
    """
    check_package(name)
    return read_set(name, document).reported_warnings()


async def _root_document(
    files: RemoteFiles, system: System, path: str, names: Sequence[str]
) -> tuple[tuple[str, bytes] | None, AccessDenied | None]:
    """Return (name, bytes) of a metadata document at the root, and the error if the server refuses `.zmetadata`.

    `.zmetadata` is tried first. Many servers refuse what they do not have.
    """
    from zarrfs.store.unlisted import node_of

    refused = None
    for name in sorted(names, key=lambda name: name != DOCUMENT):
        try:
            data = await files.read_all_at(system, system.child(path, name))
        except AccessDenied as exc:
            refused = exc if name == DOCUMENT else refused
        except (TargetMissing, NotADirectoryError):
            continue
        else:
            if name == DOCUMENT or node_of(name, data) is not None:
                return (name, data), refused
    return None, refused


def _is_web(url: str) -> bool:
    return urls.protocols(url)[:1] in (["http"], ["https"])
