"""Where symbolic links lead within a store."""

from __future__ import annotations

from zarrfs.errors import NotDirectory
from zarrfs.store.api import Kind, Store

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
