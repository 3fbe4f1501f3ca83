"""Blocks on the disk: find those of a target's pinned version, and take leases on the others before fetching them.

The name of a block contains the version of its target. If another process with the same cache directory is fetching a
block, wait for it. Blocks are written by a thread, in the order in which they came.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import trio

from zarrfs.cache.block_request import Block, BlockOnDisk, BlockRequest
from zarrfs.cache.disk import LARGE, DiskCache, lease_name
from zarrfs.cache.pins import Pins, Target
from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import PassLimit, in_background
from zarrfs.config.options import Options
from zarrfs.net.versions import TargetVersion
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import memory_limit

T = TypeVar("T")

_QUEUE, _QUEUE_SHARE = 64 << 20, 8  # bytes that may wait for the disk, and at most 1/8 of the memory
_LEASED = 64 << 10  # bytes of the smallest block that other processes wait for
_TARGETS = 4096  # targets whose identity in the cache is remembered
_PASS = 4 << 20  # bytes that are read in one pass of the loop
_VALID = 3600.0  # seconds for which blocks are used before the server is asked whether the target has changed
_SKEW = 300.0  # seconds by which the clocks of nodes may differ
_READERS = 16  # threads that read blocks
_CLOSING = 4.0  # seconds for writing queued blocks when the process ends; less than a daemon has for its end
_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE = 0.005, 0.25, 0.3  # of a waiter: seconds, and a fraction of its wait so far
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
        pins.record = self.record
        self._targets: LRU[Target, str] = LRU(_TARGETS)
        self._threads = trio.CapacityLimiter(_READERS)
        self._pass = PassLimit(_PASS)
        self._together: list[Callable[[], None]] = []  # jobs of read-ahead that a thread is about to do
        self._done_together = trio.Event()
        self._jobs: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()  # for the thread that writes
        self._queue_max = queue_size(options)  # bytes
        self._put = self._done = 0  # bytes that were queued, counted by the loop, and written, by the thread
        self._idle = trio.Event()
        self._idle.set()
        self._closed = False

    async def aclose(self) -> None:
        """Write queued blocks, for at most a few seconds, and close the cache."""
        self._closed = True
        with trio.move_on_after(_CLOSING):
            await self._idle.wait()
        self._cache.close()

    # -- reading

    async def piece(self, block: BlockOnDisk, at: int, length: int) -> Buffer | None:
        """Return bytes of a block; None if they are no longer in the page cache, so that it must be verified again."""
        if length > _PASS:
            return await self._in_thread(lambda: self._cache.piece(block, at, length))
        while not self._pass.take(length):
            await trio.lowlevel.checkpoint()
        return self._cache.piece(block, at, length)

    async def version(self, wanted: BlockRequest, together: bool = False) -> TargetVersion | None:
        """Return the version under which blocks of a target may be on the disk; None if there can be none.

        It is the expected or pinned one, or that which the server last reported. If that was too long ago, ask the
        server. Raise TargetChanged.
        """
        version = self._pins.version(wanted)
        if version is not None or self._pins.has_no_version(wanted):
            return version
        version, fresh = await self._recorded_soon(wanted, together)
        if version is None or fresh:
            return version
        await self._pins.confirm(wanted, trio.current_time())
        return self._pins.version(wanted)

    async def knows(self, wanted: BlockRequest) -> bool:
        """Return whether blocks of a target may be on the disk, of whatever version."""
        return (await self._recorded_soon(wanted))[0] is not None

    def find_now(self, wanted: BlockRequest) -> Block | None:
        """Return the block if it can be read from the page cache now; otherwise, or if it is too large, None."""
        try:
            version, fresh = self._pins.version(wanted), True
            if version is None and not self._pins.has_no_version(wanted):
                version, fresh = self._recorded(wanted, now=True)
            found = self._look(wanted, version, now=True) if version is not None and fresh else None
        except BlockingIOError:
            return None
        return found if found is None or self._is_pinned(wanted, version) else None

    async def find(
        self, wanted: BlockRequest, units: Sequence[BlockRequest] = (), together: bool = False, stays: bool = False
    ) -> tuple[Block | None, list[Block]]:
        """Return (the block, []), or (None, the `units` that contain it), or (None, []). Raise TargetChanged.

        `together`: return at the same time as other such calls, so that requests for neighbours begin together.
        `stays`: return a BlockOnDisk if the block is large.
        """
        version = await self.version(wanted, together)
        if version is None:
            return None, []

        def look(now: bool) -> tuple[Block | None, list[Block]]:
            found, parts = self._look(wanted, version, now, stays), []
            for unit in units if found is None else ():
                part = self._look(unit, version, now)
                if part is None:
                    return None, []
                parts.append(part)
            return found, parts

        try:
            found = look(now=True)
        except BlockingIOError:
            found = await self._in_thread(lambda: look(now=False), together)
        return found if found == (None, []) or self._is_pinned(wanted, version) else (None, [])

    async def _recorded_soon(self, wanted: BlockRequest, together: bool = False) -> tuple[TargetVersion | None, bool]:
        """Run _recorded(), in a thread if it has to wait for the disk."""
        try:
            return self._recorded(wanted, now=True)
        except BlockingIOError:
            return await self._in_thread(lambda: self._recorded(wanted), together)

    def _recorded(self, wanted: BlockRequest, now: bool = False) -> tuple[TargetVersion | None, bool]:
        """Return (the version that the server of a target last reported, whether to use it without asking again)."""
        found = self._cache.version(self._target(wanted), now)
        if found is None:
            return None, False
        version, seen = found
        fresh = max(time.time() - _VALID, self.options.asked_since) < seen < time.time() + _SKEW
        return version, fresh and not self._pins.is_longer(wanted.at, version.size)

    def _look(
        self, wanted: BlockRequest, version: TargetVersion, now: bool = False, stays: bool = False
    ) -> Block | None:  # fmt: skip
        """Return the block of a version. `now`: raise BlockingIOError instead of waiting for the disk."""
        stop = min(wanted.stop, version.size)
        if stop <= wanted.start:
            return None
        if now and (stop - wanted.start > LARGE or not self._pass.take(stop - wanted.start)):
            raise BlockingIOError
        return self._cache.read(self._target(wanted), version, wanted.start, stop, now, stays)

    def _is_pinned(self, wanted: BlockRequest, version: TargetVersion | None) -> bool:
        """Return whether blocks of this version may be used; if no version is pinned or expected, pin this one."""
        return version is not None and (wanted.expected is not None or self._pins.put(wanted.at, version) == version)

    def _target(self, wanted: BlockRequest) -> str:
        """Return the identity of a target, from a table because computing it costs more."""
        return self._targets.get(wanted.at) or self._targets.put(wanted.at, wanted.target)

    # -- threads that read

    async def _in_thread(self, job: Callable[[], T], together: bool = False) -> T:
        """Do a job in a thread. Those that begin `together`, in one pass of the loop, share one and end together."""
        found: list[T] = []
        if together:
            if not self._together:
                self._done_together = trio.Event()
                in_background(self._do_together, self._done_together)
            self._together.append(lambda: found.append(job()))
            with trio.CancelScope(shield=True):  # a thread is not cancelled, and may have taken a lease
                await self._done_together.wait()
        return found[0] if found else await trio.to_thread.run_sync(job, limiter=self._threads)

    async def _do_together(self, done: trio.Event) -> None:
        try:
            await trio.lowlevel.checkpoint()
            jobs, self._together = self._together, []
            await trio.to_thread.run_sync(lambda: [job() for job in jobs], limiter=self._threads)
        finally:
            done.set()

    # -- leases

    @contextlib.asynccontextmanager
    async def lease(self, wanted: BlockRequest, together: bool = False) -> AsyncIterator[Block | None]:
        """Hold the lease on a block that find() has not found, while the caller fetches it.

        If another process has the lease, wait for it. Yield the block if it is on the disk then. If the lease cannot
        be taken, or the wait is too long, yield None without it. Raise TargetChanged.
        """
        if wanted.stop - wanted.start < _LEASED or self._pins.has_no_version(wanted):
            yield None
            return
        lease = lease_name(self._target(wanted), wanted.start, wanted.stop)
        held = await self._in_thread(lambda: self._cache.take(lease), together)
        if held is False:
            held = await self._wait(lease)
        if held is None:
            yield None
            return
        try:
            found, _ = await self.find(wanted, (), together)  # the last holder may have written it meanwhile
            yield found
        finally:
            self._later(0, self._cache.release, lease)  # when the block is on the disk

    async def _wait(self, lease: str) -> bool | None:
        """Wait until the lease is free, or its holder is too slow, and take it. Return None if it cannot be taken."""
        began = since = trio.current_time()
        holder, patience = None, self._patience()
        while (now := trio.current_time()) - began < 2 * patience:
            await trio.sleep(min(max(_FIRST_PAUSE, (now - began) * _PAUSE), _LONGEST_PAUSE))
            held = await self._in_thread(lambda: self._cache.take(lease))
            if held is not False:
                return held
            now, found = trio.current_time(), await self._in_thread(lambda: self._cache.holder(lease))
            if found != holder:
                holder, since = found, now
            elif now - since >= patience:  # it was killed, or is stopped
                await self._in_thread(lambda: self._cache.release(lease))
        return None

    def _patience(self) -> float:
        """Return the seconds after which a lease holder is too slow to wait for."""
        usual = self._usual() or _USUAL
        return min(max(_SLOW * usual, _SLOW_LEAST), self.options.read_timeout / 4)

    # -- writing

    def write(self, wanted: BlockRequest, data: Buffer, version: TargetVersion) -> None:
        """Queue a block for writing; drop it if too many wait."""
        size = len(data)
        if size and self._put - self._done + size <= max(self._queue_max, size):
            self._later(size, self._cache.write, self._target(wanted), version, wanted.start, data)

    def record(self, wanted: BlockRequest, version: TargetVersion) -> None:
        """Record that the server of a target has just reported this version."""
        self._later(0, self._cache.record, self._target(wanted), version, time.time())

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
