"""A reference set of a tree that exists: a Zarr store, or any directory behind a path or an fsspec URL."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from zarrfs.errors import ReadError, SourceError
from zarrfs.stage.walk import walk, with_sizes
from zarrfs.store.api import Info, Kind, Reference, Store
from zarrfs.transfer import urls

if TYPE_CHECKING:
    from zarrfs.sources import Plan

METADATA = frozenset((".zgroup", ".zarray", ".zattrs", ".zmetadata", "zarr.json"))
_AT_ONCE = 64  # sizes asked for at the same time


def check_tree(plan: Plan) -> None:
    """SourceError unless everything in the tree can be found."""
    if plan.kind != "zarr":
        raise SourceError(plan.source, "is a document; from-store takes a directory")
    if not plan.lists:
        raise SourceError(plan.source, "the server shows no listings, so nobody knows what is there")


async def references_of(
    store: Store, plan: Plan, inline: int = 0, relative_to: str | None = None
) -> AsyncIterator[Reference]:
    """Every file of `store` in the order of list_prefix("").

    Inline are Zarr's metadata documents, empty files and those of up to `inline` bytes; the others are references
    to all their bytes. `relative_to`: a local directory that URLs are relative to. SourceError names what no
    reference set can hold, or what cannot be read.
    """

    def failed(key: str, exc: Exception) -> None:
        raise SourceError(plan.source, str(exc), key or "/")

    async for key, info in with_sizes(store, walk(store, failed=failed), _AT_ONCE, failed):
        _check(key, info, plan.source)
        if info.kind is Kind.DIRECTORY:
            continue
        size = info.size or 0
        if size <= inline or info.name in METADATA:
            try:
                yield Reference(key, bytes(await store.get(key)))
            except (ReadError, OSError) as exc:
                failed(key, exc)
        else:
            yield Reference(key, None, await _url(store, plan, key, relative_to), 0, size)


async def _url(store: Store, plan: Plan, key: str, relative_to: str | None) -> str:
    if plan.path is None:
        url: str = (await store.locate(key))["url"]
        if "::" in key and key in url:
            raise SourceError(plan.source, 'a name with "::", which means something else in a URL', key)
        return url
    path = os.path.join(plan.path, key)
    if not os.access(path, os.R_OK):
        raise SourceError(plan.source, "permission denied", key)
    if relative_to is None:
        return path
    relative = os.path.relpath(path, relative_to)
    return f"./{relative}" if urls.protocols(relative) else relative  # a file may be called "ab::c"


def _check(key: str, info: Info, source: str) -> None:
    if info.kind is Kind.SYMLINK:
        raise SourceError(source, "a symbolic link, which no reference set can hold", key)
    try:
        key.encode()
    except UnicodeEncodeError:
        raise SourceError(source, "a name that is not UTF-8, which no reference set can hold", key) from None
