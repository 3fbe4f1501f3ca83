"""Blocks: ranges of targets, from the cache in memory, the one on disk (diskblocks.py), or requests to servers.

The version of a target that is read is decided in pins.py.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.cache.block_request import Block, BlockOnDisk, BlockRequest
from zarrfs.cache.memory import Ahead, BlockCache, arrived
from zarrfs.cache.pins import Pins, Target
from zarrfs.cache.runs import Runs
from zarrfs.config.options import Options
from zarrfs.errors import OutOfRange, ReadError
from zarrfs.net.request_queue import RequestQueue
from zarrfs.net.responses import Entry, System
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import heap, memory_limit

if TYPE_CHECKING:
    from zarrfs.cache.disk import Lease
    from zarrfs.cache.diskblocks import DiskBlocks

log = logging.getLogger(__name__)

_LARGE = 128 << 10  # bytes of blocks that make the heap grow


class Blocks:
    """The blocks of one RemoteFiles."""

    def __init__(self, options: Options) -> None:
        self.ranges = RequestQueue(options, lambda server: self.cache.suspend(server))
        self._heap = heap()
        self._options = options
        self._pins = Pins(self.ranges, self._forget)
        self._disk: DiskBlocks | None = None
        self._queue = 0  # bytes that may wait for the disk
        if options.cache_dir is not None:
            from zarrfs.cache.diskblocks import DiskBlocks, queue_size

            self._queue = queue_size(options)
            self._disk = DiskBlocks(options, self._pins, self.ranges.usual)
        self.cache: BlockCache[Block] = BlockCache(
            memory_limit(options) - self._queue, self._is_paid, self.ranges.is_out
        )
        self._beginning: dict[str, trio.CapacityLimiter] = {}  # by server
        self._runs = Runs()
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
            found = await self._disk.part(block, at, length)
            if found is not None:
                return found
            self.cache.discard(wanted.key)
            block = await self._get(wanted, length, whole=True)
        if at + length > len(block):
            raise self._out_of_range(wanted, len(block), read)
        return memoryview(block)[at : at + length]

    def _out_of_range(self, wanted: BlockRequest, size: int, read: tuple[int, int]) -> OutOfRange:
        """Return the error of a read beyond the end of a target, whose block `wanted` has `size` bytes."""
        end = wanted.start + size
        known = self._pins.size(wanted.at)
        # an empty block alone only bounds the size
        said = str(end) if size or not wanted.start else f"at most {end}" if known is None or known > end else known
        asked = f"bytes [{read[0]}, {read[0] + read[1]}) were asked for"
        return OutOfRange(wanted.system.shown(wanted.path), f"has {said} bytes, {asked}")

    async def _get(self, wanted: BlockRequest, taken: int, whole: bool = False) -> Block:
        """Return the block, cut at the end of the target; the caller uses `taken` bytes of it.

        `whole`: a fetch that begins here returns bytes, not a BlockOnDisk.
        """
        key = wanted.key
        found = self.cache.peek(key)
        if found is not None:
            return found
        if self._disk is not None and 2 * taken > wanted.stop - wanted.start and not self.cache.has(key):
            found = self._disk.at_once(wanted)  # not kept in memory: the page cache has it, and fresh memory is slow
            if found is not None:
                self._runs.passed(wanted.at, wanted.start, wanted.stop)
                return found
        # as move_on_after(), at a third of its cost; the lines after the block run only if the time is over
        with trio.CancelScope(deadline=trio.current_time() + self._options.read_timeout):
            return await self.cache.get(
                key, wanted.stop - wanted.start, lambda: self._obtain(wanted, whole=whole), wanted.server
            )
        where = wanted.system.shown(wanted.path)
        raise ReadError(where, self.ranges.too_late(wanted.system, wanted.path))

    async def look(self, wanted: BlockRequest) -> Entry | None:
        """Stat a value by a request for its first block, `wanted`, which is cached for its reader.

        None if the block may be on disk, or if the response does not contain the attributes: the caller must request
        them. Raise ReadError.
        """
        if self._disk is not None and await self._disk.known(wanted, valid=False) is not None:
            return None  # the block may be on disk
        self._pins.pop(wanted.at)  # so that the pin below is that of this response
        await self._get(wanted._replace(unordered=True), 0)
        pin = self._pins.pop(wanted.at)
        head = None if pin is None else pin.head
        if head is None or head.total is None:
            self.cache.discard(wanted.key)
            return None
        found = Entry("", False, head.total, head.mtime_ns, head.tag, head.html, (head.tag or "").startswith('"'))
        self.cache.rename(wanted.key, wanted._replace(stop=min(wanted.stop, head.total), expected=found).key)
        return found

    def ahead(self, wanted: BlockRequest) -> Ahead | None:
        """Fetch a block ahead of its readers, as BlockCache.ahead()."""
        return self.cache.ahead(
            wanted.key, wanted.stop - wanted.start, lambda: self._obtain(wanted, ahead=True), wanted.server
        )

    def note_size(self, system: System, path: str, size: int) -> None:
        """Note the size that readers are shown: for them, a longer version is TargetChanged.

        Raise TargetChanged if the pinned version has another size.
        """
        self._pins.note_size(BlockRequest(system, path, 0, 0), size)

    async def begin(self, wanted: BlockRequest) -> int | None:
        """Return the size of a target by fetching its first block, `wanted`; None if the caller must request it.

        Raise ReadError.
        """
        if self._disk is not None:
            return await self._begin_on_disk(self._disk, wanted)
        most, server, holder = wanted.stop, wanted.server, object()
        async with self._begins(server):
            if not self.cache.reserve(holder, most, server):
                return None
            try:
                found = await self.ranges.fetch(wanted.system, wanted.path, 0, most, True)
            finally:
                self.cache.release(holder)
        self._pins.check(wanted, found)
        if found.total is not None and found.ranged:
            self.cache.put_ahead(wanted._replace(stop=min(most, found.total)).key, found.data)
        return found.total

    async def _begin_on_disk(self, disk: DiskBlocks, wanted: BlockRequest) -> int | None:
        """As begin(), with a cache on disk: use a block that it has, and write the fetched one to it."""
        known = await disk.known(wanted)
        if known is not None:
            self._pins.note_size(wanted, known.size)  # the server may have a longer version by now
            return known.size
        if await disk.known(wanted, valid=False) is not None:  # an old version: it may still be valid
            return None
        async with self._begins(wanted.server):
            await self._get(wanted._replace(unordered=True), 0)
        size = self._pins.size(wanted.at)
        if size is not None:
            self.cache.rename(wanted.key, wanted._replace(stop=min(wanted.stop, size)).key)
        return size

    def _begins(self, server: str) -> trio.CapacityLimiter:
        """Return the limit on concurrent calls of begin() for one server: others do not wait for its outages."""
        found = self._beginning.get(server)
        if found is None:
            found = self._beginning[server] = trio.CapacityLimiter(self._options.host_requests)
        return found

    async def prefetch(self, wanted: Sequence[BlockRequest]) -> None:
        """Fetch blocks into the cache, as far as there is room; return when they have arrived or failed.

        If cancelled, drop the remaining ones.
        """
        wanted = list({one.key: one for one in wanted if not self.cache.has(one.key)}.values())
        sizes, room = itertools.accumulate(one.stop - one.start for one in wanted), self.cache.max_bytes // 2
        wanted = [one for one, size in zip(wanted, sizes, strict=True) if size <= room]  # ahead() refuses the others
        found: dict[Hashable, Block] = {}
        leases: dict[Hashable, Lease] = {}
        if self._disk is not None and wanted:
            found, leases = await self._disk.all(wanted)
        started = []
        for one in wanted:
            fetch = self._given(one, found.get(one.key), leases)
            ahead = self.cache.ahead(one.key, one.stop - one.start, fetch, one.server)
            if ahead is not None:
                started.append(ahead)
            else:
                self._leave(leases.pop(one.key, None))
        try:
            await arrived(started)
        finally:
            for one in wanted if leases else ():  # leases of fetches that were cancelled before they began
                self._leave(leases.pop(one.key, None))

    def bound_ahead(self) -> int:
        """Bound the read-ahead of a target by the options and the present size of the cache; return its bytes."""
        self._runs.ahead = min(self._options.prefetch, self.cache.max_bytes // 4)
        return self._runs.ahead

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

    def _given(self, wanted: BlockRequest, data: Block | None, leases: dict[Hashable, Lease]) -> Callable[[], Any]:
        """Return the function for BlockCache.ahead(): it returns `data` from the disk, or fetches the block."""
        async def give() -> Block:
            return await self._in_turn(wanted, True, leases.pop(wanted.key, None)) if data is None else data

        return give

    async def _obtain(self, wanted: BlockRequest, ahead: bool = False, whole: bool = False) -> Block:
        """Return a block: cut out of runs, from the disk, or from its server.

        `ahead`, `whole`: as in ahead() and _get().
        """
        in_order = not ahead and wanted.expected is None and not wanted.unordered
        covering = self._runs.covering(wanted.at, wanted.start, wanted.stop) if in_order else []
        if covering == [(wanted.start, wanted.stop)]:
            covering = []  # the run has the same key as this block, so this fetch would wait for itself
        if covering:
            self._runs.read(wanted.at, wanted.start, wanted.stop, functools.partial(self._run, wanted))
            found = await self._from_runs(wanted, covering)
            if found is not None:
                return found
        lease = None
        if self._disk is not None:
            block, lease = await self._disk.find_or_lease(wanted, stays=not (whole or wanted.run))
            if block is not None:
                if in_order:
                    self._runs.passed(wanted.at, wanted.start, wanted.stop)
                return block
        if in_order and not covering:
            self._runs.read(wanted.at, wanted.start, wanted.stop, functools.partial(self._run, wanted))
        return await self._in_turn(wanted, ahead, lease)

    def _run(self, wanted: BlockRequest, low: int, high: int) -> tuple[int, Ahead] | None:
        """Start fetching the run [low, high), cut at the end of the target; return (its end, the run), or None."""
        size = self._pins.size(wanted.at)
        if size is not None:
            high = min(high, size)
        ahead = self.ahead(wanted._replace(start=low, stop=high, run=True)) if low < high else None
        return None if ahead is None else (high, ahead)

    async def _from_runs(self, wanted: BlockRequest, covering: list[tuple[int, int]]) -> Buffer | None:
        """Cut the block out of runs that are cached or being fetched; None if one is missing or fails."""
        found, pin = bytearray(), self._pins.get(wanted.at)
        try:
            for low, high in covering:
                data = await self.cache.join(wanted._replace(start=low, stop=high, run=True).key)
                if data is None or isinstance(data, BlockOnDisk):
                    return None
                found += memoryview(data)[max(wanted.start - low, 0) : wanted.stop - low]
        except ReadError as exc:
            log.debug("%s", exc)
            return None
        return found if self._pins.get(wanted.at) is pin else None  # the runs may be of different versions

    async def _from_server(self, wanted: BlockRequest, ahead: bool) -> Buffer:
        pins = self._pins
        await pins.begin(wanted)
        while True:
            pin = pins.get(wanted.at)
            before = None if pin is None else pin.version
            found = await self.ranges.fetch(wanted.system, wanted.path, wanted.start, wanted.stop, ahead)
            if len(found.data) >= _LARGE:
                self._heap.grown()
            pins.check(wanted, found)
            version = await pins.version(wanted, found, before)
            shown = found.tag is not None or wanted.expected is not None
            if shown or pin is None or pins.get(wanted.at) is pin:
                break  # otherwise another version was pinned meanwhile, perhaps not that of these bytes
        if self._disk is not None and await pins.is_still(wanted, found):
            self._disk.write(wanted, found, version)
        return found.data

    def _forget(self, target: Target) -> None:
        self.cache.drop(lambda key: isinstance(key, tuple) and key[:2] == target)

    # -- leases

    async def _in_turn(self, wanted: BlockRequest, ahead: bool, lease: Lease | None) -> Block:
        """Fetch the block, or wait for the lease holder and read it from the disk."""
        try:
            if self._disk is not None and lease is not None and not lease.held:
                found = await self._disk.wait(wanted, lease)
                if found is not None:
                    return found
            return await self._from_server(wanted, ahead)
        finally:
            self._leave(lease)

    def _leave(self, lease: Lease | None) -> None:
        if lease is not None and self._disk is not None:
            self._disk.leave(lease)
