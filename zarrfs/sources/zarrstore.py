"""Zarr stores as sources: directories, and URLs of any fsspec file system; plus fetching documents by URL."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from zarrfs.errors import AccessDenied, ReadError, SourceError, TargetMissing
from zarrfs.options import Options
from zarrfs.sources.compressed import is_compressed
from zarrfs.sources.parquetset import DOCUMENT, check_package, is_parquet_layout, read_set
from zarrfs.store.indexfile import MAGIC
from zarrfs.transfer import urls

if TYPE_CHECKING:  # a local directory needs none of what fetching does
    import outcome

    from zarrfs.sources import Plan
    from zarrfs.store.api import Store
    from zarrfs.transfer.answers import Entry
    from zarrfs.transfer.remote import RemoteFiles
    from zarrfs.transfer.systems import System

T = TypeVar("T")

_NO_SET = "a reference set in a directory has the Parquet layout: a .zmetadata with record_size"
_UNLISTED = "the server shows no listings: metadata is shown, chunks are there by name only"
_PEEK = 4096  # bytes that tell what a file is
_ZIP_MAGIC = b"PK\x03\x04"


def plan_directory(source: str, path: str, options: Options) -> Plan:
    """Plan the local directory `path`. SourceError where it cannot be read, or is no Zarr store."""
    from zarrfs.sources import Plan

    path = os.path.abspath(path)
    try:
        with os.scandir(path):
            pass
    except OSError as exc:
        raise SourceError(source, (exc.strerror or str(exc)).lower()) from exc
    if options.type != "zarr":
        try:
            with open(os.path.join(path, DOCUMENT), "rb") as file:
                document, mtime_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            document, mtime_ns = b"", 0
        if is_parquet_layout(document):
            warnings = _checked_set(os.path.join(path, DOCUMENT), document, options)
            base = _base(path, options)
            return Plan(path, "references", path=path, base=base, mtime_ns=mtime_ns, warnings=warnings)
        if options.type == "references":
            raise SourceError(path, _NO_SET)
    return Plan(path, "zarr", path=path)


def plan_remote(url: str, options: Options) -> Plan:
    """Plan the store at `url`: is it there, and does its server list? SourceError where it is not."""
    return _run(url, options, _plan_remote)


def read_document(url: str, options: Options) -> tuple[bytes, int | None] | None:
    """(document at `url`, its mtime in ns where the server tells); None: a store, or nothing that is a document.

    A document is a file whose name ends in ".json" or whose first character is "{" or "[", or a compressed
    file. SourceError where the server cannot be reached.
    """
    return _run(url, options, _read_document)


def open_remote(plan: Plan, options: Options) -> Store:
    """The store of a plan made by plan_remote; touches no network."""
    from zarrfs.sources.unlisted import UnlistedStore
    from zarrfs.store.remote import FsspecStore

    assert plan.url is not None
    store = FsspecStore(plan.url, options)
    return UnlistedStore(store, plan.lists) if _is_web(plan.url) or not plan.lists else store


def _run(url: str, options: Options, function: Callable[[RemoteFiles, str, Options], Awaitable[T]]) -> T:
    """`function` on a trio loop of its own, its failures as SourceError."""
    import trio

    async def main() -> T:
        from zarrfs.transfer.remote import RemoteFiles

        files = RemoteFiles(options)
        try:
            return await function(files, url, options)
        except ReadError as exc:
            raise SourceError(urls.without_secrets(url), exc.reason) from exc
        finally:
            with trio.CancelScope(shield=True):
                await files.aclose()

    if not trio.lowlevel.in_trio_run():
        return trio.run(main)
    # A caller on trio gets its answer the same way, from a loop in another thread.
    import threading

    import outcome

    results: list[outcome.Outcome[T]] = []
    thread = threading.Thread(target=lambda: results.append(outcome.capture(trio.run, main)))
    thread.start()
    thread.join()
    return results[0].unwrap()


async def _read_document(files: RemoteFiles, url: str, options: Options) -> tuple[bytes, int | None] | None:
    if url.partition("?")[0].endswith("/"):
        return None
    system, path = await files.find(url)
    try:
        entry = await files.stat_at(system, path)
    except (TargetMissing, AccessDenied, NotADirectoryError):
        return None  # not by this name; plan_remote sees whether there is a store, and says what is wrong
    if entry.directory:
        return None
    doubtful = options.type is None or (options.type == "references" and entry.html)
    if doubtful and not _name(url).endswith(".json"):
        if entry.html and options.type is None:
            return None
        head = await _head(files, system, path)
        if head.lstrip()[:1] not in (b"{", b"[") and not is_compressed(head) and not head.startswith(MAGIC):
            return None
    return await files.read_all_at(system, path), entry.mtime_ns


async def _plan_remote(files: RemoteFiles, url: str, options: Options) -> Plan:
    from zarrfs.sources import Plan
    from zarrfs.sources.unlisted import DOCUMENTS

    shown = urls.without_secrets(url)
    system, path = await files.find(url)
    problem: str | None
    entries: list[Entry] | None
    try:
        entries, problem = await files.listing_at(system, path), None
    except NotADirectoryError:
        entries, problem = None, "is a file; a Zarr store is a directory (or a zip file)"
    except (TargetMissing, AccessDenied) as exc:
        entries, problem = None, exc.reason
    names = {entry.name for entry in entries or ()}
    probe = DOCUMENTS if entries is None or _is_web(url) else ()
    document = await _root_document(files, system, path, [name for name in DOCUMENTS if name in names] or probe)
    if document is not None and document[0] == DOCUMENT and options.type != "zarr" and is_parquet_layout(document[1]):
        return await _plan_set(files, system, path, url, document[1], options)
    if options.type == "references":
        raise SourceError(shown, problem or _NO_SET)
    if document is not None:
        name = document[0]
        # many web servers hide names with a dot; another name that is not in the listing makes it none
        lists = entries is not None and (name in names or name.startswith(".") or not _is_web(url))
        return Plan(shown, "zarr", url=url, lists=lists, warnings=() if lists else (_UNLISTED,))
    if entries is not None:
        return Plan(shown, "zarr", url=url)
    if urls.protocols(url)[:1] != ["zip"] and await _is_zip(files, system, path):
        return await _plan_remote(files, f"zip://::{url}", options)
    raise SourceError(shown, problem or "no Zarr metadata there, and the server shows no listing")


async def _plan_set(
    files: RemoteFiles, system: System, path: str, url: str, document: bytes, options: Options
) -> Plan:
    """Plan the set in the Parquet layout at `url`, with its `.zmetadata`."""
    from zarrfs.sources import Plan

    shown = urls.without_secrets(url)
    warnings = _checked_set(system.shown(system.child(path, DOCUMENT)), document, options)
    entry = await files.stat_at(system, system.child(path, DOCUMENT))
    local = not urls.protocols(url) or urls.protocols(url)[-1] in ("file", "local", "memory")
    return Plan(
        shown, "references", url=url, base=_base(url, options), mtime_ns=entry.mtime_ns, warnings=warnings,
        origin="" if local else shown,
    )  # fmt: skip


def _checked_set(name: str, document: bytes, options: Options) -> tuple[str, ...]:
    """The warnings about a `.zmetadata` called `name`; SourceError where it, or with -o strict a part, is bad."""
    check_package(name)
    found = read_set(name, document)
    if options.strict and found.problems:
        entry, rule = found.problems[0]
        raise SourceError(name, rule, entry)
    return found.told()


def _base(place: str, options: Options) -> str:
    """What relative targets of the set at `place` are relative to."""
    if options.base is not None:
        place = options.base if "://" in options.base else os.path.abspath(options.base)
    return place.rstrip("/") + "/"


async def _root_document(
    files: RemoteFiles, system: System, path: str, names: Sequence[str]
) -> tuple[str, bytes] | None:
    """(name, bytes) of a metadata document at the root, `.zmetadata` first; None where there is none."""
    from zarrfs.sources.unlisted import read_node

    for name in sorted(names, key=lambda name: name != DOCUMENT):
        try:
            data = await files.read_all_at(system, system.child(path, name))
        except (TargetMissing, AccessDenied, NotADirectoryError):
            continue
        if name == DOCUMENT or read_node(name, data) is not None:
            return name, data
    return None


async def _is_zip(files: RemoteFiles, system: System, path: str) -> bool:
    try:
        return (await _head(files, system, path)).startswith(_ZIP_MAGIC)
    except (TargetMissing, AccessDenied):
        return False


async def _head(files: RemoteFiles, system: System, path: str) -> bytes:
    return bytes((await files.attempts(system, path, lambda: system.fetch(path, 0, _PEEK))).data)


def _name(url: str) -> str:
    return urls.links(url)[0].partition("?")[0].rpartition("/")[2].lower()


def _is_web(url: str) -> bool:
    return urls.protocols(url)[:1] in (["http"], ["https"])
