"""Traversal of a store: entries below a directory, their sizes and bytes, and resolution of symbolic links."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import trio

from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError, StoreError, ZarrfsError
from zarrfs.store.api import Info, Kind, Store, join_key, key_rule, walk
from zarrfs.store.values import open_sized
from zarrfs.system.buffers import Buffer

LINKS_MAX = 40  # the kernel's limit
NOWHERE = "a symbolic link that leads nowhere, or out of the source"


class Dangling(NotFound):
    """no such key, though a symbolic link leads there"""


async def follow(store: Store, key: str) -> str | None:
    """Resolve symbolic links in `key`; return the final key, or None if a link leaves the tree or loops.

    Raise NotFound or NotDirectory if there is no such key: Dangling if that is because of a link.
    """
    done: list[str] = []
    rest, links = key.split("/"), 0
    own = len(rest)  # parts at the end of `rest` that are from `key` itself, not from a link
    while rest:
        of_link = len(rest) > own
        part, rest = rest[0], rest[1:]
        own = min(own, len(rest))
        if part in ("", "."):
            continue
        if part == "..":
            if not done:
                return None
            done.pop()
            continue
        at = "/".join([*done, part])
        try:
            info = await store.info(at, sized=False)
        except StoreError as exc:
            if of_link:  # a target may also have a name that is too long
                raise Dangling(at) from exc
            raise
        if info.kind is Kind.SYMLINK:
            links += 1
            target = info.target or ""
            if links > LINKS_MAX or target.startswith("/"):
                return None
            rest = [*target.split("/"), *rest]
        elif rest and info.kind is not Kind.DIRECTORY:
            raise Dangling(join_key(at, rest[0])) if len(rest) > own else NotDirectory(at)
        else:
            done.append(part)
    return "/".join(done)


async def followed_info(store: Store, key: str, info: Info, sized: bool = True) -> tuple[str, Info]:
    """Return (key, Info) of the target of a link, or of the entry itself if it is none.

    A link that cannot be followed is an unreadable file: its bytes are not absent.
    """
    if info.kind is not Kind.SYMLINK:
        return key, info
    why = NOWHERE
    try:
        if (target := await follow(store, key)) is not None:
            return target, await store.info(target, sized)
    except StoreError:
        pass
    except ReadError as exc:
        why = exc.reason
    return key, info._replace(kind=Kind.FILE, size=1, target=None, unreadable=why)


async def followed(store: Store, key: str) -> str:
    """Return the key that `key` resolves to, following links in every part of it; stat or list that key.

    Raise NotFound or NotDirectory, and ReadError for a link that is dangling, in a circle, or leads out of the store:
    its bytes are unreadable, not absent.
    """
    if not store.has_links or key_rule(key):
        return key
    try:
        at = await follow(store, key)
    except Dangling as exc:
        raise ReadError(key, "is, or lies behind, a symbolic link that leads nowhere") from exc
    if at is None:
        raise ReadError(key, "is, or lies behind, a symbolic link out of the source, or in a circle")
    return at


PIECE = 4 << 20
_BATCH = 1000


async def entries(store: Store, key: str, deep: bool = False) -> AsyncIterator[tuple[str, Info]]:
    """Yield (key, entry) of each child of a directory, or with `deep` of everything below it; or of a file itself."""
    info = await store.info(key)
    if info.kind is not Kind.DIRECTORY:
        yield key, info
    elif deep:
        async for found in walk(store, key):
            yield found
    else:
        async for child in store.list_dir(key):
            await trio.lowlevel.checkpoint_if_cancelled()
            yield join_key(key, child.name), child


async def with_sizes(
    store: Store,
    found: AsyncIterator[tuple[str, Info]],
    at_once: int,
    failed: Callable[[str, Exception], None],
) -> AsyncIterator[tuple[str, Info]]:
    """Yield `found` in order, adding sizes that the listings did not have; up to `at_once` requests run in parallel.

    A size that cannot be determined stays None, and the error is passed to `failed`.
    """
    batch: list[tuple[str, Info]] = []
    unknown: list[int] = []

    async def ask(index: int) -> None:
        key, info = batch[index]
        try:
            batch[index] = key, info._replace(size=(await store.info(key)).size)
        except (ZarrfsError, OSError) as exc:
            failed(key, exc)

    more = True
    while more:
        entry = await anext(found, None)
        more = entry is not None
        if entry is not None:
            unknown += [len(batch)] if entry[1].size is None else []
            batch.append(entry)
        if not more or len(unknown) == at_once or len(batch) == _BATCH:
            await for_each(ask, unknown)
            for item in batch:
                yield item
            batch, unknown = [], []


async def pieces(store: Store, key: str, start: int = 0, length: int | None = None) -> AsyncIterator[Buffer]:
    """Yield the bytes [start, start + length) of the file that `key` resolves to, in pieces of bounded size."""
    at = await follow(store, key)
    if at is None:
        raise NotFound(key, "a symbolic link that leads out of the source, or in circles")
    info = await store.info(at)
    if info.kind is Kind.DIRECTORY:
        raise IsDirectory(key)
    size = info.size or 0
    stop = size if length is None else min(size, start + length)
    with contextlib.closing(await open_sized(store, at, size)) as value:
        while start < stop:
            piece = await value.read(start, min(PIECE, stop - start))
            if not len(piece):
                raise ReadError(at, f"ends at {start}, not at {size}")
            yield piece
            start += len(piece)


async def extents(store: Store, key: str, info: Info) -> AsyncIterator[tuple[int, int]]:
    """Yield (start, length) of the parts of a file (of known size) that hold data: holes need not be read."""
    size = info.size or 0
    where = await store.locate(key) if info.allocated is not None else {}
    if "hole" in where:
        return
    if "regions" not in where:
        yield 0, min(size, info.allocated or 0) if "inline" in where else size  # the rest is zeros
        return
    for region in where["regions"]:
        start = min(region["start"], size)
        yield start, min(region["length"], size - start)


def check_length(key: str, count: int, start: int, length: int) -> None:
    """Raise ReadError if a store returned fewer bytes than requested."""
    if count != length:
        raise ReadError(key, f"{count} bytes at {start}, not {length}")
