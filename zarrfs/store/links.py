"""Where symbolic links lead within a store."""

from __future__ import annotations

from zarrfs.errors import NotDirectory, NotFound, ReadError
from zarrfs.store.api import Info, Kind, Store

LINKS_MAX = 40  # as the kernel's own limit


async def follow(store: Store, key: str) -> str | None:
    """The key that `key` leads to through symbolic links; None where that leaves the tree or goes in circles.

    Raises NotFound or NotDirectory where it leads nowhere.
    """
    done: list[str] = []
    rest, links = key.split("/"), 0
    while rest:
        part, rest = rest[0], rest[1:]
        if part in ("", "."):
            continue
        if part == "..":
            if not done:
                return None
            done.pop()
            continue
        at = "/".join([*done, part])
        info = await store.info(at)
        if info.kind is Kind.SYMLINK:
            links += 1
            target = info.target or ""
            if links > LINKS_MAX or target.startswith("/"):
                return None
            rest = [*target.split("/"), *rest]
        elif rest and info.kind is not Kind.DIRECTORY:
            raise NotDirectory(at)
        else:
            done.append(part)
    return "/".join(done)


async def resolve(store: Store, key: str, sized: bool = True) -> tuple[str, Info]:
    """(key, Info) of what `key` is, or leads to; NotFound where it is not there.

    A link that leads nowhere, or out of the store, is a ReadError: its bytes are not absent, they cannot be had.
    """
    info = await store.info(key, sized)
    if info.kind is not Kind.SYMLINK:
        return key, info
    try:
        target = await follow(store, key)
        if target is not None:
            return target, await store.info(target, sized)
    except (NotFound, NotDirectory):
        pass
    raise ReadError(key, "a symbolic link that leads nowhere, or out of the source")
