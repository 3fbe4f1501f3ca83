"""Blocks on the disk: find those of a target's pinned version, and take leases on the others before fetching them.

The key of a block contains the version of its target. If another process with the same cache directory is fetching a
block, wait for it (fetchlocks.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import trio

from zarrfs.cache.block_request import Block, BlockOnDisk, BlockRequest
from zarrfs.cache.disk import QUEUE, DiskCache
from zarrfs.cache.fetchlocks import Lease, Turn
from zarrfs.cache.pins import Pins, Target
from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import PassLimit
from zarrfs.config.options import Options
from zarrfs.net.request_queue import TINY
from zarrfs.net.responses import Fetched
from zarrfs.net.versions import Pin, TargetVersion, version_from, version_of
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit

_UNIT = 1 << 20  # bytes of a target in which all tiny values share a lease
_TARGETS = 4096  # targets whose identity in the cache is remembered
_AT_ONCE = 4 << 20  # bytes that are read in one round of the loop
_VALID = 3600.0  # seconds for which blocks are used before the server is asked whether the target has changed
_READERS = 16  # threads that read blocks
_QUEUE_SHARE = 8  # blocks that wait for the disk may take 1/8 of the memory
_PATIENCE = 4.0  # seconds for writing queued blocks when the process ends; less than a daemon has for its end
# A lease holder is too slow after _SLOW times the usual duration of a request (_USUAL seconds before one is known),
# and at least _SLOW_LEAST seconds; in any case after a quarter of read_timeout=.
_USUAL, _SLOW, _SLOW_LEAST = 1.5, 10, 5.0


def queue_size(options: Options) -> int:
    """Return the number of bytes that may wait for the disk, a part of memory_limit=."""
    return min(QUEUE, memory_limit(options) // _QUEUE_SHARE)


class DiskBlocks:
    """The blocks of one RemoteFiles in its cache directory.

    `usual` returns the usual duration of a request to a server in seconds; None before the first one.
    """

    def __init__(self, options: Options, pins: Pins, usual: Callable[[], float | None]) -> None:
        assert options.cache_dir is not None
        self.options = options
        self._pins, self._usual = pins, usual
        self._cache = DiskCache(
            options.cache_dir, options.cache_size, queue_size(options)
        )
        pins.remember = self._remember
        self._targets: LRU[Target, str] = LRU(_TARGETS)
        self._readers = trio.CapacityLimiter(_READERS)
        self._round = PassLimit(_AT_ONCE)

    def stats(self) -> dict[str, Any]:
        """Return counters."""
        return self._cache.stats()

    async def aclose(self) -> None:
        """Write queued blocks, for at most a few seconds, and close the cache."""
        await trio.to_thread.run_sync(self._cache.close, _PATIENCE)

    # -- reading

    async def part(self, block: BlockOnDisk, at: int, length: int) -> Buffer | None:
        """Return bytes of a block; None if they are no longer in the page cache, so that it must be verified again."""
        if length > _AT_ONCE:
            return await trio.to_thread.run_sync(self._cache.part, block.row, at, length, limiter=self._readers)
        while not self._round.take(length):
            await trio.lowlevel.checkpoint()
        return self._cache.part(block.row, at, length)

    async def known(self, wanted: BlockRequest, valid: bool = True) -> TargetVersion | None:
        """Return the version of a target that its server last reported; None if unknown or, with `valid`, too old."""
        newer_than = self._oldest() if valid else 0.0
        try:
            return self._cache.version(self._target(wanted), newer_than, now=True)
        except BlockingIOError:
            target = self._target(wanted)
            return await trio.to_thread.run_sync(self._cache.version, target, newer_than, limiter=self._readers)

    def at_once(self, wanted: BlockRequest) -> Block | None:
        """Return the block if it can be read from the page cache now; otherwise, or if it is too large, None."""
        try:
            return self._find(wanted, True, True)[0]
        except BlockingIOError:
            return None

    async def find_or_lease(self, wanted: BlockRequest, stays: bool) -> tuple[Block | None, Lease | None]:
        """Return (the block, None), or (None, the lease on it); the lease is None if it must be fetched without one.

        `stays`: return a BlockOnDisk if possible. If the version of the block was confirmed too long ago, ask the
        server. Raise TargetChanged.
        """
        if not self._keeps(wanted):
            return None, None
        changes = self._pins.changes
        block, old, lease = await self._look_or_lease_soon(wanted, stays)
        if old and await self._pins.ask(wanted):
            changes = self._pins.changes
            block, _, lease = await self._look_or_lease_soon(wanted, stays)
        return self._still(block, changes), lease

    async def all(self, wanted: Sequence[BlockRequest]) -> tuple[dict[Hashable, Block], dict[Hashable, Lease]]:
        """Return (blocks of `wanted` that are on disk, leases on the others), by key."""
        # one thread for all blocks, so that requests for missing neighbours begin together
        changes = self._pins.changes
        found, leases = await trio.to_thread.run_sync(self._all, wanted, limiter=self._readers)
        return found if changes == self._pins.changes else {}, leases

    def _still(self, block: Block | None, changes: int) -> Block | None:
        """Return a block, or None if a target has got another version while a thread was reading the block."""
        return block if changes == self._pins.changes else None

    def _oldest(self) -> float:
        """Return the time, in seconds since 1970, at or before which a version was confirmed too long ago."""
        return max(time.time() - _VALID, self.options.asked_since)

    def _target(self, wanted: BlockRequest) -> str:
        """Return the identity of a target, from a table because computing it costs more."""
        return self._targets.get(wanted.at) or self._targets.put(wanted.at, wanted.target)

    def _all(self, wanted: Sequence[BlockRequest]) -> tuple[dict[Hashable, Block], dict[Hashable, Lease]]:
        """Do the work of all() in a worker thread."""
        found, leases = {}, {}
        units: dict[tuple[str, int], list[BlockRequest]] = {}  # tiny values: one lease for all of a unit
        for one in wanted:
            tiny = one.stop - one.start < TINY
            data, old, lease = (*self._find(one), None) if tiny else self._look_or_lease(one)
            if data is not None:
                found[one.key] = data
            elif lease is not None:
                leases[one.key] = lease
            elif tiny and not old and self._keeps(one):
                units.setdefault((self._target(one), one.start - one.start % _UNIT), []).append(one)
        for (target, start), ones in units.items():
            lease = self._cache.leases.take(target, start, start + _UNIT)
            if lease is not None:
                lease.users = len(ones)
                leases.update((one.key, lease) for one in ones)
        return found, leases

    async def _look_or_lease_soon(self, wanted: BlockRequest, stays: bool) -> tuple[Block | None, bool, Lease | None]:
        """Run _look_or_lease(): here if everything is in the page cache, otherwise in a thread."""
        if self._cache.local:
            try:
                return self._look_or_lease(wanted, now=True)
            except BlockingIOError:
                pass
        return await trio.to_thread.run_sync(self._look_or_lease, wanted, False, stays, limiter=self._readers)

    def _look_or_lease(
        self, wanted: BlockRequest, now: bool = False, stays: bool = False
    ) -> tuple[Block | None, bool, Lease | None]:
        """Return the two results of _find() and, on a miss, the lease on the block (None: fetch without one).

        `now`, `stays`: as for _find().
        """
        data, old = self._find(wanted, now=now, stays=stays)
        if data is not None or old or not self._keeps(wanted):
            return data, old, None
        lease = self._cache.leases.take(self._target(wanted), wanted.start, wanted.stop)
        if lease is not None and lease.held:  # its last holder may have written the block since _find()
            try:
                data, _ = self._find(wanted, True, now)
            except BlockingIOError:
                self._cache.leases.release(lease)
                raise
            if data is not None:
                self._cache.leases.release(lease)
                return data, False, None
        if lease is not None:
            lease.users = 1
        return data, False, lease

    def _find(
        self, wanted: BlockRequest, again: bool = False, now: bool = False, stays: bool = False
    ) -> tuple[Block | None, bool]:
        """Return (the block or None, whether there may be one of a version that was confirmed too long ago).

        `again`: the caller has tried before. `now`: raise BlockingIOError instead of waiting for the disk. `stays`:
        return a BlockOnDisk if possible.
        """
        at, target = wanted.at, self._target(wanted)
        pin, version = None, version_of(wanted.expected) if wanted.expected is not None else None
        if wanted.expected is None:
            pin = self._pins.get(at)
            if pin is None:
                known = self._cache.version(target, self._oldest(), now)
                if known is None:
                    return None, self._cache.version(target, 0.0, now) is not None
                if self._pins.is_longer(at, known.size):  # readers were shown a smaller size
                    return None, True
                pin = self._pins.put(at, Pin(known.tag, known.size, certain=False, noted=True))
            version = pin.version
        if version is None:
            return None, False
        stop = min(wanted.stop, version.size)
        found = self._cache.read(target, version, wanted.start, stop, again, now, self._round.take, stays and not now)
        if found is not None and pin is not None:
            pin.certain = True
        return BlockOnDisk(found) if isinstance(found, tuple) else found, False

    # -- writing

    def _keeps(self, wanted: BlockRequest) -> bool:
        """Return whether a block will be written to the disk when it is fetched, as far as that is known."""
        if wanted.expected is not None and version_of(wanted.expected) is None:
            return False
        pin = self._pins.get(wanted.at)
        return pin is None or pin.kept

    def _remember(self, wanted: BlockRequest, version: TargetVersion) -> None:
        self._cache.remember(self._target(wanted), version)

    def write(
        self, wanted: BlockRequest, found: Fetched, pinned: TargetVersion | None, run: bool = False
    ) -> None:  # fmt: skip
        """Queue a block for writing, unless its version is unknown. `pinned`: its version if it came without one."""
        pin = None
        if wanted.expected is not None:
            version = version_of(wanted.expected)
        else:
            pin = self._pins.get(wanted.at)
            version = version_from(found.tag, found.total) or pinned
        if pin is not None:
            pin.kept = version is not None
        if version is None:
            return
        self._cache.write(self._target(wanted), version, wanted.start, found.data, run)
        if pin is not None:
            self._pins.note(wanted, pin, version)

    # -- leases

    async def wait(self, wanted: BlockRequest, lease: Lease) -> Block | None:
        """Wait for the lease holder to fetch the block, and return the block; None if the caller must fetch it."""
        leases, patience, turn = self._cache.leases, self._patience(), Turn.WAIT
        while turn is Turn.WAIT:
            async with lease.lock:  # many blocks may share the lease: their tasks try one after the other
                if lease.held:
                    break
                await trio.sleep(lease.pause())
                if self._cache.local:
                    turn = leases.look(lease, patience)
                else:
                    turn = await trio.to_thread.run_sync(leases.look, lease, patience, limiter=self._readers)
        changes = self._pins.changes
        block, _ = await trio.to_thread.run_sync(self._find, wanted, True, limiter=self._readers)
        return self._still(block, changes)

    def _patience(self) -> float:
        """Return the seconds after which a lease holder is too slow to wait for."""
        usual = self._usual() or _USUAL
        return min(max(_SLOW * usual, _SLOW_LEAST), self.options.read_timeout / 4)

    def leave(self, lease: Lease) -> None:
        """End the use of a lease. The last user releases it, as soon as the fetched blocks are on the disk."""
        lease.users -= 1
        if not lease.users:
            self._cache.release(lease)
