"""Reference sets made from existing trees: Zarr stores, and any directory at a path or an fsspec URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from zarrfs.config import urls
from zarrfs.errors import ReadError, SourceError, UsageError
from zarrfs.references.keys import ZARR_METADATA, entry_rule
from zarrfs.references.relocate import NOT_UTF8, absolute, local_path
from zarrfs.store.api import Info, Kind, Reference, Store
from zarrfs.store.destination import is_utf8
from zarrfs.store.traversal import walk, with_sizes

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan

_AT_ONCE = 64  # sizes requested concurrently


def check_tree(plan: Plan, view: str | None = None) -> None:
    """Check that a reference set can be made from the tree of `plan`, or from its `view`.

    Raise UsageError if the view decodes values, and SourceError if the source is a document (other than a reference
    set with a view) or its server cannot list.
    """
    if view in ("arrays", "netcdf"):
        raise UsageError(f"--view {view}: its bytes are decoded as they are read, so no reference can point to them")
    if plan.kind not in ("zarr", "icechunk") and not (plan.kind == "references" and view):
        raise SourceError(plan.source, "is a document; from-store takes a directory")
    if not plan.lists:
        raise SourceError(plan.source, "the server shows no listings, so the files of the tree are unknown")


async def references_of(
    store: Store, plan: Plan, inline: int = 0, relative_to: str | None = None, own: Sequence[str] = ()
) -> AsyncIterator[Reference]:
    """Yield every file of `store` as a reference, in the order of list_prefix("").

    Zarr's metadata documents, empty files and files of up to `inline` bytes become inline values; all other files
    become the references that reference_of() returns. `relative_to`: the local directory that URLs are relative to.
    `own`: local paths to leave out even if they are in the tree, such as the output. Raise SourceError for an entry
    that no reference set can hold or that cannot be read, and UsageError if the root of the tree is one of `own`.
    """

    def failed(key: str, exc: Exception) -> None:
        raise SourceError(plan.source, str(exc), key or "/")

    tree = walk(store, failed=failed, leave_out=_exclusion_test(plan, own))
    async for key, info in with_sizes(store, tree, _AT_ONCE, failed):
        _check(key, info, plan.source)
        if info.kind is Kind.DIRECTORY:
            continue
        size = info.size or 0
        if size <= inline or info.name in ZARR_METADATA:
            try:
                yield Reference(key, bytes(await store.get(key)))
            except (ReadError, OSError) as exc:
                failed(key, exc)
        else:
            yield await reference_of(store, plan, key, size, relative_to)


async def reference_of(store: Store, plan: Plan, key: str, size: int, relative_to: str | None = None) -> Reference:
    """Return a reference to the bytes of one file of `store`, which `store.locate()` finds.

    They may be a whole file, a part of one, or a target of a reference set. The value is inline if its bytes have no
    URL. Raise SourceError if no reference can name them, or if they are in a local file that is not readable.
    """
    try:
        where = await store.locate(key, shown=False)
        if not where.keys() & {"url", "decoded_from"}:
            return Reference(key, bytes(await store.get(key)))
    except ReadError as exc:
        raise SourceError(plan.source, exc.reason, key) from exc
    if "decoded_from" in where:
        raise SourceError(plan.source, "is decoded by the view, so that no reference can name its bytes", key)
    if "broken" in where:
        raise SourceError(plan.source, where["broken"], key)
    url: str = where["url"]
    path = local_path(url) if plan.kind == "zarr" else None
    url = _absolute(url, plan, key) if path is None else _url_of_path(path, plan, key, relative_to)
    return Reference(key, None, url, where.get("offset", 0), where.get("length", size))


def _absolute(url: str, plan: Plan, key: str) -> str:
    """Return `url` as an absolute URL, for a set in another directory. Raise SourceError if that is impossible."""
    try:
        found = absolute(url, plan.base)
    except ReadError as exc:
        raise SourceError(plan.source, exc.reason, key) from exc
    if not is_utf8(found):
        raise SourceError(plan.source, NOT_UTF8, key)
    return found


def _url_of_path(path: str, plan: Plan, key: str, relative_to: str | None) -> str:
    """Return the URL of a local file, relative to the directory `relative_to` unless that is None.

    Raise SourceError if the file is not readable or the URL would not be UTF-8.
    """
    if not os.access(path, os.R_OK):
        raise SourceError(plan.source, "permission denied", key)
    if relative_to is not None:
        path = os.path.relpath(path, relative_to)
    if not is_utf8(path):
        raise SourceError(plan.source, NOT_UTF8, key)
    return f"./{path}" if urls.protocols(path) else path  # a file name like "ab::c" looks like a URL


def _exclusion_test(plan: Plan, paths: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: whether a key is one of the local `paths`, even if they reach its directory through links.

    Raise UsageError if the root of the tree is one of `paths`.
    """
    root = local_path(plan.path or plan.url or "")
    names = {os.path.basename(path) for path in paths}

    def same(one: str, other: str) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samefile(one, other)
        return False

    def found(key: str) -> bool:
        prefix, _, name = key.rpartition("/")
        if root is None or name not in names:
            return False
        directory = os.path.join(root, prefix)
        return any(os.path.basename(path) == name and same(os.path.dirname(path), directory) for path in paths)

    if root is not None and any(same(path, root) for path in paths):
        raise UsageError(f"{plan.source}: is also the output")
    return found


def _check(key: str, info: Info, source: str) -> None:
    rule = (info.kind is not Kind.SYMLINK and info.unreadable) or entry_rule(key, info.kind)
    if rule:
        raise SourceError(source, rule, key)
