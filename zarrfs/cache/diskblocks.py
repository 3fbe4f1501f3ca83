"""Blocks on the disk: find those of a target's pinned version, and take leases on the others before fetching them.

The name of a block contains the version of its target. If another process with the same cache directory is fetching a
block, wait for it. Blocks are written by a thread, in the order in which they came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import trio

from zarrfs.cache.block_request import Block, BlockOnDisk, BlockRequest
from zarrfs.cache.disk import LARGE, DiskCache, Lease, Turn
from zarrfs.cache.pins import Pins, Target
from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import PassLimit, in_background
from zarrfs.config.options import Options
from zarrfs.net.responses import Fetched
from zarrfs.net.versions import Pin, TargetVersion, version_from, version_of
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit

_QUEUE, _QUEUE_SHARE = 64 << 20, 8  # bytes that may wait for the disk, and at most 1/8 of the memory
_LEASED = 64 << 10  # bytes of the smallest block that other processes wait for
_TARGETS = 4096  # targets whose identity in the cache is remembered
_AT_ONCE = 4 << 20  # bytes that are read in one round of the loop
_VALID = 3600.0  # seconds for which blocks are used before the server is asked whether the target has changed
_READERS = 16  # threads that read blocks
_PATIENCE = 4.0  # seconds for writing queued blocks when the process ends; less than a daemon has for its end
# A lease holder is too slow after _SLOW times the usual duration of a request (_USUAL seconds before one is known),
# and at least _SLOW_LEAST seconds; in any case after a quarter of read_timeout=.
_USUAL, _SLOW, _SLOW_LEAST = 1.5, 10, 5.0


def queue_size(options: Options) -> int:
    """Return the number of bytes that may wait for the disk, a part of memory_limit=."""
    return min(_QUEUE, memory_limit(options) // _QUEUE_SHARE)


class DiskBlocks:
    """The blocks of one RemoteFiles in its cache directory.

    `usual` returns the usual duration of a request to a server in seconds; None before the first one.
    """

    def __init__(self, options: Options, pins: Pins, usual: Callable[[], float | None]) -> None:
        assert options.cache_dir is not None
        self.options = options
        self._pins, self._usual = pins, usual
        self._cache = DiskCache(options.cache_dir, options.cache_size)
        pins.remember = self._remember
        self._targets: LRU[Target, str] = LRU(_TARGETS)
        self._readers = trio.CapacityLimiter(_READERS)
        self._round = PassLimit(_AT_ONCE)
        self._jobs: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        self._queue_max = queue_size(options)  # bytes
        self._put = self._done = 0  # bytes that were queued, counted by the loop, and written, by the thread
        self._idle = trio.Event()
        self._idle.set()
        self._closed = False

    async def aclose(self) -> None:
        """Write queued blocks, for at most a few seconds, and close the cache."""
        self._closed = True
        with trio.move_on_after(_PATIENCE):
            await self._idle.wait()
        self._cache.close()

    # -- reading

    async def part(self, block: BlockOnDisk, at: int, length: int) -> Buffer | None:
        """Return bytes of a block; None if they are no longer in the page cache, so that it must be verified again."""
        if length > _AT_ONCE:
            return await trio.to_thread.run_sync(self._cache.part, block, at, length, limiter=self._readers)
        while not self._round.take(length):
            await trio.lowlevel.checkpoint()
        return self._cache.part(block, at, length)

    async def known(self, wanted: BlockRequest, valid: bool = True) -> TargetVersion | None:
        """Return the version of a target that its server last reported; None if unknown or, with `valid`, too old."""
        target = self._target(wanted)
        try:
            known = self._cache.version(target, now=True)
        except BlockingIOError:
            known = await trio.to_thread.run_sync(self._cache.version, target, limiter=self._readers)
        return None if known is None or (valid and known[1] <= self._oldest()) else known[0]

    def at_once(self, wanted: BlockRequest) -> Block | None:
        """Return the block if it can be read from the page cache now; otherwise, or if it is too large, None."""
        try:
            return self._find(wanted, now=True)[0]
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
        every = await trio.to_thread.run_sync(
            lambda: {one.key: self._look_or_lease(one) for one in wanted}, limiter=self._readers
        )
        found = {key: block for key, (block, _, _) in every.items() if block is not None}
        leases = {key: lease for key, (_, _, lease) in every.items() if lease is not None}
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

    async def _look_or_lease_soon(self, wanted: BlockRequest, stays: bool) -> tuple[Block | None, bool, Lease | None]:
        """Run _look_or_lease(): here if the block is in the page cache, otherwise in a thread."""
        if self._cache.local:
            try:
                block, old = self._find(wanted, now=True)
                if block is not None or old:
                    return block, old, None
            except BlockingIOError:
                pass
        return await trio.to_thread.run_sync(self._look_or_lease, wanted, stays, limiter=self._readers)

    def _look_or_lease(
        self, wanted: BlockRequest, stays: bool = False
    ) -> tuple[Block | None, bool, Lease | None]:
        """Return the two results of _find() and, on a miss, the lease on the block (None: fetch without one).

        `stays`: as for _find().
        """
        block, old = self._find(wanted, stays=stays)
        if block is not None or old or wanted.stop - wanted.start < _LEASED or not self._keeps(wanted):
            return block, old, None
        lease = self._cache.take(self._target(wanted), wanted.start, wanted.stop)
        if lease is not None and lease.held:  # its last holder may have written the block since _find()
            block, _ = self._find(wanted, stays=stays)
            if block is not None:
                self._cache.release(lease)
                lease = None
        return block, False, lease

    def _find(self, wanted: BlockRequest, now: bool = False, stays: bool = False) -> tuple[Block | None, bool]:
        """Return (the block or None, whether there may be one of a version that was confirmed too long ago).

        `now`: raise BlockingIOError instead of waiting for the disk. `stays`: return a BlockOnDisk if possible.
        """
        at, target = wanted.at, self._target(wanted)
        pin, version = None, version_of(wanted.expected) if wanted.expected is not None else None
        if wanted.expected is None:
            pin = self._pins.get(at)
            if pin is None:
                known = self._cache.version(target, now)
                if known is None:
                    return None, False
                (tag, size), seen = known
                if seen <= self._oldest() or self._pins.is_longer(at, size):  # readers were shown a smaller size
                    return None, True
                pin = self._pins.put(at, Pin(tag, size, certain=False, noted=True))
            version = pin.version
        if version is None:
            return None, False
        stop = min(wanted.stop, version.size)
        if stop <= wanted.start:
            return None, False
        if now and (stop - wanted.start > LARGE or not self._round.take(stop - wanted.start)):
            raise BlockingIOError
        found = self._cache.read(target, version, wanted.start, stop, now, stays)
        if found is not None and pin is not None:
            pin.certain = True
        return found, False

    # -- writing

    def _keeps(self, wanted: BlockRequest) -> bool:
        """Return whether a block will be written to the disk when it is fetched, as far as that is known."""
        if wanted.expected is not None and version_of(wanted.expected) is None:
            return False
        pin = self._pins.get(wanted.at)
        return pin is None or pin.kept

    def _remember(self, wanted: BlockRequest, version: TargetVersion) -> None:
        self._later(0, self._cache.remember, self._target(wanted), version, time.time())

    def write(self, wanted: BlockRequest, found: Fetched, pinned: TargetVersion | None) -> None:
        """Queue a block for writing, unless its version is unknown. `pinned`: its version if it came without one."""
        pin = None
        if wanted.expected is not None:
            version = version_of(wanted.expected)
        else:
            pin = self._pins.get(wanted.at)
            version = version_from(found.tag, found.total) or pinned
        if pin is not None:
            pin.kept = version is not None
        if version is None or not len(found.data):
            return
        size = len(found.data)
        if self._put - self._done + size <= max(self._queue_max, size):
            self._later(size, self._cache.write, self._target(wanted), version, wanted.start, found.data, wanted.run)
        else:
            self._cache.drop()
        if pin is not None:
            self._pins.note(wanted, pin, version)

    def _later(self, size: int, job: Callable[..., None], *args: Any) -> None:
        """Do a job in the thread that writes; after aclose(), here, for it is the release of a lease."""
        if self._closed:
            if job == self._cache.release:
                job(*args)
            return
        self._jobs.append((size, job, args))
        self._put += size
        if self._idle.is_set():
            self._idle = trio.Event()
            in_background(self._work)

    async def _work(self) -> None:
        try:
            while self._jobs:
                await trio.to_thread.run_sync(self._do, abandon_on_cancel=True)
        finally:
            self._idle.set()

    def _do(self) -> None:
        """Do the queued jobs in a thread, and those that come meanwhile."""
        while self._jobs:
            size, job, args = self._jobs.popleft()
            job(*args)
            self._done += size

    # -- leases

    async def wait(self, wanted: BlockRequest, lease: Lease) -> Block | None:
        """Wait for the lease holder to fetch the block, and return the block; None if the caller must fetch it."""
        patience, turn = self._patience(), Turn.WAIT
        while turn is Turn.WAIT:
            await trio.sleep(lease.pause())
            turn = await trio.to_thread.run_sync(self._cache.look, lease, patience, limiter=self._readers)
        changes = self._pins.changes
        block, _ = await trio.to_thread.run_sync(self._find, wanted, True, limiter=self._readers)
        return self._still(block, changes)

    def _patience(self) -> float:
        """Return the seconds after which a lease holder is too slow to wait for."""
        usual = self._usual() or _USUAL
        return min(max(_SLOW * usual, _SLOW_LEAST), self.options.read_timeout / 4)

    def leave(self, lease: Lease) -> None:
        """Release a lease, as soon as the fetched blocks are on the disk."""
        if lease.held:
            self._later(0, self._cache.release, lease)
