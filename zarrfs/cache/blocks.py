"""Blocks: ranges of targets, from the cache in memory, the one on disk (diskblocks.py), or requests to servers.

Of a target whose values are read in the order of their offsets, units are fetched ahead: aligned ranges that contain
many small values, or parts of large ones. The version of a target that is read is decided in pins.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import trio

from zarrfs.cache.block_request import Block, BlockOnDisk, BlockRequest
from zarrfs.cache.memory import Ahead, BlockCache, arrived
from zarrfs.cache.pins import Pins
from zarrfs.cache.streams import Stream, Streams
from zarrfs.concurrency.lru import LRU
from zarrfs.config.options import Options
from zarrfs.errors import OutOfRange, ReadError
from zarrfs.net.request_queue import GAP, RequestQueue
from zarrfs.net.responses import Entry, Fetched, System
from zarrfs.net.versions import version_of
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit, tune_heap

if TYPE_CHECKING:
    from zarrfs.cache.diskblocks import DiskBlocks

log = logging.getLogger(__name__)

_LARGE, _DROPPABLE = 128 << 10, 4096  # bytes of a large block; number of large blocks in _droppable
_UNIT, _UNITS = 256 << 10, 64  # bytes of a unit; units that are fetched ahead at most
_TINY = 16 << 10  # bytes of the largest value that look() does not keep on disk: to request it again takes as long
_COALESCED = 1 << 20  # bytes of the largest block that the queue coalesces with others
_ENDLESS = 1 << 62  # for the size of a target that is not known yet


class Blocks:
    """The blocks of one RemoteFiles."""

    def __init__(self, options: Options) -> None:
        self.ranges = RequestQueue(options, lambda server: self.cache.suspend(server))
        tune_heap()
        self._options = options
        self._pins = Pins(self.ranges)
        self._disk: DiskBlocks | None = None
        queue = 0  # bytes that may wait for the disk
        if options.cache_dir is not None:
            from zarrfs.cache.diskblocks import DiskBlocks, queue_size

            queue = queue_size(options)
            self._disk = DiskBlocks(options, self._pins, self.ranges.usual)
        self.cache: BlockCache[Block] = BlockCache(memory_limit(options) - queue, self._is_paid, self.ranges.is_out)
        self._beginning: dict[str, trio.CapacityLimiter] = {}  # by server
        self._droppable: LRU[Hashable, bool] = LRU(_DROPPABLE)  # large blocks in memory that are on the disk, too
        self._in_order = Streams(slack=GAP, reads=4)
        self.bound_ahead()

    async def read(self, wanted: BlockRequest, offset: int, length: int, read: tuple[int, int]) -> Buffer:
        """Return the bytes [offset, offset + length) of a target, all of them in the block `wanted`.

        `read`: offset and length of the whole read, for errors. Raise ReadError or a subclass: OutOfRange if the
        target is shorter, TargetChanged if it has another version.
        """
        at = offset - wanted.start
        block = await self._get(wanted, length)
        while isinstance(block, BlockOnDisk):
            if at + length > block.length:
                raise self._out_of_range(wanted, block.length, read)
            assert self._disk is not None
            found = await self._disk.piece(block, at, length)
            if found is not None:
                return found
            self.cache.discard(wanted.key)
            block = await self._get(wanted, length, whole=True)
        if at + length > len(block):
            raise self._out_of_range(wanted, len(block), read)
        if at + length == len(block) and self._droppable.pop(wanted.key, False):
            self.cache.discard(wanted.key)  # read to its end: its memory takes the next one
        return memoryview(block)[at : at + length]

    def _out_of_range(self, wanted: BlockRequest, size: int, read: tuple[int, int]) -> OutOfRange:
        """Return the error of a read beyond the end of a target, whose block `wanted` has `size` bytes."""
        end = wanted.start + size
        known = self._pins.size(wanted.at)
        # an empty block alone only bounds the size
        total = str(end) if size or not wanted.start else f"at most {end}" if known is None or known > end else known
        asked = f"bytes [{read[0]}, {read[0] + read[1]}) were asked for"
        return OutOfRange(wanted.system.shown(wanted.path), f"has {total} bytes, {asked}")

    async def _get(self, wanted: BlockRequest, taken: int, whole: bool = False) -> Block:
        """Return the block, cut at the end of the target; the caller uses `taken` bytes of it.

        `whole`: a fetch that begins here returns bytes, not a BlockOnDisk.
        """
        key = wanted.key
        found = self.cache.peek(key)
        if found is not None:
            return found
        if 2 * taken > wanted.stop - wanted.start and not self.cache.has(key) and (disk := self._disk_for(wanted)):
            # not kept in memory: the page cache has it, and fresh memory is slow
            found = await disk.find_now(wanted)
            if found is not None:
                return found
        # as move_on_after(), at a third of its cost; the lines after the block run only if the time is over
        with trio.CancelScope(deadline=trio.current_time() + self._options.read_timeout):
            return await self.cache.get(
                key, wanted.stop - wanted.start, lambda: self._obtain(wanted, whole=whole), wanted.server
            )
        where = wanted.system.shown(wanted.path)
        raise ReadError(where, self.ranges.too_late(wanted.system, wanted.path))

    def note_size(self, system: System, path: str, size: int) -> None:
        """Note the size that readers are shown: for them, a longer version is TargetChanged.

        Raise TargetChanged if the pinned version has another size.
        """
        self._pins.note_size(BlockRequest(system, path, 0, 0), size)

    # -- the first block of a value whose attributes are not known yet

    async def look(self, wanted: BlockRequest) -> Entry | None:
        """Stat a value by a request for its first block, `wanted`, which is cached for its reader.

        None if the block may be on disk, or if the response does not contain the attributes: the caller must request
        them. Raise ReadError.
        """
        disk = self._disk_for(wanted)
        if disk is not None and await disk.knows(wanted):
            return None
        async with self._on_disk(wanted) as (block, _):
            found = await self._first(wanted) if block is None else None
            if found is None or found.total is None:
                return None
            strong = found.tag is not None and found.tag.startswith('"')
            entry = Entry("", False, found.total, found.mtime_ns, found.tag, found.html, strong)
            wanted, version = wanted._replace(stop=min(wanted.stop, found.total), expected=entry), version_of(entry)
            self.cache.put_ahead(wanted.key, found.data)
            if disk is not None and version is not None and found.tag is not None and len(found.data) > _TINY:
                disk.write(wanted, found.data, version)
            return entry

    async def begin(self, wanted: BlockRequest) -> int | None:
        """Return the size of a target by fetching its first block, `wanted`; None if the caller must request it.

        Raise ReadError.
        """
        disk = self._disk_for(wanted)
        version = None if disk is None else await disk.version(wanted)
        if version is not None:
            self._pins.note_size(wanted, version.size)  # the server may have a longer version by now
            return version.size
        async with self._on_disk(wanted) as (block, _):
            if block is not None:  # another process has fetched it meanwhile
                return self._pins.size(wanted.at)
            found = await self._first(wanted)
            if found is None:
                return None
            self._pins.check(wanted, found)
            self._write(wanted, found)
            if found.total is not None and found.ranged:
                self.cache.put_ahead(wanted._replace(stop=min(wanted.stop, found.total)).key, found.data)
            return found.total

    async def _first(self, wanted: BlockRequest) -> Fetched | None:
        """Fetch a block whose size is not known; None if memory is short."""
        server, holder = wanted.server, object()
        limit = self._beginning.get(server)
        if limit is None:
            limit = self._beginning[server] = trio.CapacityLimiter(self._options.host_requests)
        async with limit:
            if not self.cache.reserve(holder, wanted.stop - wanted.start, server):
                return None
            try:
                return await self.ranges.fetch(wanted.system, wanted.path, wanted.start, wanted.stop)
            finally:
                self.cache.release(holder)

    # -- read-ahead

    def bound_ahead(self) -> int:
        """Bound the read-ahead by the options and the present size of the cache; return its bytes for each reader."""
        most = min(self._options.prefetch, self.cache.max_bytes // 4)
        self._in_order.first, self._in_order.most = _UNIT, min(most, _UNITS * _UNIT)
        return most

    def ahead(self, wanted: BlockRequest) -> Ahead | None:
        """Fetch a block ahead of its readers, as BlockCache.ahead()."""
        return self.cache.ahead(
            wanted.key, wanted.stop - wanted.start, lambda: self._obtain(wanted, ahead=True), wanted.server
        )

    def fetch_ahead(self, stream: Stream, value: BlockRequest, size: int) -> None:
        """Start fetching the blocks of `size` bytes in the window of a stream through a value, as far as they fit."""
        at = max(stream.started, stream.at - (stream.at - value.start) % size)
        while stream.window and at < min(stream.at + stream.window, value.stop):
            block = value._replace(start=at, stop=min(at + size, value.stop))
            if not self.cache.has(block.key):
                ahead = self.ahead(block)
                if ahead is None:
                    break
                stream.blocks.append((block.stop, ahead))
            at = stream.started = block.stop

    async def prefetch(self, wanted: Sequence[BlockRequest]) -> None:
        """Fetch blocks into the cache, as far as there is room; return when they have arrived or failed.

        If cancelled, drop the remaining ones.
        """
        await arrived([ahead for ahead in map(self.ahead, wanted) if ahead is not None])

    def _is_paid(self, key: Hashable) -> bool:
        """Return whether the request of a small block that is fetched ahead was sent: then keep it."""
        assert isinstance(key, tuple)
        # the key without the version
        return (*key[:2], *key[3:]) in self.ranges.sent_ahead

    async def aclose(self) -> None:
        """Write the blocks that wait for the disk, for at most a few seconds."""
        if self._disk is not None:
            await self._disk.aclose()

    # -- a block from the nearest place

    async def _obtain(self, wanted: BlockRequest, ahead: bool = False, whole: bool = False) -> Block:
        """Return a block: cut out of units, from the disk, or from its server.

        `ahead`: it is read-ahead. `whole`: return bytes, not a BlockOnDisk.
        """
        target = wanted._replace(start=0, stop=self._pins.size(wanted.at) or _ENDLESS)
        units = self._units(wanted, target.stop)
        stream = self._in_order.read(wanted.at, wanted.start, wanted.stop) if units and not ahead else None
        if units and all(self.cache.has(unit.key) for unit in units):
            if stream is not None and stream.started:  # not one whose units come from the disk: it fetches nothing
                self.fetch_ahead(stream, target, _UNIT)
            cut = await self._from_units(wanted, units)
            if cut is not None:
                return cut
        batched = ahead and wanted.stop - wanted.start <= _COALESCED
        async with self._on_disk(wanted, units, batched, whole) as (block, parts):
            if block is not None:
                return block
            if parts:
                for unit, part in zip(units, parts, strict=True):
                    self.cache.put_ahead(unit.key, part)
                return _cut(wanted, units, parts)
            if stream is not None:
                self.fetch_ahead(stream, target, _UNIT)
            return await self._from_server(wanted, ahead)

    def _disk_for(self, wanted: BlockRequest) -> DiskBlocks | None:
        """Return the cache on disk; None if bytes come without a version: old ones could not be recognised there."""
        return None if self._disk is None or self._pins.has_no_version(wanted) else self._disk

    def _on_disk(
        self, wanted: BlockRequest, units: Sequence[BlockRequest] = (), batched: bool = False, whole: bool = True
    ) -> contextlib.AbstractAsyncContextManager[tuple[Block | None, list[Block]]]:
        """Do what DiskBlocks.find() does; without a disk, nothing is found."""
        nothing: tuple[Block | None, list[Block]] = None, []
        disk = self._disk_for(wanted)
        return contextlib.nullcontext(nothing) if disk is None else disk.find(wanted, units, batched, whole)

    @staticmethod
    def _units(wanted: BlockRequest, size: int) -> list[BlockRequest]:
        """Return the units that contain a value of a target of `size` bytes; [] if it is a unit, or has a version."""
        if wanted.expected is not None:
            return []
        starts = range(wanted.start - wanted.start % _UNIT, wanted.stop, _UNIT)
        units = [wanted._replace(start=start, stop=min(start + _UNIT, size)) for start in starts]
        return units if units[0].key != wanted.key else []

    async def _from_units(self, wanted: BlockRequest, units: Sequence[BlockRequest]) -> Buffer | None:
        """Cut a value out of units that are in memory or being fetched; None if one is missing or fails."""
        parts = []
        try:
            for unit in units:
                part = await self.cache.join(unit.key)
                if part is None:
                    return None
                parts.append(part)
        except ReadError as exc:
            log.debug("%s", exc)
            return None
        return _cut(wanted, units, parts)

    async def _from_server(self, wanted: BlockRequest, ahead: bool) -> Buffer:
        found = await self.ranges.fetch(wanted.system, wanted.path, wanted.start, wanted.stop, ahead)
        self._pins.check(wanted, found)
        await self._pins.confirm_recent(wanted, found)
        if self._write(wanted, found) and len(found.data) >= _LARGE:
            self._droppable.put(wanted.key, True)
        return found.data

    def _write(self, wanted: BlockRequest, found: Fetched) -> bool:
        """Queue checked bytes for the disk; return False if they came without a version, or if it keeps none now."""
        version = self._pins.version(wanted) if found.tag is not None else None
        return self._disk is not None and version is not None and self._disk.write(wanted, found.data, version)


def _cut(wanted: BlockRequest, units: Sequence[BlockRequest], parts: Sequence[Block]) -> Buffer:
    """Return the bytes of a block out of the bytes of units; fewer if the target ends in one of them."""
    found = bytearray()
    for unit, part in zip(units, parts, strict=True):
        assert not isinstance(part, BlockOnDisk)  # a unit is not large
        found += memoryview(part)[max(wanted.start - unit.start, 0) : wanted.stop - unit.start]
        if len(part) < unit.stop - unit.start:
            break
    return found
