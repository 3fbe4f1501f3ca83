"""The differences between two stores: entries and their bytes, compared in bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from zarrfs.errors import ReadError
from zarrfs.store.api import Info, Kind, Store, join_key
from zarrfs.store.traversal import check_length, extents, walk
from zarrfs.system.buffers import Buffer
from zarrfs.system.sparse import data_extents

_PIECE = 4 << 20  # bytes
_SECOND = 10**9  # nanoseconds


class Difference(NamedTuple):
    """An entry that is added, changed or deleted."""

    kind: str  # one of changes.LETTERS
    key: str
    info: Info | None  # the entry in the second store
    # (field, before, after) for each field that differs: kind, bytes, size, mode, mtime or target
    what: tuple[tuple[str, str, str], ...] = ()


async def differences(one: Store, other: Store) -> AsyncIterator[Difference]:
    """Yield the differences from `one` to `other`, in the order of keys. Both stores must list names in order.

    Modes and times are compared only if both stores have them. Times are compared in whole seconds, and not for
    directories. The entries of a deleted directory are not listed. Raise ReadError if bytes cannot be read.
    """
    levels = [("", _pairs(one, other, ""))]
    while levels:
        prefix, pairs = levels[-1]
        pair = await anext(pairs, None)
        if pair is None:
            levels.pop()
            continue
        before, after = pair
        key = join_key(prefix, (before or after).name)  # type: ignore[union-attr]
        if before is not None and (after is None or _replaced(before, after)):
            yield Difference("deleted", key, None)
            before = None
        if after is None:
            continue
        if before is None:
            yield Difference("added", key, after)
            if after.kind is Kind.DIRECTORY:
                async for below, info in walk(other, key):
                    yield Difference("added", below, info)
            continue
        what = await _changes(one, other, key, before, after)
        if what:
            yield Difference("changed", key, after, what)
        if after.kind is Kind.DIRECTORY:
            levels.append((key, _pairs(one, other, key)))


def as_json(found: Difference) -> dict[str, Any]:
    """Return a difference, ready for JSON: the fields of changes.as_json(), and "differs" with the values."""
    info = found.info
    return {
        "kind": found.kind,
        "key": found.key,
        "type": None if info is None else _kind(info),
        "size": None if info is None else info.size,
        "mode": None if info is None or info.mode is None else f"{info.mode:04o}",
        "mtime_ns": None if info is None else info.mtime_ns,
        "differs": {name: [before, after] for name, before, after in found.what},
    }


def _replaced(before: Info, after: Info) -> bool:
    """Return whether exactly one of two entries is a directory."""
    return (before.kind is Kind.DIRECTORY) != (after.kind is Kind.DIRECTORY)


def _kind(info: Info) -> str:
    """Return the kind of an entry. Stores list a FIFO, socket or device as a file that cannot be read."""
    return "special file" if info.unreadable else info.kind.name.lower()


async def _pairs(one: Store, other: Store, prefix: str) -> AsyncIterator[tuple[Info | None, Info | None]]:
    """Yield (entry in `one`, entry in `other`) for every name in a directory, in order; None for an absent entry."""
    left, right = one.list_dir(prefix), other.list_dir(prefix)
    before, after = await anext(left, None), await anext(right, None)
    while before is not None or after is not None:
        if after is None or (before is not None and before.name < after.name):
            yield before, None
            before = await anext(left, None)
        elif before is None or after.name < before.name:
            yield None, after
            after = await anext(right, None)
        else:
            yield before, after
            before, after = await anext(left, None), await anext(right, None)


async def _changes(
    one: Store, other: Store, key: str, before: Info, after: Info
) -> tuple[tuple[str, str, str], ...]:
    found = []
    kinds = _kind(before), _kind(after)
    if kinds[0] != kinds[1]:
        found.append(("kind", *kinds))
    elif before.kind is Kind.SYMLINK:
        if before.target != after.target:
            found.append(("target", before.target or "", after.target or ""))
    elif before.kind is Kind.FILE and not before.unreadable:
        if before.size != after.size:
            found.append(("size", str(before.size), str(after.size)))
        elif not await _same_bytes(one, other, key, before, after):
            found.append(("bytes", "", ""))
    modes = before.mode, after.mode
    if kinds[0] == kinds[1] and before.kind is not Kind.SYMLINK and None not in modes and before.mode != after.mode:
        found.append(("mode", f"{before.mode:04o}", f"{after.mode:04o}"))
    if before.kind is not Kind.DIRECTORY and before.mtime_ns is not None and after.mtime_ns is not None:
        times = before.mtime_ns // _SECOND, after.mtime_ns // _SECOND
        if times[0] != times[1]:
            found.append(("mtime", str(times[0]), str(times[1])))
    return tuple(found)


async def _same_bytes(one: Store, other: Store, key: str, before: Info, after: Info) -> bool:
    """Return whether two files of the same size have the same bytes; common holes are not read."""
    parts = sorted([*await _data(one, key, before), *await _data(other, key, after)])
    at = 0
    for start, stop in parts:
        at = max(at, start)
        while at < stop:
            length = min(_PIECE, stop - at)
            if await _read(one, key, at, length) != await _read(other, key, at, length):
                return False
            at += length
    return True


async def _data(store: Store, key: str, info: Info) -> list[tuple[int, int]]:
    """Return (start, stop) of the data extents of a file."""
    if info.allocated is not None:
        with contextlib.closing(await store.open(key)) as value:
            descriptor = value.fileno()
            if descriptor is not None:
                return data_extents(descriptor, info.size or 0)
    return [(start, start + length) async for start, length in extents(store, key, info)]


async def _read(store: Store, key: str, start: int, length: int) -> Buffer:
    try:
        data = await store.get(key, start, length)
    except ReadError as exc:
        if exc.where == key:
            raise
        raise ReadError(key, str(exc)) from exc  # the message names a blob or target, but not the key
    check_length(key, len(data), start, length)
    return data
