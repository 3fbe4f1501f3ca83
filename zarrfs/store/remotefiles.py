"""Reads of values behind URLs: they become reads of cached blocks, with read-ahead.

Values of up to PART bytes are one block. Larger ones are fetched in parts of that size, several in parallel ahead of a
sequential reader, or for random reads in smaller pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence

from zarrfs.cache.block_request import BlockRequest
from zarrfs.cache.blocks import Blocks
from zarrfs.cache.streams import Stream, Streams
from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import for_each
from zarrfs.config import urls
from zarrfs.config.options import Options
from zarrfs.config.redaction import split_chain, without_secrets
from zarrfs.errors import ReadError
from zarrfs.net import openers
from zarrfs.net.reach import Trust
from zarrfs.net.request_queue import PART
from zarrfs.net.responses import Entry, Page, System
from zarrfs.system.buffers import Buffer, unfilled
from zarrfs.system.localfiles import LocalFiles
from zarrfs.system.memory import memory_limit

_PIECE = 512 << 10  # bytes of a large value that are fetched for a random read
_WINDOW = 4  # parts in the first read-ahead window
_LINKS = 8  # URLs chained by "::": archives within archives
_FOUND = 65_536  # URLs whose system is cached


class RemoteFiles:
    """A reader of values behind URLs.

    Methods raise ReadError and its subclasses (TargetMissing, AccessDenied, OutOfRange, ...).

    `local` reads archives that are local files; the caller closes it. `trust` decides
    which URLs may be requested: by default all, as for URLs that the user names.
    """

    def __init__(self, options: Options, local: LocalFiles | None = None, trust: Trust | None = None) -> None:
        self.trust = Trust(options) if trust is None else trust
        self.local = LocalFiles() if local is None else local
        self._owns_local = local is None
        self.blocks = Blocks(options)
        self._options = options
        self._openers = openers.Openers(options, self.trust)
        self._archives: dict[str, System] = {}
        self._below: RemoteFiles | None = None
        self._found: LRU[str, tuple[System, str]] = LRU(_FOUND)
        self._streams = Streams(slack=PART, reads=2)
        self._bound_streams()

    # -- by URL

    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> Buffer:
        """Return exactly the bytes [offset, offset + length) of `url`, which are part of the value [low, high)."""
        system, path = self._found.get(url) or await self.find(url)
        return await self.read_at(system, path, offset, length, low, high)

    async def size(self, url: str, begin: bool = False) -> int:
        """Return the size of `url` in bytes; with `begin`, fetch the first bytes as well."""
        system, path = await self.find(url)
        size = await self.blocks.begin(self.first_block(system, path, 0, PART)) if begin else None
        if size is not None:
            return size
        found = await self.stat_at(system, path)
        if found.directory or found.size is None:
            raise ReadError(system.shown(path), "is a directory" if found.directory else "has no known size")
        self.blocks.note_size(system, path, found.size)
        return found.size

    async def find(self, url: str) -> tuple[System, str]:
        """Return (system, path in it) of a URL; if the URL is a chain, open the archive."""
        found = self._found.get(url)
        if found is None:
            chain = len(urls.protocols(url)) > 1
            found = self._found.put(url, await (self._in_archive(url) if chain else self._openers.find(url)))
        return found

    async def _in_archive(self, url: str) -> tuple[System, str]:
        """Return (the archive of a chain, the name of a member); open nothing yet."""
        from zarrfs.net.zipfiles import Read, Size, ZipSystem

        links = urls.protocols(url)
        if len(links) > _LINKS:
            raise ReadError(without_secrets(url), f"more than {_LINKS} URLs chained by '::'")
        if links[0] != "zip":
            raise ReadError(without_secrets(url), f"{links[0]} before '::' is not supported, only zip")
        head = split_chain(url)[0]
        archive = url[len(head) + 2 :]
        if archive not in self._archives:
            size: Size
            read: Read
            if urls.protocols(archive) in ([], ["file"], ["local"]):
                file = shown = os.path.abspath(urls.file_path(archive))
                name = f"file://{file}"
                size = functools.partial(self.local.size, file)
                read = lambda offset, length, low, high: self.local.read(file, offset, length)  # noqa: E731
            else:
                below = self.below()
                system, at = await below.find(archive)
                shown, name = without_secrets(archive), system.identity(at)
                size, read = functools.partial(below.size, archive), functools.partial(below.read, archive)
            options = self._options
            opened = ZipSystem(shown, name, size, read, options.document_limit, memory_limit(options))
            self._archives.setdefault(archive, opened)
        return self._archives[archive], head.partition("://")[2].strip("/")

    def below(self) -> RemoteFiles:
        """Return a RemoteFiles for the bytes of archives, with a quarter of the memory.

        A separate one prevents a deadlock: a member that waits for memory would wait for its own archive.
        """
        if self._below is None:
            cache = self.blocks.cache
            quarter = cache.max_bytes // 4
            options = dataclasses.replace(self._options, memory_limit=quarter)
            self._below = RemoteFiles(options, self.local, self.trust)
            self.blocks.ranges.beneath = self._below.blocks.ranges
            cache.resize(cache.max_bytes - quarter)
            self._bound_streams()
        return self._below

    # -- by system and path

    async def read_at(
        self, system: System, path: str, offset: int, length: int, low: int, high: int,
        expected: Entry | None = None,
    ) -> Buffer:  # fmt: skip
        """Do what read() does. `expected`: the version that the value must have, instead of the one first read."""
        if length <= 0:
            return b""
        try:
            return await self._read_at(system, path, offset, length, low, high, expected)
        except ReadError as exc:
            exc.about(system.shown(path), offset, length)
            raise

    async def _read_at(
        self, system: System, path: str, offset: int, length: int, low: int, high: int, expected: Entry | None
    ) -> Buffer:  # fmt: skip
        if high - low <= PART:
            whole = BlockRequest(system, path, low, high, expected)
            return await self.blocks.read(whole, offset, length, (offset, length))
        stream = self._streams.read((id(system), path, low), offset, offset + length)
        if offset == low and high - low <= _WINDOW * PART:
            stream.window = stream.window or high - low  # all parts, in parallel
        self.blocks.fetch_ahead(stream, BlockRequest(system, path, low, high, expected), PART)
        wanted = list(self._cover(BlockRequest(system, path, offset, offset + length, expected), low, high, stream))
        if len(wanted) == 1:
            return await self.blocks.read(wanted[0], offset, length, (offset, length))
        buffer = unfilled(length)

        async def put(one: BlockRequest) -> None:
            start, stop = max(offset, one.start), min(offset + length, one.stop)
            part = await self.blocks.read(one, start, stop - start, (offset, length))
            buffer[start - offset : stop - offset] = part

        await for_each(put, wanted)
        return buffer

    async def prefetch(self, wanted: Sequence[tuple[str, int, int]]) -> None:
        """Fetch the beginnings of values (url, low, high) into the cache; leave errors to their readers."""
        blocks = []
        for url, low, high in wanted:
            try:
                system, path = await self.find(url)
            except ReadError:
                continue
            blocks.append(self.first_block(system, path, low, high))
        await self.blocks.prefetch(blocks)

    def first_block(
        self, system: System, path: str, low: int, high: int, expected: Entry | None = None
    ) -> BlockRequest:
        """Return the first block of the value [low, high), which is what a prefetch fetches."""
        return BlockRequest(system, path, low, min(high, low + PART), expected)

    async def read_all_at(self, system: System, path: str) -> bytes:
        """Return all bytes at `path`, uncached; raise ReadError if they are more than document_limit."""
        found = await self.blocks.ranges.call(system, path, lambda: system.fetch(path, 0, None))
        return bytes(found.data)

    async def stat_at(self, system: System, path: str) -> Entry:
        """Return the entry at `path`."""
        found: Entry = await self.blocks.ranges.call(system, path, lambda: system.stat(path))
        return found

    async def look_at(self, system: System, path: str) -> Entry | None:
        """Stat the value at `path` by fetching its beginning into the cache; None: call stat_at() instead."""
        return await self.blocks.look(self.first_block(system, path, 0, PART))

    async def listing_at(self, system: System, path: str) -> list[Entry] | None:
        """Return the entries of a directory; None if the server does not list it."""
        found: list[Entry] | None = await self.blocks.ranges.call(system, path, lambda: system.listing(path))
        return found

    async def page_at(self, system: System, path: str, after: str) -> Page:
        """Return a page of all keys below `path` that come after `after`."""
        found: Page = await self.blocks.ranges.call(system, path, lambda: system.page(path, after))
        return found

    async def aclose(self) -> None:
        """Close connections and archives."""
        await self.blocks.aclose()
        for archive in self._archives.values():
            await archive.aclose()
        await self._openers.aclose()
        if self._below is not None:
            await self._below.aclose()
        if self._owns_local:
            await self.local.aclose()

    # -- large values

    def _bound_streams(self) -> None:
        """Bound read-ahead by the current size of the cache."""
        most = self.blocks.bound_ahead()
        self._streams.first, self._streams.most = min(_WINDOW * PART, most), most

    def _cover(self, read: BlockRequest, low: int, high: int, stream: Stream) -> Iterator[BlockRequest]:
        """Yield the blocks of a read of a large value: parts for a sequential read, else pieces."""
        at = read.start
        while at < read.stop:
            start = at - (at - low) % PART
            part = read._replace(start=start, stop=min(start + PART, high))
            alone = not stream.window and read.start > low and read.stop - read.start < PART
            if alone and not self.blocks.cache.has(part.key):
                start = at - (at - low) % _PIECE
                part = read._replace(start=start, stop=min(start + _PIECE, high))
            yield part
            at = part.stop
