"""Blocks: ranges of targets by way of the cache in memory, the one on disk, and requests to servers.

The first bytes received of a target determine its version, by tag and size. From then on, bytes of another version are
an error, or with stale=reread the target is read again. Where bytes come without tag and size (SFTP, some object
stores), the attributes of the target are requested: once a second, and before and after what is kept on disk. On disk,
the key of a block contains its version. Blocks that another process with the same cache directory is fetching are
waited for (fetchlocks.py).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from zarrfs.cache.block_request import BlockRequest
from zarrfs.cache.memory import Ahead, BlockCache
from zarrfs.cache.runs import Runs
from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.single_flight import SingleFlight
from zarrfs.concurrency.tasks import Round
from zarrfs.config.options import Options
from zarrfs.errors import OutOfRange, ReadError, TargetChanged
from zarrfs.net.request_queue import TINY, RequestQueue
from zarrfs.net.responses import Entry, Fetched
from zarrfs.net.systems import System
from zarrfs.net.versions import Pin, TargetVersion, differs, note_unversioned, tag_of, version_from, version_of
from zarrfs.system.buffers import Buffer
from zarrfs.system.memory import heap, memory_limit

if TYPE_CHECKING:
    from zarrfs.cache.disk import DiskCache
    from zarrfs.cache.diskindex import IndexRow
    from zarrfs.cache.fetchlocks import Lease

log = logging.getLogger(__name__)

_UNIT = 1 << 20  # bytes: what one lease is taken on for many tiny values
_LARGE = 128 << 10  # bytes: of the heap, such blocks are what it grows by
_PINS = 65_536  # targets whose version is remembered
_TARGETS = 4096  # targets whose identity in the cache on disk is remembered
_AT_ONCE = 4 << 20  # bytes that are read from it in one round of the loop
_ON_DISK = 16 << 10  # bytes that a BlockOnDisk counts as in the cache in memory
_READERS = 16  # threads that read blocks from the disk
_QUEUE_SHARE = 8  # of the memory: what blocks that wait for the disk may take
_BEHIND = 0.02  # seconds between looks at a disk that is slower than the server
_PATIENCE = 4.0  # seconds for blocks that are on their way to the disk when all ends: less than a daemon has
_FRESH = 1.0  # seconds for which a target is assumed unchanged, if its bytes come without a version
_USUAL, _SLOW, _SLOW_LEAST = 1.5, 10, 5.0  # others' requests: seconds of the first, times the usual, seconds: too slow


class BlockOnDisk:
    """A large block that was verified and stays on the disk: what is read of it is in the page cache.

    A copy of it in memory would be fresh memory, which costs more than to read the parts of the block as they are
    wanted. It counts as _ON_DISK bytes, so that the bound of the cache in memory also bounds how many it knows.
    """

    __slots__ = ("row",)

    def __init__(self, row: IndexRow) -> None:
        self.row = row

    def __len__(self) -> int:
        return _ON_DISK


Block: TypeAlias = Buffer | BlockOnDisk


class Blocks:
    """The blocks of one RemoteFiles."""

    def __init__(self, options: Options) -> None:
        self.ranges = RequestQueue(options, self._keep_run)
        self._heap = heap()
        self._options = options
        self._pins: LRU[tuple[int, str], Pin] = LRU(_PINS)
        self._targets: LRU[tuple[int, str], str] = LRU(_TARGETS)
        self._asking: SingleFlight[tuple[int, str]] = SingleFlight()
        self._disk: DiskCache | None = None
        self._queue = 0  # bytes that may wait for the disk
        if options.cache_dir is not None and options.cache != "none":
            from zarrfs.cache.disk import QUEUE, DiskCache

            self._queue = min(QUEUE, memory_limit(options) // _QUEUE_SHARE)
            self._disk = DiskCache(
                options.cache_dir, options.cache_size, options.cache_min_free, self._queue, not options.fills
            )
        self.cache: BlockCache[Block] = BlockCache(memory_limit(options) - self._queue, self._is_paid)
        self._readers = trio.CapacityLimiter(_READERS)
        self._beginning = trio.CapacityLimiter(options.host_requests)
        self._runs = Runs(options.coalesce_gap, options.coalesce_size, 0)
        self.bound_ahead()
        self._hit_bytes = 0
        self._round = Round(_AT_ONCE)
        self._slow_disk = trio.Lock()  # one waits for all

    async def read(self, wanted: BlockRequest, offset: int, length: int, read: tuple[int, int]) -> Buffer:
        """Return the bytes [offset, offset + length) of a target, all of them in the block `wanted`.

        `read`: offset and length of the whole read, for errors. ReadError and its kinds: OutOfRange where the target
        ends before, TargetChanged for another version.
        """
        at = offset - wanted.start
        block = await self._get(wanted, length)
        while isinstance(block, BlockOnDisk):
            if at + length > block.row.length:
                raise self._out_of_range(wanted, block.row.length, read)
            found = await self._part(block, at, length)
            if found is not None:
                return found
            self.cache.discard(wanted.key)
            block = await self._get(wanted, length, whole=True)
        if at + length > len(block):
            raise self._out_of_range(wanted, len(block), read)
        return memoryview(block)[at : at + length]

    async def _part(self, block: BlockOnDisk, at: int, length: int) -> Buffer | None:
        """Return bytes of a block on the disk; None if they left the page cache, and are to be verified again."""
        assert self._disk is not None
        if length > _AT_ONCE:
            return await trio.to_thread.run_sync(self._disk.part, block.row, at, length, limiter=self._readers)
        while not self._round.take(length):
            await trio.lowlevel.checkpoint()
        return self._disk.part(block.row, at, length)

    def _out_of_range(self, wanted: BlockRequest, size: int, read: tuple[int, int]) -> OutOfRange:
        """Return the error of a read beyond the end of a target, whose block `wanted` has `size` bytes."""
        end = wanted.start + size
        pin = self._pins.get(wanted.at)
        known = None if pin is None else pin.size
        # an empty block alone only bounds the size
        said = str(end) if size or not wanted.start else f"at most {end}" if known is None or known > end else known
        asked = f"bytes [{read[0]}, {read[0] + read[1]}) were asked for"
        return OutOfRange(wanted.system.shown(wanted.path), f"has {said} bytes, {asked}")

    async def _get(self, wanted: BlockRequest, taken: int, whole: bool = False) -> Block:
        """Return the block, cut at the end of the target; the caller uses `taken` bytes of it.

        `whole`: not one that stays on the disk.
        """
        key = wanted.key
        found = self.cache.peek(key)
        if found is not None:
            self._hit_bytes += taken
            return found
        if self._disk is not None and 2 * taken > wanted.stop - wanted.start and not self.cache.has(key):
            found = self._at_once(wanted)  # and not kept: the kernel does that, and fresh memory is slow
            if found is not None:
                return found
        # what fail_after() does, at a third of its cost
        with trio.CancelScope(deadline=trio.current_time() + self._options.read_timeout):
            return await self.cache.get(key, wanted.stop - wanted.start, lambda: self._obtain(wanted, whole=whole))
        where = wanted.system.shown(wanted.path)
        raise ReadError(where, self.ranges.too_late(wanted.system, wanted.path, wanted.start, wanted.stop))

    async def look(self, wanted: BlockRequest) -> Entry | None:
        """Stat a value by a request for its first block, `wanted`, which is kept for its reader.

        None if the response does not contain its attributes: request them. ReadError.
        """
        if self._disk is not None and await self._version(self._disk, wanted, 0.0) is not None:
            return None  # the bytes may be there
        self._pins.pop(wanted.at, None)
        await self._get(wanted._replace(alone=True), 0)
        pin = self._pins.pop(wanted.at, None)
        head = None if pin is None else pin.head
        if head is None or head.total is None:
            self.cache.discard(wanted.key)
            return None
        found = Entry("", False, head.total, head.mtime_ns, head.tag, head.html, (head.tag or "").startswith('"'))
        self.cache.rename(wanted.key, wanted._replace(stop=min(wanted.stop, head.total), expected=found).key)
        return found

    def ahead(self, wanted: BlockRequest) -> Ahead | None:
        """Fetch a block ahead of its readers, as BlockCache.ahead()."""
        return self.cache.ahead(wanted.key, wanted.stop - wanted.start, lambda: self._obtain(wanted, ahead=True))

    async def begin(self, wanted: BlockRequest) -> int | None:
        """Return the size of a target by fetching its first block, `wanted`; None: request it alone. ReadError."""
        if self._disk is not None:
            return await self._begin_on_disk(self._disk, wanted)
        most = wanted.stop
        async with self._beginning:
            if not self.cache.reserve(most):
                return None
            try:
                found = await self.ranges.fetch(wanted.system, wanted.path, 0, most, True)
            finally:
                self.cache.release(most)
        self._check(wanted, found)
        if found.total is not None and found.ranged:
            self.cache.put_ahead(wanted._replace(stop=min(most, found.total)).key, found.data)
        return found.total

    async def _begin_on_disk(self, disk: DiskCache, wanted: BlockRequest) -> int | None:
        """As begin(), with a cache on disk: use a block that it has, and write the fetched one to it."""
        known = await self._version(disk, wanted, self._oldest())
        if known is not None:
            return known.size
        if await self._version(disk, wanted, 0.0) is not None:  # an old version: it may still be valid
            return None
        async with self._beginning:
            await self._get(wanted._replace(alone=True), 0)
        pin = self._pins.get(wanted.at)
        if pin is not None and pin.size is not None:
            self.cache.rename(wanted.key, wanted._replace(stop=min(wanted.stop, pin.size)).key)
            return pin.size
        return None

    async def prefetch(self, wanted: Sequence[BlockRequest]) -> None:
        """Bring blocks into the cache; returns when they are there. Cancelled, it lets go of the rest."""
        wanted = list({one.key: one for one in wanted if not self.cache.has(one.key)}.values())
        found: dict[Hashable, Block] = {}
        leases: dict[Hashable, Lease] = {}
        if self._disk is not None and wanted:  # one thread for all: neighbours that are missing stay together
            found, leases = await trio.to_thread.run_sync(self._all_from_disk, wanted, limiter=self._readers)
        started = []
        for one in wanted:
            ahead = self.cache.ahead(one.key, one.stop - one.start, self._given(one, found.get(one.key), leases))
            if ahead is not None:
                started.append(ahead)
            else:
                self._leave(leases.pop(one.key, None))
        try:
            for ahead in started:
                await ahead.done.wait()
        finally:
            for ahead in started:
                ahead.drop()
            for one in wanted if leases else ():  # those of what was cancelled before it began
                self._leave(leases.pop(one.key, None))

    def adjust(self, options: Options) -> None:
        """Take over what may change of the options; a smaller bound on the disk holds from the next block on."""
        self._options = options
        self.ranges.adjust(options)
        self.cache.resize(memory_limit(options) - self._queue)
        self._beginning.total_tokens = options.host_requests
        self.bound_ahead()
        if self._disk is not None:
            self._disk.resize(options.cache_size, options.cache_min_free)

    def bound_ahead(self) -> int:
        """Bound the read-ahead of a target by the options and the present size of the cache; return its bytes."""
        self._runs.ahead = min(self._options.prefetch, self.cache.max_bytes // 4)
        return self._runs.ahead

    def _is_paid(self, key: Hashable) -> bool:
        """Return whether the request of a small block that is fetched ahead was sent: then keep it."""
        assert isinstance(key, tuple)
        return (*key[:2], *key[3:]) in self.ranges.sent_ahead

    def stats(self) -> dict[str, Any]:
        """Return counters."""
        cache = {**self.cache.stats(), "hit_bytes": self._hit_bytes}
        disk = {} if self._disk is None else {"disk": self._disk.stats()}
        return {**self.ranges.stats(), "cache": cache, **disk, "prefetch": self.cache.ahead_stats()}

    async def aclose(self) -> None:
        """Wait a little for blocks that are on their way to the disk."""
        if self._disk is not None:
            await trio.to_thread.run_sync(self._disk.close, _PATIENCE)

    # -- from where it is nearest

    def _given(self, wanted: BlockRequest, data: Block | None, leases: dict[Hashable, Lease]) -> Callable[[], Any]:
        async def give() -> Block:
            return await self._in_turn(wanted, True, leases.pop(wanted.key, None)) if data is None else data

        return give

    async def _obtain(self, wanted: BlockRequest, ahead: bool = False, whole: bool = False) -> Block:
        in_order = not ahead and wanted.expected is None and not wanted.alone
        covering = self._runs.covering(wanted.at, wanted.start, wanted.stop) if in_order else []
        if covering == [(wanted.start, wanted.stop)]:
            covering = []  # the run has the key of this very block, and is gone: it would wait for itself
        if covering:
            self._runs.read(wanted.at, wanted.start, wanted.stop, functools.partial(self._run, wanted))
            found = await self._from_runs(wanted, covering)
            if found is not None:
                return found
        lease = None
        if self._disk is not None and self._keeps(wanted):
            stays = not (whole or wanted.run)
            block, old, lease = await self._from_disk_or_lease(wanted, stays)
            if old and await self._ask(wanted):
                block, _, lease = await self._from_disk_or_lease(wanted, stays)
            if block is not None:
                return block
        if in_order and not covering:
            self._runs.read(wanted.at, wanted.start, wanted.stop, functools.partial(self._run, wanted))
        return await self._in_turn(wanted, ahead, lease)

    def _run(self, wanted: BlockRequest, low: int, high: int) -> tuple[int, Ahead] | None:
        pin = self._pins.get(wanted.at)
        if pin is not None and pin.size is not None:
            high = min(high, pin.size)
        ahead = self.ahead(wanted._replace(start=low, stop=high, run=True)) if low < high else None
        return None if ahead is None else (high, ahead)

    async def _from_runs(self, wanted: BlockRequest, covering: list[tuple[int, int]]) -> Buffer | None:
        """Cut the block out of runs that are cached or being fetched; None if one of them fails."""
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
        return found if self._pins.get(wanted.at) is pin else None  # else they may be of two versions

    async def _from_server(self, wanted: BlockRequest, ahead: bool) -> Buffer:
        system, path, at = wanted.system, wanted.path, wanted.at
        pin = self._pins.get(at)
        unknown = pin is None or (pin.version is None and self._is_due(pin))
        if self._disk is not None and unknown and wanted.expected is None and not system.sends_versions:
            await self._ask(wanted)  # bytes are kept if the version is the same before and after
        if self._options.fills and self._disk is not None and self._disk.is_behind():
            async with self._slow_disk:
                while self._disk.is_behind():  # noqa: ASYNC110  # it is a thread's, and a wait for it has no other end
                    await trio.sleep(_BEHIND)
        while True:
            pin = self._pins.get(at)
            version = None if pin is None else pin.version
            found = await self.ranges.fetch(system, path, wanted.start, wanted.stop, ahead)
            if len(found.data) >= _LARGE:
                self._heap.grown()
            self._check(wanted, found)
            if found.tag is not None or wanted.expected is not None:
                now = self._pins.get(at)
                version = None if now is None else now.version
                break
            if not await self._is_same(wanted, found):
                version = None
            if pin is None or self._pins.get(at) is pin:
                break  # else it was replaced meanwhile (stale=reread), by what may not be the version of these bytes
        alone = not (found.part and found.data) or self._is_blind(wanted, found)
        if self._disk is not None and alone:
            self._write(self._disk, wanted, found, version, wanted.run)
        return found.data

    def _is_blind(self, wanted: BlockRequest, found: Fetched) -> bool:
        """Return whether only attributes show the version of bytes that may have changed."""
        known = found.tag is not None or found.total is not None or wanted.expected is not None
        refused = wanted.system.sends_versions and not found.data  # beyond the end: such an answer has no version
        return not (known or refused or wanted.system.immutable)

    def _is_due(self, pin: Pin) -> bool:
        return pin.asked is None or trio.current_time() >= pin.asked + _FRESH

    async def _is_same(self, wanted: BlockRequest, found: Fetched) -> bool:
        """Return whether the target has the pinned version after bytes have come without a tag. TargetChanged."""
        pin = self._pins.get(wanted.at)
        kept = self._disk is not None and (pin is None or pin.kept)
        if not self._is_blind(wanted, found):  # its size comes with the bytes, or it never changes
            ask = self._disk is not None and (pin is None or pin.asked is None)
        else:
            ask = kept or pin is None or self._is_due(pin)
        if ask:
            return await self._ask(wanted)
        return pin is not None and pin.agreed

    def _check(self, wanted: BlockRequest, found: Fetched) -> None:
        """Raise TargetChanged where the bytes are of another version than the one to read."""
        expected = wanted.expected
        if expected is not None:
            if differs(expected.tag, expected.size, found):
                raise TargetChanged(wanted.system.shown(wanted.path), "has changed since it was first read")
            return
        at = wanted.at
        pin = self._pins.get(at)
        if pin is not None and differs(pin.tag, pin.size, found):
            if not self._options.targets_since:  # else the disk keeps the version that all processes of the mount read
                self._note(wanted, found)
            if pin.certain and self._options.stale == "error":
                raise TargetChanged(wanted.system.shown(wanted.path), "has changed since it was first read")
            log.warning("%s: has changed; the new version is read (stale=reread)", wanted.system.shown(wanted.path))
            self.cache.drop(lambda key: isinstance(key, tuple) and key[:2] == at)
            pin = None
        if pin is None:
            head = None if wanted.start else found._replace(data=b"")
            self._pins.put(at, Pin(found.tag, found.total, head=head))
            blind = self._is_blind(wanted, found)  # then its attributes are requested next
            # an answer without bytes may be one of status 416, which has no ETag
            if found.tag is None and found.data and not (wanted.system.immutable or blind):
                note_unversioned(wanted.system.host(wanted.path), wanted.system.shown(wanted.path))
        else:
            pin.certain = True
            pin.size = found.total if pin.size is None else pin.size
            pin.tag = pin.tag or found.tag  # a Last-Modified of the last second is no version, and becomes one later

    # -- the disk

    def _oldest(self) -> float:
        """Return the earliest time of a valid version, in seconds since 1970."""
        return max(time.time() - self._options.cache_validity, self._options.asked_since)

    def _target(self, wanted: BlockRequest) -> str:
        """Return the cached identity of the target on the disk: computing it costs more than a lookup."""
        return self._targets.get(wanted.at) or self._targets.put(wanted.at, wanted.target)

    async def _version(self, disk: DiskCache, wanted: BlockRequest, newer_than: float) -> TargetVersion | None:
        """As DiskCache.version()."""
        try:
            return disk.version(self._target(wanted), newer_than, now=True)
        except BlockingIOError:
            return await trio.to_thread.run_sync(disk.version, self._target(wanted), newer_than, limiter=self._readers)

    def _all_from_disk(self, wanted: Sequence[BlockRequest]) -> tuple[dict[Hashable, Block], dict[Hashable, Lease]]:
        """Return (blocks of `wanted` that are there, leases on the rest); runs in a worker thread."""
        assert self._disk is not None
        found, leases = {}, {}
        units: dict[tuple[str, int], list[BlockRequest]] = {}  # tiny values: one lease for all of a unit
        for one in wanted:
            tiny = one.stop - one.start < TINY
            data, old, lease = (*self._from_disk(one), None) if tiny else self._look_or_lease(one)
            if data is not None:
                found[one.key] = data
            elif lease is not None:
                leases[one.key] = lease
            elif tiny and not old and self._keeps(one):
                units.setdefault((self._target(one), one.start - one.start % _UNIT), []).append(one)
        for (target, start), ones in units.items():
            lease = self._disk.leases.take(target, start, start + _UNIT)
            if lease is not None:
                lease.users = len(ones)
                leases.update((one.key, lease) for one in ones)
        return found, leases

    def _at_once(self, wanted: BlockRequest) -> Block | None:
        """Return the block if it is on the disk and in the page cache."""
        try:
            return self._from_disk(wanted, True, True)[0]
        except BlockingIOError:
            return None

    async def _from_disk_or_lease(
        self, wanted: BlockRequest, stays: bool
    ) -> tuple[Block | None, bool, Lease | None]:  # fmt: skip
        """Run _look_or_lease(): at once if the kernel has all of it in memory, else in a thread."""
        assert self._disk is not None
        if self._disk.local:
            try:
                return self._look_or_lease(wanted, now=True)
            except BlockingIOError:
                pass
        return await trio.to_thread.run_sync(self._look_or_lease, wanted, False, stays, limiter=self._readers)

    def _look_or_lease(
        self, wanted: BlockRequest, now: bool = False, stays: bool = False
    ) -> tuple[Block | None, bool, Lease | None]:
        """Return what _from_disk() finds; on a miss, the lease on the block (None: fetch without).

        `now`, `stays`: as for _from_disk().
        """
        assert self._disk is not None
        data, old = self._from_disk(wanted, now=now, stays=stays)
        if data is not None or old or not self._keeps(wanted):
            return data, old, None
        lease = self._disk.leases.take(self._target(wanted), wanted.start, wanted.stop)
        if lease is not None and lease.held:  # somebody else may have finished since we looked
            try:
                data, _ = self._from_disk(wanted, True, now)
            except BlockingIOError:
                self._disk.leases.release(lease)
                raise
            if data is not None:
                self._disk.leases.release(lease)
                return data, False, None
        if lease is not None:
            lease.users = 1
        return data, False, lease

    def _keeps(self, wanted: BlockRequest) -> bool:
        """Return whether a block is kept on disk once it has come, as far as that is known."""
        if wanted.expected is not None and version_of(wanted.expected) is None:
            return False
        pin = self._pins.get(wanted.at)
        return pin is None or pin.kept

    def _from_disk(
        self, wanted: BlockRequest, again: bool = False, now: bool = False, stays: bool = False
    ) -> tuple[Block | None, bool]:
        """Return (the block or None, whether there may be one of a version that was verified too long ago).

        `again`: it was not there a moment ago. `now`: BlockingIOError where that means waiting for the disk. `stays`:
        as BlockOnDisk, if it can be one.
        """
        assert self._disk is not None
        at, target = wanted.at, self._target(wanted)
        pin, version = None, version_of(wanted.expected) if wanted.expected is not None else None
        if wanted.expected is None:
            pin = self._pins.get(at)
            if pin is None:
                known = self._disk.version(target, self._oldest(), now)
                if known is None:
                    return None, self._disk.version(target, 0.0, now) is not None
                since = self._options.targets_since  # another process of this mount may have read that version
                certain = bool(since) and self._disk.version(target, since, now) is not None
                pin = self._pins.get(at) or self._pins.put(at, Pin(known.tag, known.size, certain, noted=True))
            version = pin.version
        if version is None:
            return None, False
        stop = min(wanted.stop, version.size)
        found = self._disk.read(target, version, wanted.start, stop, again, now, self._round.take, stays and not now)
        if found is not None and pin is not None:
            pin.certain = True
        return BlockOnDisk(found) if isinstance(found, tuple) else found, False

    async def _ask(self, wanted: BlockRequest) -> bool:
        """Compare a target with its pin, or pin it, by its attributes; False if they show no version. TargetChanged.

        Simultaneous callers share a request that begins after they have called.
        """
        began = trio.current_time()

        def answered() -> bool | None:
            pin = self._pins.get(wanted.at)
            return None if pin is None or pin.asked is None or pin.asked < began else pin.agreed

        try:
            return await self._asking.run(wanted.at, functools.partial(self._stat, wanted), answered)
        except TargetChanged:
            raise
        except ReadError as exc:
            log.debug("%s", exc)
        pin = self._pins.get(wanted.at)
        if pin is not None:
            pin.asked, pin.agreed = trio.current_time(), False
        return False

    async def _stat(self, wanted: BlockRequest) -> bool:
        """Do as _ask(). ReadError."""
        system, path, began = wanted.system, wanted.path, trio.current_time()
        entry: Entry = await self.ranges.call(system, path, lambda: system.stat(path))
        version = version_of(entry)
        self._check(wanted, Fetched(b"", tag_of(entry), entry.size, mtime_ns=entry.mtime_ns, html=entry.html))
        pin = self._pins.get(wanted.at)
        if pin is None:
            return False
        if pin.tag is None and not system.immutable:
            note_unversioned(system.host(path), system.shown(path))
        pin.asked, pin.agreed = began, version is not None and version == pin.version
        if self._disk is not None and version is not None and pin.agreed and not pin.noted:
            pin.noted = True
            self._disk.remember(self._target(wanted), version)
        return pin.agreed

    def _note(self, wanted: BlockRequest, found: Fetched) -> None:
        """Tell the disk of a version that is not the one read first: who opens the target next begins with it."""
        version = version_from(found.tag, found.total)
        if self._disk is not None and version is not None:
            self._disk.remember(self._target(wanted), version)

    def _keep_run(self, system: System, path: str, start: int, found: Fetched) -> None:
        """Write the merged range of many small reads to the disk in one piece."""
        wanted = BlockRequest(system, path, start, start + len(found.data))
        if self._disk is None:
            return
        pin = self._pins.get(wanted.at) or self._pins.put(wanted.at, Pin(found.tag, found.total))
        if differs(pin.tag, pin.size, found) or self._is_blind(wanted, found):
            return  # those who wanted its parts compare the versions, and report a change
        if found.tag is not None or pin.agreed:
            self._write(self._disk, wanted, found, pin.version, run=True)

    def _write(
        self, disk: DiskCache, wanted: BlockRequest, found: Fetched, pinned: TargetVersion | None, run: bool = False
    ) -> None:
        """Keep a block on disk, later; not where its version is unknown. `pinned`: its version if it came without."""
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
        disk.write(self._target(wanted), version, wanted.start, found.data, run)
        if pin is not None and not pin.noted:
            pin.noted = True
            disk.remember(self._target(wanted), version)

    # -- whose turn it is to fetch

    async def _in_turn(self, wanted: BlockRequest, ahead: bool, lease: Lease | None) -> Block:
        """Fetch the block, or wait for the lease holder and read it from the disk."""
        try:
            if lease is not None and not lease.held:
                found = await self._wait(wanted, lease)
                if found is not None:
                    return found
            return await self._from_server(wanted, ahead)
        finally:
            self._leave(lease)

    async def _wait(self, wanted: BlockRequest, lease: Lease) -> Block | None:
        """Wait for another process to fetch the block, and return it; None: fetch it."""
        from zarrfs.cache.fetchlocks import Turn

        assert self._disk is not None
        leases, patience, turn = self._disk.leases, self._patience(), Turn.WAIT
        while turn is Turn.WAIT:
            async with lease.lock:  # many blocks may lie in the range: one after the other looks
                if lease.held:
                    break
                await trio.sleep(lease.pause())
                if self._disk.local:
                    turn = leases.look(lease, patience)
                else:
                    turn = await trio.to_thread.run_sync(leases.look, lease, patience, limiter=self._readers)
        return (await trio.to_thread.run_sync(self._from_disk, wanted, True, limiter=self._readers))[0]

    def _patience(self) -> float:
        """Return the seconds after which a lease holder is too slow to wait for."""
        usual = self.ranges.usual() or _USUAL
        return min(max(_SLOW * usual, _SLOW_LEAST), self._options.read_timeout / 4)

    def _leave(self, lease: Lease | None) -> None:
        """Let go of a lease; the last of its users releases it, once what came is on the disk."""
        if lease is not None and self._disk is not None:
            lease.users -= 1
            if not lease.users:
                self._disk.release(lease)
