"""FollowedStore: a store that resolves the symbolic links of another one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from zarrfs.errors import NotDirectory, NotFound
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
        try:
            info = await self.lower.info(key, sized)
        except (NotFound, NotDirectory):  # perhaps it lies below a link
            above, name = split_key(key)
            key = join_key(await followed(self.lower, above), name)
            info = await self.lower.info(key, sized)
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
        try:
            if (await self.lower.info(key, sized=False)).kind is not Kind.SYMLINK:
                return key
        except (NotFound, NotDirectory):
            pass
        return await followed(self.lower, key)

    async def _is_above(self, directory: str, key: str) -> bool:
        """Return whether a directory of `key`, its links followed, is `directory`."""
        while key:
            key = split_key(key)[0]
            if await followed(self.lower, key) == directory:
                return True
        return False
