"""A store of zarr-python 3 over a source: zarr and xarray read it without a mount."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from zarrfs.config.redaction import without_secrets
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError, StoreError
from zarrfs.python.handle import StoreHandle
from zarrfs.store import api
from zarrfs.store.traversal import followed, get_followed, resolve
from zarrfs.zarr import DOCUMENTS

_ABSENT = (NotFound, IsDirectory, NotDirectory)  # not ReadError: it would read as fill values
_READ_ONLY = "a store of zarrfs is read-only"


class ZarrStore(Store):
    """A read-only store of zarr-python that reads through a StoreHandle; closing it closes the handle.

    A value that the source does not have is a missing key; one that exists and cannot be read raises ReadError.
    A pickled store contains its pickled handle.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, handle: StoreHandle, *, read_only: bool = True) -> None:
        if not read_only:
            raise ValueError(_READ_ONLY)
        super().__init__(read_only=True)
        self.handle = handle

    def with_read_only(self, read_only: bool = False) -> ZarrStore:
        """Return a store with the same handle. Raise ValueError if `read_only` is false."""
        return type(self)(self.handle, read_only=read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrStore) and self.handle == other.handle

    def __hash__(self) -> int:
        return hash(self.handle)

    def __repr__(self) -> str:
        return f"<zarrfs.ZarrStore {self.handle!r}>"

    def __str__(self) -> str:
        return f"zarrfs::{without_secrets(self.handle.source)}"

    def close(self) -> None:
        """Close the source."""
        self.handle.close()
        super().close()

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return a value or a range of it; None if there is no such value. Raise ReadError if it cannot be read.

        That includes a chunk whose key is a directory, or whose key has a file in the place of a directory.
        """
        from zarr.core.buffer import default_buffer_prototype

        try:
            data = await self.handle.call_async(get_followed, api.check_key(key), *_range(byte_range))
        except _ABSENT as exc:
            _only_if_absent(key, exc)
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return several values or ranges, read concurrently."""
        return await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges))

    async def exists(self, key: str) -> bool:
        """Return whether there is a value with this key."""
        try:
            info = await self.handle.call_async(_info, key)
        except _ABSENT:
            return False
        return info.kind is not api.Kind.DIRECTORY

    async def getsize(self, key: str) -> int:
        """Return the size of a value in bytes. Raise FileNotFoundError if there is no such value."""
        try:
            info = await self.handle.call_async(_info, key)
        except _ABSENT:
            raise FileNotFoundError(key) from None
        return info.size or 0

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that begin with `prefix`, which may end within a name."""
        directory = prefix.rpartition("/")[0]
        for key in await self.handle.call_async(_keys, directory, prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names in a directory; none if there is no such directory."""
        for name in await self.handle.call_async(_names, prefix.strip("/")):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        """Raise ValueError."""
        raise ValueError(_READ_ONLY)

    async def delete(self, key: str) -> None:
        """Raise ValueError."""
        raise ValueError(_READ_ONLY)


def _range(wanted: ByteRequest | None) -> tuple[int, int | None]:
    """Return (start, length) of a range. A negative start counts from the end; a length of None is all the rest."""
    if isinstance(wanted, RangeByteRequest):
        return wanted.start, wanted.end - wanted.start
    if isinstance(wanted, OffsetByteRequest):
        return wanted.offset, None
    if isinstance(wanted, SuffixByteRequest):
        return (-wanted.suffix, None) if wanted.suffix else (0, 0)
    if wanted is None:
        return 0, None
    raise TypeError(f"byte_range {wanted!r}: expected a RangeByteRequest, OffsetByteRequest or SuffixByteRequest")


async def _info(store: api.Store, key: str) -> api.Info:
    return (await resolve(store, await followed(store, key)))[1]


async def _keys(store: api.Store, directory: str, prefix: str) -> list[str]:
    found: list[str] = []
    try:
        at = await followed(store, directory)
        async for key in store.list_prefix(at):
            found.append(key if at == directory else api.join_key(directory, key.removeprefix(at).lstrip("/")))
    except _ABSENT as exc:
        _only_if_empty(directory, found, exc)
    return [key for key in found if key.startswith(prefix)]


async def _names(store: api.Store, directory: str) -> list[str]:
    found: list[str] = []
    try:
        async for info in store.list_dir(await followed(store, directory)):
            found.append(info.name)
    except _ABSENT as exc:
        _only_if_empty(directory, found, exc)
    return found


def _only_if_absent(key: str, exc: StoreError) -> None:
    """Raise ReadError if a directory or a file is in the place of a chunk, because None would read as fill values.

    Metadata documents are exempt: zarr looks for them below every name in a group, even below files.
    """
    if not isinstance(exc, NotFound) and key.rpartition("/")[2] not in DOCUMENTS:
        raise ReadError(exc.key, exc.reason or str(type(exc).__doc__)) from exc


def _only_if_empty(directory: str, found: list[str], exc: Exception) -> None:
    """Raise ReadError if a listing failed after its first entries: a part would look like the whole."""
    if found:
        raise ReadError(directory or "/", "was removed while it was listed") from exc
