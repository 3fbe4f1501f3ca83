"""BlockCache: blocks in memory, bounded in bytes. Each is fetched by one task, for any number of readers.

The least recently read block is evicted first. Blocks that were fetched ahead for a reader that went elsewhere are
evicted before all others.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence, Sized
from typing import Generic, TypeVar

import trio

from zarrfs.concurrency.budget import MemoryBudget
from zarrfs.concurrency.tasks import in_background
from zarrfs.metrics.counters import CACHES, COUNTS

V = TypeVar("V", bound=Sized)


class _Fetch(Generic[V]):
    """A fetch in progress, and the number of tasks that wait for it."""

    __slots__ = (
        "__weakref__", "admitted", "ahead", "block", "done", "error", "key", "scope", "server", "size", "waiters",
    )  # fmt: skip

    def __init__(self, key: Hashable, size: int, server: str, ahead: bool) -> None:
        self.key, self.size, self.server = key, size, server
        self.ahead = ahead  # begun by ahead(): it may time out before a reader that joins it, so get() fetches again
        self.admitted = ahead  # its bytes fit: it does not wait for those of others any more
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self.waiters = 0
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
    `max_bytes` runs alone, and its block is kept until another one comes. A failure is raised in all waiting readers
    and not cached; but if a fetch that ahead() has begun fails, the readers that joined it share another one.

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
        self._blocks: OrderedDict[Hashable, V] = OrderedDict()  # the least recently used one first
        self.kept = 0  # bytes of all cached blocks
        self._fetches: dict[Hashable, _Fetch[V]] = {}
        self._unused: dict[Hashable, int] = {}  # bytes of blocks fetched ahead and not read yet
        self._unused_bytes = 0
        self._expected = MemoryBudget(max_bytes)
        self._reserved: dict[object, tuple[str, int]] = {}  # by holder: server and bytes of a fetch
        CACHES.add(self)

    def peek(self, key: Hashable) -> V | None:
        """Return the block `key` if it is cached, and count a hit."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
            COUNTS["memory_hits_total"] += 1
            self._note_use(key)
        return block

    def has(self, key: Hashable) -> bool:
        """Return whether the block `key` is cached or being fetched."""
        return key in self._blocks or key in self._fetches

    async def get(self, key: Hashable, size: int, fetch: Callable[[], Awaitable[V]], server: str = "") -> V:
        """Return the block `key`: cached, being fetched, or fetched now by `fetch`, which returns about `size` bytes.

        Pass `size` 0 for a block that another fetch waits for: it must not wait for bytes that the other one has
        reserved. `server`: the server that `fetch` reads from. The block is shared: nobody may change it. Raise what
        `fetch` raises.
        """
        block = self.peek(key)
        if block is not None:
            return block
        present = self._fetches.get(key)
        if present is not None:
            COUNTS["memory_hits_total"] += 1
            try:
                return await self._wait(present)
            except Exception:
                if not present.ahead:
                    raise
            present = self._fetches.get(key)
        if present is None:
            COUNTS["memory_misses_total"] += 1
            present = self._start(_Fetch(key, size, server, ahead=False), fetch)
        return await self._wait(present)

    async def join(self, key: Hashable) -> V | None:
        """Return the block `key` if it is cached or being fetched, else None. Raise what its fetch raises.

        Call it within another fetch: a fetch that is not admitted yet is not joined, because it may wait until the
        calling one ends.
        """
        block = self.peek(key)
        present = self._fetches.get(key)
        if block is not None or present is None or not present.admitted:
            return block
        return await self._wait(present)

    def ahead(
        self, key: Hashable, size: int, fetch: Callable[[], Awaitable[V]], server: str = ""
    ) -> Ahead | None:  # fmt: skip
        """Fetch the block `key` ahead of its readers; None if it is cached or being fetched, or if there is no room.

        Blocks fetched ahead and not read yet take up to half of the bytes.
        """
        begun: _Fetch[V] = _Fetch(key, size, server, ahead=True)
        if not self._may_come(key, size) or not self.reserve(begun, size, server):
            return None
        self._start(begun, fetch)
        begun.waiters += 1
        self._note_unused(key, size)
        known = weakref.ref(begun)  # an Ahead may be kept for long after the block has left the cache

        def leave() -> None:
            if key in self._unused:
                self.retire(key)
            if (found := known()) is not None:
                self._leave(found)

        return Ahead(begun.done, leave)

    def put_ahead(self, key: Hashable, block: V) -> None:
        """Keep a block that was fetched ahead, if ahead() would."""
        if self._may_come(key, len(block)):
            self._note_unused(key, len(block))
            self._keep(key, block)

    def discard(self, key: Hashable) -> None:
        """Forget the block `key` if it is kept."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self.kept -= len(block)
            self._note_use(key)

    def retire(self, key: Hashable) -> None:
        """Make the block `key` the first to be evicted, if it is kept."""
        if key in self._blocks:
            self._blocks.move_to_end(key, last=False)

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
    def expected(self) -> int:
        """The bytes reserved for fetches."""
        return self._expected.held

    def gauges(self) -> dict[str, float]:
        """Return figures for `zarrfs stats`."""
        return {"memory_kept_bytes": self.kept, "memory_limit_bytes": self.max_bytes}

    # -- fetches

    def _start(self, fetch: _Fetch[V], obtain: Callable[[], Awaitable[V]]) -> _Fetch[V]:
        self._fetches[fetch.key] = fetch
        in_background(self._run, fetch, obtain)
        return fetch

    async def _run(self, fetch: _Fetch[V], obtain: Callable[[], Awaitable[V]]) -> None:
        with fetch.scope:
            try:
                try:
                    if not fetch.admitted:
                        await self._admit(fetch)
                    block = fetch.block = await obtain()
                finally:
                    self.release(fetch)
                self._keep(fetch.key, block)
            except Exception as exc:
                fetch.error = exc
                self._note_use(fetch.key)
            fetch.done.set()
        self._end(fetch)

    async def _admit(self, fetch: _Fetch[V]) -> None:
        """Wait until the bytes of a fetch fit, and reserve them; if its server is out, do neither."""
        if fetch.size and not self._is_out(fetch.server):
            await self._expected.take(fetch.size)
            self._reserved[fetch] = fetch.server, fetch.size
            if self._is_out(fetch.server):  # it has gone out during the wait
                self.release(fetch)
            self._evict()
        fetch.admitted = True

    async def _wait(self, fetch: _Fetch[V]) -> V:
        """Wait for a fetch and return its block."""
        self._note_use(fetch.key)
        fetch.waiters += 1
        try:
            await fetch.done.wait()
        finally:
            self._leave(fetch)
        if fetch.error is not None:
            raise fetch.error.with_traceback(None)
        assert fetch.block is not None
        return fetch.block

    def _leave(self, fetch: _Fetch[V]) -> None:
        """Deregister a waiter. If it was the last one, cancel the fetch, unless its request was already sent."""
        fetch.waiters -= 1
        if not fetch.waiters and not fetch.done.is_set() and not self._is_paid(fetch.key):
            fetch.scope.cancel()
            self._end(fetch)
            self._note_use(fetch.key)

    def _end(self, fetch: _Fetch[V]) -> None:
        if self._fetches.get(fetch.key) is fetch:
            del self._fetches[fetch.key]

    # -- blocks

    def _may_come(self, key: Hashable, size: int) -> bool:
        return not self.has(key) and self._unused_bytes + size <= self.max_bytes // 2

    def _note_unused(self, key: Hashable, size: int) -> None:
        self._unused[key] = size
        self._unused_bytes += size

    def _note_use(self, key: Hashable) -> None:
        """Note that a block which was fetched ahead is read, or will not be."""
        self._unused_bytes -= self._unused.pop(key, 0)

    def _keep(self, key: Hashable, block: V) -> None:
        if key not in self._blocks:  # otherwise a cancelled fetch has completed all the same
            self._blocks[key] = block
            self.kept += len(block)
            self._evict()

    def _evict(self) -> None:
        while len(self._blocks) > 1 and self.kept + self._expected.held > self.max_bytes:
            self.discard(next(iter(self._blocks)))
