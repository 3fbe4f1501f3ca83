"""FollowedStore: a store that resolves the symbolic links of another one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from zarrfs.errors import NotDirectory, NotFound, ReadError
from zarrfs.store.api import Info, Kind, Store, Value, WrappingStore, join_key, split_key
from zarrfs.store.traversal import followed, followed_info


def with_links_followed(store: Store) -> Store:
    """Return `store`, or a FollowedStore over it if it has symbolic links."""
    return FollowedStore(store) if store.has_links else store


class FollowedStore(WrappingStore):
    """A store without symbolic links: those of `lower` appear as the files and directories that they lead to.

    A link that leads nowhere, or out of the store, is an unreadable file. A link to a directory above itself is left
    out of listings, because a walk would never end.
    """

    async def info(self, key: str, sized: bool = True) -> Info:
        key, info = await self._entry(key, sized)
        return (await followed_info(self.lower, key, info, sized))[1]._replace(name=split_key(key)[1])

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        directory = await followed(self.lower, prefix)
        async for info in self.lower.list_dir(directory, after):
            if info.kind is not Kind.SYMLINK:
                yield info
                continue
            target, found = await followed_info(self.lower, join_key(directory, info.name), info, sized=False)
            if found.kind is not Kind.DIRECTORY or not await self._is_above(target, join_key(prefix, info.name)):
                yield found._replace(name=info.name)

    async def open(self, key: str) -> Value:
        return await self.lower.open(await self._target(key))

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        return await self.lower.locate(await self._target(key), shown)

    async def prefetch(self, keys: Sequence[str]) -> None:
        await self.lower.prefetch(keys)

    async def about(self) -> dict[str, Any]:
        return await self.lower.about()

    async def _target(self, key: str) -> str:
        """Return `key` with its links resolved, for the lower store. Raise NotFound, NotDirectory or ReadError."""
        key, info = await self._entry(key, sized=False)
        return key if info.kind is not Kind.SYMLINK else await followed(self.lower, key)

    async def _entry(self, key: str, sized: bool) -> tuple[str, Info]:
        """Return `key` with the links above it resolved, and its entry.

        An overlay has the changes only at the resolved key, even if its lower store finds the other one.
        """
        found = None
        with contextlib.suppress(NotFound, NotDirectory):
            found = await self.lower.info(key, sized)
            if not isinstance(self.lower, WrappingStore):
                return key, found
        above, name = split_key(key)
        try:
            key = join_key(await followed(self.lower, above), name)
        except NotDirectory as exc:
            if found is not None:  # the link leads out of the source, and from there into it
                raise ReadError(key, f"lies below {exc.key}, which is no directory of the source") from exc
            raise
        return key, await self.lower.info(key, sized)

    async def _is_above(self, directory: str, key: str) -> bool:
        """Return whether a directory of `key`, its links followed, is `directory`."""
        while key:
            key = split_key(key)[0]
            if await followed(self.lower, key) == directory:
                return True
        return False
