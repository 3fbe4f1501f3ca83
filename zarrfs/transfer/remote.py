"""RemoteFiles: URL -> bytes through fsspec, with retries, deadlines, checks and one cache.

Values of up to 8 MiB are fetched whole, larger ones in blocks of 4 MiB from their beginning on. A target is
pinned by its tag and size when first read: a later difference is TargetChanged.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from zarrfs.errors import OutOfRange, ReadError, TargetChanged
from zarrfs.options import Options
from zarrfs.transfer import openers
from zarrfs.transfer.answers import Entry, Fetched, Transient
from zarrfs.transfer.api import Buffer
from zarrfs.transfer.cache import BlockCache
from zarrfs.transfer.local import LocalFiles
from zarrfs.transfer.memory import memory_limit
from zarrfs.transfer.systems import System
from zarrfs.transfer.tasks import at_once
from zarrfs.transfer.trust import Trust

log = logging.getLogger("zarrfs.transfer")

T = TypeVar("T")

WHOLE = 8 << 20  # bytes: values up to this are one block
BLOCK = 4 << 20  # bytes
_PINS = 65_536  # targets whose tag is remembered
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between attempts, doubled each time

Pin = tuple[str | None, int | None]  # tag, size


class RemoteFiles:
    """Values behind URLs. Errors: ReadError and its kinds (TargetMissing, AccessDenied, OutOfRange, ...).

    `local` reads the archives that are local files, and keeps to its forbidden_device; it stays the caller's.
    `trust` says what may be reached: by default all that the user can, as for what the user names.
    """

    def __init__(self, options: Options, local: LocalFiles | None = None, trust: Trust | None = None) -> None:
        self.trust = Trust(options) if trust is None else trust
        self.local = LocalFiles() if local is None else local
        self._owns_local = local is None
        self.cache: BlockCache[Buffer] = BlockCache(memory_limit(options))
        self._options = options
        self._openers = openers.Openers(options, self, self.trust)
        self._below: RemoteFiles | None = None
        self._pins: OrderedDict[tuple[int, str], Pin] = OrderedDict()
        self._requests = self._repeated = self._bytes = 0

    # -- by URL

    async def read(self, url: str, offset: int, length: int, low: int, high: int) -> Buffer:
        """Exactly the bytes [offset, offset + length) of `url`, which are part of the value [low, high)."""
        system, path = await self._openers.find(url)
        return await self.read_at(system, path, offset, length, low, high)

    async def read_all(self, url: str) -> bytes:
        """All bytes of `url`; as read_all_at()."""
        system, path = await self._openers.find(url)
        return await self.read_all_at(system, path)

    async def size(self, url: str) -> int:
        """The size of `url` in bytes."""
        system, path = await self._openers.find(url)
        found = await self.stat_at(system, path)
        if found.directory or found.size is None:
            raise ReadError(system.shown(path), "is a directory" if found.directory else "has no known size")
        return found.size

    async def find(self, url: str) -> tuple[System, str]:
        """(system, path in it) of a URL; opens an archive where the URL is a chain."""
        return await self._openers.find(url)

    def below(self) -> RemoteFiles:
        """A RemoteFiles for the bytes of archives, with a quarter of the memory.

        Not this one: a member that waits for room would wait for its own archive.
        """
        if self._below is None:
            quarter = self.cache.max_bytes // 4
            options = dataclasses.replace(self._options, memory_limit=quarter)
            self._below = RemoteFiles(options, self.local, self.trust)
            self.cache.resize(self.cache.max_bytes - quarter)
        return self._below

    # -- by system and path

    async def read_at(
        self, system: System, path: str, offset: int, length: int, low: int, high: int,
        expected: Entry | None = None,
    ) -> Buffer:  # fmt: skip
        """As read(). `expected`: what the value must be, instead of what it was when first read."""
        if length <= 0:
            return b""
        if high - low <= WHOLE:
            block = await self._block(system, path, low, high, expected)
            return _cut(block, offset - low, length, system, path, low)
        first, last = (offset - low) // BLOCK, (offset + length - 1 - low) // BLOCK
        if first == last:
            return await self._part(system, path, first, offset, length, low, high, expected)
        buffer = bytearray(length)

        async def put(number: int) -> None:
            start = max(offset, low + number * BLOCK)
            stop = min(offset + length, low + (number + 1) * BLOCK)
            part = await self._part(system, path, number, start, stop - start, low, high, expected)
            buffer[start - offset : stop - offset] = part

        await at_once(put, range(first, last + 1))
        return buffer

    async def read_all_at(self, system: System, path: str) -> bytes:
        """All bytes at `path`, not kept; a ReadError where these are more than -o document_limit=."""
        return bytes((await self.attempts(system, path, lambda: system.fetch(path, 0, None))).data)

    async def stat_at(self, system: System, path: str) -> Entry:
        """What is at `path`."""
        return await self.attempts(system, path, lambda: system.stat(path))

    async def listing_at(self, system: System, path: str) -> list[Entry] | None:
        """The entries of a directory; None where the server shows no listing."""
        return await self.attempts(system, path, lambda: system.listing(path))

    async def attempts(self, system: System, path: str, request: Callable[[], Awaitable[T]]) -> T:
        """What `request` gives, repeated while it fails for reasons that may pass."""
        pause = _FIRST_PAUSE
        for attempt in range(self._options.retries + 1):
            try:
                self._requests += 1
                return await request()
            except Transient as exc:
                failure = exc
            if attempt < self._options.retries:
                self._repeated += 1
                log.debug("%s: %s: to be repeated", system.shown(path), failure.reason)
                await trio.sleep(max(failure.after, pause * random.uniform(0.5, 1.5)))
                pause = min(2 * pause, _LONGEST_PAUSE)
        times = f" ({self._options.retries + 1} attempts)" if self._options.retries else ""
        raise ReadError(system.shown(path), failure.reason + times) from failure

    def stats(self) -> dict[str, Any]:
        """Counters, for the log."""
        counts = {"requests": self._requests, "repeated": self._repeated, "bytes": self._bytes}
        return {**counts, "cache": self.cache.stats()}

    async def aclose(self) -> None:
        """Close connections and archives."""
        await self._openers.aclose()
        if self._below is not None:
            await self._below.aclose()
        if self._owns_local:
            await self.local.aclose()

    # -- parts

    async def _part(
        self, system: System, path: str, number: int, start: int, length: int, low: int, high: int,
        expected: Entry | None,
    ) -> Buffer:  # fmt: skip
        """`length` bytes from `start` on, all in the block `number` of a large value."""
        at = low + number * BLOCK
        block = await self._block(system, path, at, min(at + BLOCK, high), expected)
        return _cut(block, start - at, length, system, path, at)

    async def _block(
        self, system: System, path: str, start: int, stop: int, expected: Entry | None
    ) -> Buffer:
        async def fetch() -> Buffer:
            found = await self.attempts(system, path, lambda: self._whole(system, path, start, stop))
            self._check(system, path, found, expected)
            return found.data

        version = expected and (expected.size, expected.mtime_ns, expected.tag)
        return await self.cache.get((id(system), path, version, start, stop), stop - start, fetch)

    async def _whole(self, system: System, path: str, start: int, stop: int) -> Fetched:
        """One attempt at [start, stop); bytes that are missing are either beyond the end or were cut off."""
        found = await system.fetch(path, start, stop)
        self._bytes += len(found.data)
        if len(found.data) < stop - start and found.total is not None and found.total >= stop:
            raise Transient("the answer was cut off")
        if len(found.data) > stop - start:
            raise ReadError(system.shown(path), "the server sent more than it was asked for")
        return found

    def _check(self, system: System, path: str, found: Fetched, expected: Entry | None) -> None:
        """Raise TargetChanged where the bytes are of another version than the one to read."""
        if expected is not None:
            pin: Pin = expected.tag, expected.size
        else:
            pin = self._pins.setdefault((id(system), path), (found.tag, found.total))
            if len(self._pins) > _PINS:
                self._pins.popitem(last=False)
        if any(a != b and None not in (a, b) for a, b in zip(pin, found[1:3], strict=True)):
            raise TargetChanged(system.shown(path), "has changed since it was first read")


def _cut(block: Buffer, at: int, length: int, system: System, path: str, low: int) -> memoryview:
    """`length` bytes of a block from `at` on; the block starts at `low`, and ends where the value does."""
    if at + length > len(block):
        asked = f"bytes [{low + at}, {low + at + length}) were asked for"
        most = "" if block or not low else "at most "  # of a block beyond the end, that is all one knows
        raise OutOfRange(system.shown(path), f"has {most}{low + len(block)} bytes, {asked}")
    return memoryview(block)[at : at + length]
