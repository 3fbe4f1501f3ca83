"""DiskBlocks: finds the blocks of a target's pinned version on the disk, and takes leases on those to be fetched.

A block of another version than the pinned one is absent. If none is pinned, the version that was reported last counts:
that of the target's version record, or of the block. If another process with the same cache directory is fetching a
block, wait for it. Blocks are written by a thread, in the order in which they came.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import trio

from zarrfs.cache.block_request import Block, BlockOnDisk, BlockRequest
from zarrfs.cache.disk import LARGE, DiskCache, Stored
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
# A lease ends after _SLOW times the usual duration of a request (_USUAL seconds before one is known), and at least
# _SLOW_LEAST seconds; in any case after a quarter of read_timeout=.
_USUAL, _SLOW, _SLOW_LEAST = 1.5, 10, 5.0


class _Found(NamedTuple):
    """A block, or the units that contain it, as found on the disk.

    If no version was pinned, the server reported theirs at the time `seen` (seconds since 1970).
    """

    version: TargetVersion
    seen: float | None
    block: Block | None
    parts: list[Block]


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
        self._batch: list[Callable[[], None]] = []  # jobs that a thread is about to do
        self._batch_done = trio.Event()
        self._jobs: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()  # for the thread that writes
        self._queue_max = queue_size(options)  # bytes
        self._put = self._done = 0  # bytes that were queued, counted by the loop, and written, by the thread
        self._idle = trio.Event()
        self._idle.set()

    async def aclose(self) -> None:
        """Write queued blocks, for at most a few seconds, and close the cache."""
        with trio.move_on_after(_CLOSING):
            await self._idle.wait()
            await trio.to_thread.run_sync(self._cache.close, abandon_on_cancel=True)

    # -- reading

    async def piece(self, block: BlockOnDisk, at: int, length: int) -> Buffer | None:
        """Return bytes of a block; None if they are no longer in the page cache, so that it must be verified again."""
        await self._pass_with(length)
        return self._cache.piece(block, at, length)

    async def version(self, wanted: BlockRequest) -> TargetVersion | None:
        """Return the version under which blocks of a target may be on the disk; None if there are none.

        It is the expected or pinned one, or that which the server last reported. If that was too long ago, ask the
        server. Raise TargetChanged.
        """
        version = self._pins.version(wanted)
        if version is not None:
            return version
        known = await self._reported(wanted)
        if known is None or self._is_fresh(wanted, known.version, known.seen):
            return known and known.version
        await self._pins.confirm(wanted, trio.current_time())
        return self._pins.version(wanted)

    async def knows(self, wanted: BlockRequest) -> bool:
        """Return whether blocks of a target may be on the disk, of whatever version."""
        return await self._reported(wanted) is not None

    async def _reported(self, wanted: BlockRequest) -> Stored | None:
        target = self._target(wanted)
        try:
            return self._cache.reported(target, wanted.start, now=True)
        except BlockingIOError:
            return await self._in_thread(lambda: self._cache.reported(target, wanted.start))

    async def find_now(self, wanted: BlockRequest) -> Block | None:
        """Return the block if the page cache has it; otherwise, or if it is too large, None."""
        size = wanted.stop - wanted.start
        if size > LARGE:
            return None
        await self._pass_with(size)
        try:
            found = self._look(self._target(wanted), wanted, self._pins.version(wanted), now=True)
        except BlockingIOError:
            return None
        if found is None or not self._is_fresh(wanted, found.version, found.seen):
            return None
        return found.block if self._is_pinned(wanted, found) else None

    @contextlib.asynccontextmanager
    async def find(
        self, wanted: BlockRequest, units: Sequence[BlockRequest] = (), batched: bool = False, whole: bool = True
    ) -> AsyncIterator[tuple[Block | None, list[Block]]]:
        """Yield (the block, []), or (None, the `units` that contain it), or (None, []). Raise TargetChanged.

        In the last case the caller fetches the block, and holds the lease on it meanwhile. If another process has the
        lease, wait for its block, until its lease is too old. If no lease can be taken, go on without one.

        `batched`: return at the same time as other such calls, so that requests for neighbours begin together. Not
        `whole`: yield a BlockOnDisk if the block is large.
        """
        target, version = self._target(wanted), self._pins.version(wanted)

        def look() -> tuple[_Found | None, bool | None]:
            found, held = self._look(target, wanted, version, units, whole=whole), None
            if found is None and wanted.stop - wanted.start >= _LEASED:
                held = self._cache.take(target, wanted.start, self._patience())
                if held:  # the last holder may have written it meanwhile
                    found = self._look(target, wanted, version, units, whole=whole)
            return found, held

        began = trio.current_time()
        found, held = await self._in_thread(look, batched)
        while held is False and (waited := trio.current_time() - began) < 2 * self._patience():
            await trio.sleep(min(max(_FIRST_PAUSE, waited * _PAUSE), _LONGEST_PAUSE))
            found, held = await self._in_thread(look)
        try:
            usable = found is not None and await self._may_use(wanted, found)
            yield (found.block, found.parts) if found is not None and usable else (None, [])
        finally:
            if held:  # the block was not written
                self._later(0, self._cache.release, target, wanted.start)

    def _patience(self) -> float:
        """Return the seconds after which a lease ends."""
        usual = self._usual() or _USUAL
        return min(max(_SLOW * usual, _SLOW_LEAST), self.options.read_timeout / 4)

    def _look(
        self, target: str, wanted: BlockRequest, version: TargetVersion | None, units: Sequence[BlockRequest] = (),
        now: bool = False, whole: bool = True,
    ) -> _Found | None:  # fmt: skip
        """Look for a block, or the units that contain it, of a version; None: the one that was reported last.

        `now`: raise BlockingIOError instead of waiting for the disk.
        """
        block = self._cache.read(target, wanted.start, wanted.stop, version, now, whole)
        stored = [] if block is None else [block]
        for unit in units if block is None else ():
            part = self._cache.read(target, unit.start, unit.stop, version, now)
            if part is None:
                return None
            stored.append(part)
        seen = None
        if stored and version is None:
            record = None if stored[0].is_target else self._cache.reported(target, now=now)
            latest = max(stored if record is None else [*stored, record], key=lambda one: one.seen)
            version, seen = latest.version, latest.seen
        if version is None or not stored or any(one.version != version for one in stored):
            return None
        found = [one.block for one in stored]
        return _Found(version, seen, found[0], []) if block is not None else _Found(version, seen, None, found)

    async def _pass_with(self, length: int) -> None:
        """Wait for a pass of the loop that has room for reading `length` bytes from the page cache."""
        while not self._pass.take(length):
            await trio.lowlevel.checkpoint()

    async def _may_use(self, wanted: BlockRequest, found: _Found) -> bool:
        """Return whether the blocks are of the pinned version; if it was reported too long ago, ask the server."""
        fresh = self._is_fresh(wanted, found.version, found.seen)
        return (fresh or await self._pins.confirm(wanted, trio.current_time())) and self._is_pinned(wanted, found)

    def _is_fresh(self, wanted: BlockRequest, version: TargetVersion, seen: float | None) -> bool:
        """Return whether to use a version that was reported at the time `seen` without asking the server again."""
        if seen is None:
            return True
        recent = max(time.time() - _VALID, self.options.asked_since) < seen < time.time() + _SKEW
        return recent and not self._pins.is_longer(wanted.at, version.size)

    def _is_pinned(self, wanted: BlockRequest, found: _Found) -> bool:
        """Return whether the blocks may be used; if no version is pinned or expected, pin theirs."""
        return wanted.expected is not None or self._pins.put(wanted.at, found.version) == found.version

    def _target(self, wanted: BlockRequest) -> str:
        """Return the identity of a target, from a table because computing it costs more."""
        return self._targets.get(wanted.at) or self._targets.put(wanted.at, wanted.target)

    # -- threads that read

    async def _in_thread(self, job: Callable[[], T], batched: bool = False) -> T:
        """Do a job in a thread. The `batched` ones of one pass of the loop share a thread, and end together."""
        found: list[T] = []
        if batched:
            if not self._batch:
                self._batch_done = trio.Event()
                in_background(self._do_batch, self._batch_done)
            self._batch.append(lambda: found.append(job()))
            with trio.CancelScope(shield=True):  # a thread is not cancelled, and may have taken a lease
                await self._batch_done.wait()
        return found[0] if found else await trio.to_thread.run_sync(job, limiter=self._threads)

    async def _do_batch(self, done: trio.Event) -> None:
        try:
            await trio.lowlevel.checkpoint()
            jobs, self._batch = self._batch, []
            await trio.to_thread.run_sync(lambda: [job() for job in jobs], limiter=self._threads)
        finally:
            done.set()

    # -- writing

    def write(self, wanted: BlockRequest, data: Buffer, version: TargetVersion) -> bool:
        """Queue a block for writing; return False if too many wait, or if the disk keeps none of this size now."""
        size = len(data)
        room = self._put - self._done + size <= max(self._queue_max, size)
        queued = size > 0 and room and self._cache.keeps(size)
        if queued:
            self._later(size, self._cache.write, self._target(wanted), wanted.start, data, version, time.time())
        return queued

    def record(self, wanted: BlockRequest, version: TargetVersion) -> None:
        """Record that the server of a target has just reported this version."""
        if wanted.system.sends_versions:
            self._later(0, self._cache.record, self._target(wanted), version, time.time())

    def _later(self, size: int, job: Callable[..., None], *args: Any) -> None:
        """Do a job in the thread that writes."""
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
