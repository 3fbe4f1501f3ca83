"""Merge reference sets into one, each under its own prefix."""

from __future__ import annotations

import heapq
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zarrfs.config.options import Options
from zarrfs.errors import ReadError, SourceError, StoreError
from zarrfs.references.keys import ZARR_METADATA, entry_rule
from zarrfs.references.output import add_reference
from zarrfs.store.api import Kind, Reference, Store, join_key, key_rule
from zarrfs.store.destination import is_utf8
from zarrfs.store.index import IndexStore
from zarrfs.store.indexfile import IndexWriter
from zarrfs.store.targets import Targets
from zarrfs.system.buffers import Buffer

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan

_GROUP = b'{"zarr_format":2}'
_V2 = (".zgroup", ".zarray")
_LOOK = 100  # top-level directories of a set that are searched for metadata


class MergePart(NamedTuple):
    """One of the sets to merge, and its prefix."""

    name: str  # in messages
    prefix: str  # a key; "" puts it at the root
    store: Store
    references: AsyncIterator[Reference]  # of the store, sorted by name, with the URLs that the output gets


def split_prefix(text: str) -> tuple[str, str]:
    """Split PREFIX=SOURCE or SOURCE into (prefix, source). A text before "=" that is no valid key is no prefix."""
    prefix, equals, source = text.partition("=")
    prefix = prefix.rstrip("/")
    if equals and source and (not prefix or (key_rule(prefix) is None and is_utf8(prefix))):
        return prefix, source
    return "", text


async def merged(parts: Sequence[MergePart], duplicates: str = "error") -> AsyncIterator[Reference]:
    """Yield the references of all parts, sorted by the names in their keys; each part must yield them in that order.

    If several parts have a key with different values, take the value of the "first" or "last" part, as `duplicates`
    says; with "error", raise SourceError, which names both parts. Also raise SourceError if a key is a file in one
    part and a directory in another.
    """
    held: Reference | None = None
    holder = parts[0]
    async for reference, part in _merged_stream(parts):
        if held is not None and reference.key == held.key:
            if duplicates == "error" and not _is_same(reference, held):
                rule = f"has another value in {holder.name} (--duplicates first or last takes one of them)"
                raise SourceError(part.name, rule, reference.key)
            if duplicates == "last":
                held, holder = reference, part
            continue
        if held is not None:
            if reference.key.startswith(f"{held.key}/"):
                raise SourceError(part.name, f"{held.key} is a file in {holder.name}", reference.key)
            yield held
        held, holder = reference, part
    if held is not None:
        yield held


def _is_same(one: Reference, other: Reference) -> bool:
    """Return whether two references of one key have the same value; inline metadata are compared as JSON."""
    if one == other:
        return True
    if one.data is None or other.data is None or one.key.rpartition("/")[2] not in ZARR_METADATA:
        return False
    try:
        return bool(_parsed(one.data) == _parsed(other.data))
    except (ValueError, RecursionError):
        return False


def _parsed(document: Buffer) -> object:
    """Parse JSON so that == compares it: NaN (as in a `_FillValue`) equals itself, 1 differs from true, 0 from -0."""
    return json.loads(
        bytes(document), parse_constant=lambda name: (name,), parse_int=lambda text: (int(text), text[0] == "-"),
        parse_float=lambda text: (float(text), text[0] == "-"),
    )  # fmt: skip


async def _merged_stream(parts: Sequence[MergePart]) -> AsyncIterator[tuple[Reference, MergePart]]:
    """Yield (reference, part) of all parts, with prefixed keys, sorted by name; equal keys in the order of parts.

    Raise ReadError if a part does not yield its references in order.
    """
    heap: list[tuple[list[str], int, Reference]] = []
    streams = [_prefixed(part) for part in parts]
    for number, stream in enumerate(streams):
        first = await anext(stream, None)
        if first is not None:
            heap.append((first.key.split("/"), number, first))
    heapq.heapify(heap)
    while heap:
        names, number, reference = heap[0]
        yield reference, parts[number]
        following = await anext(streams[number], None)
        if following is None:
            heapq.heappop(heap)
            continue
        after = following.key.split("/")
        if after <= names:
            raise ReadError(following.key, f"comes after {reference.key}, out of order")
        heapq.heapreplace(heap, (after, number, following))


async def _prefixed(part: MergePart) -> AsyncIterator[Reference]:
    before = f"{part.prefix}/" if part.prefix else ""
    async for reference in part.references:
        if before:
            reference = reference._replace(key=before + reference.key)
            rule = entry_rule(reference.key, Kind.FILE)
            if rule:
                raise SourceError(part.name, rule, reference.key)
        yield reference


async def sorted_by_name(references: AsyncIterator[Reference], plan: Plan) -> AsyncIterator[Reference]:
    """Yield the references of the set of `plan`, sorted by name. A Parquet set is sorted by writing an index."""
    if plan.index is not None:
        async for reference in references:
            yield reference
        return
    with tempfile.TemporaryDirectory(prefix="zarrfs-") as directory:
        path = os.path.join(directory, "index")
        with IndexWriter(path) as index:
            async for reference in references:
                add_reference(index, reference)
            index.commit()
        store = IndexStore(path, Targets(Options()))
        async for reference in store.references():
            yield reference
        await store.aclose()


# -- groups


async def groups(parts: Sequence[MergePart]) -> list[Reference]:
    """Return .zgroup documents for the root and the directories above each prefix, where no part has metadata.

    Return [] if no part has metadata, or the first metadata of any part is not Zarr v2. A part is searched at its root
    and, if there is no metadata, in its first 100 top-level directories.
    """
    versions = {version for part in parts if (version := await _version(part.store)) is not None}
    if versions != {2}:
        return []
    directories = {""}
    for part in parts:
        names = part.prefix.split("/")
        directories |= {"/".join(names[:count]) for count in range(1, len(names))}
    found = []
    for directory in directories:
        if not await _is_node(parts, directory):
            found.append(Reference(join_key(directory, ".zgroup"), _GROUP))
    return sorted(found, key=lambda reference: reference.key.split("/"))


async def _version(store: Store) -> int | None:
    """Return the Zarr format of the first metadata document found at the root or one level below it, or None."""
    found = await _version_at(store, "")
    if found is not None:
        return found
    looked = 0
    async for info in store.list_dir(""):
        if info.kind is Kind.DIRECTORY:
            found, looked = await _version_at(store, info.name), looked + 1
            if found is not None or looked == _LOOK:
                return found
    return None


async def _version_at(store: Store, directory: str) -> int | None:
    if await _holds(store, join_key(directory, "zarr.json")):
        return 3
    for name in _V2:
        if await _holds(store, join_key(directory, name)):
            return 2
    return None


async def _is_node(parts: Sequence[MergePart], directory: str) -> bool:
    """Return whether a part has the metadata of an array or a group at `directory`."""
    for part in parts:
        if part.prefix == directory or not part.prefix:
            inside = directory if not part.prefix else ""
        elif directory.startswith(f"{part.prefix}/"):
            inside = directory[len(part.prefix) + 1 :]
        else:
            continue
        if await _version_at(part.store, inside) is not None:
            return True
    return False


async def _holds(store: Store, key: str) -> bool:
    try:
        await store.info(key)
    except StoreError:
        return False
    except ReadError:  # it exists, although its size is unknown
        return True
    return True
