"""The block cache in memory: shared fetches, bounds and cancellation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from zarrfs.cache.memory import BlockCache
from zarrfs.errors import ReadError


class Source:
    """A source that counts its fetches, which return once the test sets `gate`."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.started = self.ended = self.cancelled = 0
        self.gate = trio.Event()
        self.error: Exception | None = None

    async def fetch(self) -> bytes:
        self.started += 1
        try:
            await self.gate.wait()
        except trio.Cancelled:
            self.cancelled += 1
            raise
        self.ended += 1
        if self.error is not None:
            raise self.error
        return bytes(self.size)


def run(check: Callable[[], Awaitable[None]]) -> None:
    trio.run(check)


def test_readers_of_one_block_share_its_fetch() -> None:
    async def check() -> None:
        cache, source = BlockCache(100), Source()
        got = []

        async def read() -> None:
            got.append(await cache.get("k", 10, source.fetch))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            source.gate.set()
        assert source.started == 1
        assert got == [bytes(10)] * 20
        assert await cache.get("k", 10, source.fetch) is got[0]

    run(check)


def test_a_cancelled_reader_does_not_affect_the_others() -> None:
    async def check() -> None:
        cache, source = BlockCache(100), Source()
        got = []
        scopes = [trio.CancelScope() for _ in range(3)]

        async def read(scope: trio.CancelScope) -> None:
            with scope:
                got.append(await cache.get("k", 10, source.fetch))

        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(read, scope)
            await trio.testing.wait_all_tasks_blocked()
            scopes[0].cancel()  # the one that began the fetch
            await trio.testing.wait_all_tasks_blocked()
            assert not source.cancelled
            source.gate.set()
        assert got == [bytes(10)] * 2
        assert source.started == 1

    run(check)


def test_a_fetch_without_readers_is_cancelled() -> None:
    async def check() -> None:
        cache, source = BlockCache(100), Source()
        with trio.move_on_after(0) as scope:
            await cache.get("k", 10, source.fetch)
        assert scope.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()
        assert source.started == source.cancelled
        assert cache.expected == 0
        source.gate.set()
        assert await cache.get("k", 10, source.fetch) == bytes(10)

    run(check)


def test_failures_reach_all_readers_and_are_not_cached() -> None:
    async def check() -> None:
        cache, source = BlockCache(100), Source()
        source.error = ReadError("here", "broken")
        caught = []

        async def read() -> None:
            with pytest.raises(ReadError) as error:
                await cache.get("k", 10, source.fetch)
            caught.append(error.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            source.gate.set()
        assert len(caught) == 2
        source.error = None
        assert await cache.get("k", 10, source.fetch) == bytes(10)
        assert source.started == 2

    run(check)


def test_the_least_recently_used_block_is_evicted_first() -> None:
    async def check() -> None:
        cache, source = BlockCache(30), Source()
        source.gate.set()
        for key in "abc":
            await cache.get(key, 10, source.fetch)
        await cache.get("a", 10, source.fetch)
        await cache.get("d", 10, source.fetch)
        before = source.started
        for key in "acd":
            await cache.get(key, 10, source.fetch)
        assert source.started == before
        await cache.get("b", 10, source.fetch)
        assert source.started == before + 1
        cache.drop(lambda key: key == "b")
        assert cache.kept == 20
        cache.resize(10)
        assert cache.kept == 10

    run(check)


def test_fetches_wait_for_room() -> None:
    async def check() -> None:
        cache, source = BlockCache(30), Source()
        async with trio.open_nursery() as nursery:
            for key in range(10):
                nursery.start_soon(cache.get, key, 10, source.fetch)
            await trio.testing.wait_all_tasks_blocked()
            assert source.started == 3
            source.gate.set()
        assert source.ended == 10
        assert cache.kept == 30

    run(check)


def test_a_block_larger_than_everything_is_fetched_alone() -> None:
    async def check() -> None:
        cache, large, small = BlockCache(30), Source(100), Source(10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.get, "large", 100, large.fetch)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(cache.get, "small", 10, small.fetch)
            await trio.testing.wait_all_tasks_blocked()
            assert (large.started, small.started) == (1, 0)
            large.gate.set()
            small.gate.set()
        assert small.ended == 1
        assert cache.kept == 10
        for _ in range(2):  # kept until another one comes: its memory was needed anyway
            await cache.get("large", 100, large.fetch)
        assert (large.started, cache.kept) == (2, 100)

    run(check)


@settings(deadline=None)
@given(
    limit=st.integers(1, 50),
    wanted=st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=60),
)
def test_bytes_kept_and_expected_stay_within_the_bound(limit: int, wanted: list[tuple[int, bool]]) -> None:
    """Key k has 3k bytes. Readers arrive in any order, and some are cancelled immediately."""
    held = 0

    async def check() -> None:
        cache = BlockCache(limit)

        async def read(key: int, leaves: bool) -> None:
            async def fetch() -> bytes:
                nonlocal held
                held += 3 * key
                try:
                    assert held <= max(limit, 3 * key)
                    await trio.lowlevel.checkpoint()
                finally:
                    held -= 3 * key
                return bytes([key]) * (3 * key)

            with trio.CancelScope() as scope:
                if leaves:
                    scope.cancel()
                assert await cache.get(key, 3 * key, fetch) == bytes([key]) * (3 * key)

        async with trio.open_nursery() as nursery:
            for key, leaves in wanted:
                nursery.start_soon(read, key, leaves)
        await trio.testing.wait_all_tasks_blocked()
        assert cache.kept <= limit or sum(map(cache.has, range(9))) == 1
        assert cache.expected == 0

    run(check)


def test_a_large_block_is_not_starved_by_small_ones() -> None:
    """Each small fetch starts the next one before it ends; a large one must not wait until there are no more."""

    async def check() -> None:
        cache: BlockCache[bytes] = BlockCache(100)
        small = 0

        async def fetch() -> bytes:
            nonlocal small
            small += 1
            await trio.sleep(0.002)
            if small < 300:
                nursery.start_soon(cache.get, small, 10, fetch)
                await trio.sleep(0.002)
            return bytes(10)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cache.get, 0, 10, fetch)
            await trio.sleep(0.001)
            source = Source(150)
            source.gate.set()
            await cache.get("large", 150, source.fetch)
            assert small < 300
            small = 300
        assert cache.expected == 0

    run(check)


def test_prefetched_blocks_take_at_most_half_of_the_cache() -> None:
    """put_ahead() does not replace a block that is cached already."""

    async def check() -> None:
        cache = BlockCache[bytes](40)
        source = Source()
        source.gate.set()
        for number in range(3):
            cache.put_ahead(number, bytes([number]) * 10)
        cache.put_ahead(0, b"x" * 10)
        assert [cache.has(number) for number in range(3)] == [True, True, False]
        assert await cache.get(0, 10, source.fetch) == bytes(10)
        assert source.started == 0
        cache.put_ahead(2, b"2" * 10)
        assert (await cache.get(2, 10, source.fetch), source.started) == (b"2" * 10, 0)
        assert cache.kept <= 40

    run(check)
