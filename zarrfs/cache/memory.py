"""BlockCache: blocks in memory, bounded in bytes. Each is fetched by one task, for any number of readers.

The least recently read block is evicted first. Blocks that were fetched ahead for a reader that went elsewhere are
evicted before all others.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Hashable, Sequence, Sized
from typing import Generic, TypeVar

import trio

from zarrfs.concurrency.budget import MemoryBudget
from zarrfs.concurrency.lru import SizedLRU
from zarrfs.concurrency.tasks import in_background
from zarrfs.metrics.counters import CACHES, COUNTS

V = TypeVar("V", bound=Sized)


class _Fetch(Generic[V]):
    """A fetch in progress, and the number of tasks that wait for it."""

    __slots__ = ("__weakref__", "ahead", "block", "done", "error", "roomy", "scope", "waiters")

    def __init__(self, ahead: bool) -> None:
        self.ahead = ahead  # begun by ahead(): it may time out before a reader that joins it, so get() fetches again
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self.waiters = 0
        self.roomy = ahead  # it does not wait for the budget any more
        self.block: V | None = None
        self.error: Exception | None = None


class Ahead:
    """A block that is fetched ahead: `done` is set when it has arrived or failed."""

    __slots__ = ("_leave", "done")

    def __init__(self, done: trio.Event, leave: Callable[[], None]) -> None:
        self.done, self._leave = done, leave

    def drop(self) -> None:
        """Cancel the fetch unless a reader waits for it; evict the block soon if no reader has read it. Call once."""
        self._leave()


async def arrived(several: Sequence[Ahead]) -> None:
    """Wait until all these blocks have arrived or failed. When cancelled, drop those that are on their way."""
    try:
        for ahead in several:
            await ahead.done.wait()
    finally:
        for ahead in several:
            if not ahead.done.is_set():
                ahead.drop()


class BlockCache(Generic[V]):
    """Blocks by key, dropped so that kept and expected bytes fit `max_bytes`.

    A block is bytes, or anything else whose len() is the bytes that it takes.

    A fetch runs in a task of its own: cancelling a reader does not affect the others, and the fetch is cancelled when
    no reader waits any more. A fetch waits until its bytes fit beside those of other fetches; one that is larger than
    `max_bytes` runs alone. A failure is raised in all waiting readers and not cached; but if a fetch that ahead()
    has begun fails, the readers that joined it share another one.

    While a server is out, fetches from it reserve no bytes, so that they do not delay reads from other servers. When
    it answers again, up to 128 MiB of them may arrive beyond `max_bytes`.
    """

    def __init__(
        self, max_bytes: int, is_paid: Callable[[Hashable], bool] = lambda key: False,
        is_out: Callable[[str], bool] = lambda server: False,
    ) -> None:  # fmt: skip
        """`is_paid`: whether the request of a block was sent, so its fetch goes on without readers.

        `is_out`: whether a server answers no requests now. Call suspend() when that begins.
        """
        self.max_bytes, self._is_paid, self._is_out = max_bytes, is_paid, is_out
        self._blocks: SizedLRU[Hashable, V] = SizedLRU(len)
        self._flights: dict[Hashable, _Fetch[V]] = {}
        self._unused: dict[Hashable, int] = {}  # bytes of blocks fetched ahead and not read yet
        self._unused_bytes = 0
        self._expected = MemoryBudget(max_bytes)
        self._reserved: dict[object, tuple[str, int]] = {}  # by holder: server and bytes of a fetch
        CACHES.add(self)

    def peek(self, key: Hashable) -> V | None:
        """Return the block `key` if it is cached, and count a hit."""
        block = self._blocks.use(key)
        if block is not None:
            COUNTS["memory_hits_total"] += 1
            self._use(key)
        return block

    def has(self, key: Hashable) -> bool:
        """Return whether the block `key` is cached or being fetched."""
        return key in self._blocks or key in self._flights

    async def get(self, key: Hashable, size: int, fetch: Callable[[], Awaitable[V]], server: str = "") -> V:
        """Return the block `key`: cached, being fetched, or fetched now by `fetch`, which returns about `size` bytes.

        `server`: the server that `fetch` reads from. The block is shared: nobody may change it. Raise what `fetch`
        raises.
        """
        block = self.peek(key)
        if block is not None:
            return block
        flight = self._flights.get(key)
        if flight is not None:
            COUNTS["memory_hits_total"] += 1
            try:
                return await self._land(key, flight)
            except Exception:
                if not flight.ahead:
                    raise
            flight = self._flights.get(key)
        if flight is None:
            COUNTS["memory_misses_total"] += 1
            flight = _Fetch(ahead=False)
            self._start(key, size, fetch, server, flight)
        return await self._land(key, flight)

    async def join(self, key: Hashable) -> V | None:
        """Return the block `key` if it is cached or being fetched, else None. Raise what its fetch raises.

        Call it within another fetch: a fetch that waits for room is not joined, because it may wait until the calling
        one ends.
        """
        block = self.peek(key)
        flight = self._flights.get(key)
        if block is not None or flight is None or not flight.roomy:
            return block
        return await self._land(key, flight)

    def ahead(
        self, key: Hashable, size: int, fetch: Callable[[], Awaitable[V]], server: str = ""
    ) -> Ahead | None:  # fmt: skip
        """Fetch the block `key` ahead of its readers; None if it is cached or being fetched, or if there is no room.

        Blocks fetched ahead and not read yet take up to half of the bytes.
        """
        if not self._may_come(key, size):
            return None
        flight: _Fetch[V] = _Fetch(ahead=True)
        if not self.reserve(flight, size, server):
            return None
        self._start(key, size, fetch, server, flight)
        flight.waiters += 1
        self._note_unused(key, size)
        landing = weakref.ref(flight)  # an Ahead may be kept for long after the block has left the cache

        def leave() -> None:
            if key in self._unused:
                self._blocks.age(key)
            if (found := landing()) is not None:
                self._leave(key, found)

        return Ahead(flight.done, leave)

    def put_ahead(self, key: Hashable, block: V) -> None:
        """Keep a block that was fetched ahead, if ahead() would."""
        if self._may_come(key, len(block)):
            self._note_unused(key, len(block))
            self._keep(key, block)

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Rename the block `old`, if it is cached and was read, to `new`, and count it as not read yet."""
        block = self._blocks.peek(old)
        if block is None or old in self._unused:
            return
        self.discard(old)
        if self._may_come(new, len(block)):
            self._note_unused(new, len(block))
        self._keep(new, block)

    def _may_come(self, key: Hashable, size: int) -> bool:
        return not self.has(key) and self._unused_bytes + size <= self.max_bytes // 2

    def _note_unused(self, key: Hashable, size: int) -> None:
        self._unused[key] = size
        self._unused_bytes += size

    def discard(self, key: Hashable) -> None:
        """Forget the block `key` if it is kept."""
        if key in self._blocks:
            self._blocks.drop(key)
            self._waste(key)

    def drop(self, wanted: Callable[[Hashable], bool]) -> None:
        """Forget the kept blocks whose key is `wanted`."""
        for key in [key for key in self._blocks if wanted(key)]:
            self.discard(key)

    def suspend(self, server: str) -> None:
        """Give back the bytes of the fetches from `server`, which is out; they go on without a reservation."""
        for holder in [holder for holder, (of, _) in self._reserved.items() if of == server]:
            self.release(holder)

    def resize(self, max_bytes: int) -> None:
        """Bound the cache anew."""
        self.max_bytes = max_bytes
        self._expected.resize(max_bytes)
        self._evict()

    def reserve(self, holder: object, size: int, server: str) -> bool:
        """Reserve `size` bytes for a fetch from `server`; release() of the same `holder` gives them back.

        Return False, with nothing reserved, if all fetches together would exceed half of the cache. While the server
        is out, return True with nothing reserved.
        """
        if not self._is_out(server):
            if self._expected.held + size > self.max_bytes // 2 or not self._expected.take_now(size):
                return False
            self._reserved[holder] = server, size
            self._evict()
        return True

    def release(self, holder: object) -> None:
        """Give back the bytes that are reserved for `holder`, if any."""
        _, size = self._reserved.pop(holder, ("", 0))
        if size:
            self._expected.give(size)

    @property
    def kept(self) -> int:
        """The bytes of all cached blocks."""
        return self._blocks.bytes

    @property
    def expected(self) -> int:
        """The bytes reserved for fetches."""
        return self._expected.held

    def gauges(self) -> dict[str, float]:
        """Return figures for `zarrfs stats`."""
        return {"memory_kept_bytes": self.kept, "memory_limit_bytes": self.max_bytes}

    # -- flights

    def _start(
        self, key: Hashable, size: int, fetch: Callable[[], Awaitable[V]], server: str, flight: _Fetch[V]
    ) -> None:  # fmt: skip
        self._flights[key] = flight
        in_background(self._fly, key, size, fetch, server, flight)

    async def _fly(
        self, key: Hashable, size: int, fetch: Callable[[], Awaitable[V]], server: str, flight: _Fetch[V]
    ) -> None:  # fmt: skip
        with flight.scope:
            try:
                if not flight.roomy:
                    await self._take(size, server, flight)
                try:
                    block = flight.block = await fetch()
                finally:
                    self.release(flight)
                self._keep(key, block)
            except Exception as exc:
                flight.error = exc
                self._waste(key)
            flight.done.set()
        self._take_off(key, flight)

    async def _take(self, size: int, server: str, flight: _Fetch[V]) -> None:
        """Wait until the bytes of a fetch fit, and reserve them; if its server is out, do neither."""
        if not self._is_out(server):
            await self._expected.take(size)
            self._reserved[flight] = server, size
            if self._is_out(server):  # it has gone out during the wait
                self.release(flight)
            self._evict()
        flight.roomy = True

    async def _land(self, key: Hashable, flight: _Fetch[V]) -> V:
        """Wait for a fetch and return its block."""
        self._use(key)
        flight.waiters += 1
        try:
            await flight.done.wait()
        finally:
            self._leave(key, flight)
        if flight.error is not None:
            raise flight.error.with_traceback(None)
        assert flight.block is not None
        return flight.block

    def _leave(self, key: Hashable, flight: _Fetch[V]) -> None:
        """Deregister a waiter. If it was the last one, cancel the fetch, unless its request was already sent."""
        flight.waiters -= 1
        if not flight.waiters and not flight.done.is_set() and not self._is_paid(key):
            flight.scope.cancel()
            self._take_off(key, flight)
            self._waste(key)

    def _take_off(self, key: Hashable, flight: _Fetch[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    # -- what is kept

    def _use(self, key: Hashable) -> None:
        size = self._unused.pop(key, None)
        if size is not None:
            self._unused_bytes -= size

    def _waste(self, key: Hashable) -> None:
        size = self._unused.pop(key, None)
        if size is not None:
            self._unused_bytes -= size

    def _keep(self, key: Hashable, block: V) -> None:
        if key not in self._blocks:  # otherwise a cancelled fetch has completed all the same
            self._blocks.put(key, block)
            self._evict()

    def _evict(self) -> None:
        while self._blocks and self._blocks.bytes + self._expected.held > self.max_bytes:
            self.discard(next(iter(self._blocks)))
