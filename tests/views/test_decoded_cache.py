"""The cache of decoded chunks: one task decodes each, and memory stays within the budget."""

from __future__ import annotations

import pytest
import trio
import trio.lowlevel
import trio.testing

from zarrfs.errors import ReadError
from zarrfs.views.decoded_cache import Decoded, DecodedCache


class Maker:
    """A decoder of values of `size` bytes that waits for `gate`, and counts concurrent calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.made: list[object] = []
        self.running = self.most = 0
        self.gate = trio.Event()

    async def make(self) -> Decoded:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= 1
        self.made.append(object())
        return Decoded(self.made[-1], self.size, None, 0)


def test_one_task_decodes_for_many_readers() -> None:
    async def main() -> None:
        cache, maker, found = DecodedCache(100), Maker(10), []

        async def want() -> None:
            found.append(await cache.get("a", 10, maker.make))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(want)
            await trio.testing.wait_all_tasks_blocked()
            assert cache.coming("a")
            maker.gate.set()
        assert len(maker.made) == 1
        assert len(set(map(id, found))) == 1
        assert cache.peek("a") is found[0]

    trio.run(main)


def test_cached_values_and_running_decodes_share_the_budget() -> None:
    async def main() -> None:
        cache, maker = DecodedCache(100), Maker(30)
        maker.gate.set()
        for name in "abcd":
            await cache.get(name, 30, maker.make)
            assert cache.stats()["kept"] <= 100
        assert [cache.peek(name) is not None for name in "abcd"] == [False, True, True, True]
        cache.peek("b")
        cache.retire(["d"])
        await cache.get("e", 30, maker.make)
        assert [cache.peek(name) is not None for name in "bcde"] == [True, True, False, True]
        maker.gate, maker.most = trio.Event(), 0
        async with trio.open_nursery() as nursery:
            for name in "uvwxyz":
                nursery.start_soon(cache.get, name, 30, maker.make)
            await trio.testing.wait_all_tasks_blocked()
            assert cache.stats()["kept"] == 30  # one value always stays; the decodes reserve the budget
            maker.gate.set()
        assert maker.most == 3

    trio.run(main)


def test_a_value_beyond_the_budget_is_decoded_alone_and_kept_until_the_next() -> None:
    async def main() -> None:
        cache, maker = DecodedCache(10), Maker(1000)
        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(cache.get, name, 1000, maker.make)
            await trio.testing.wait_all_tasks_blocked()
            maker.gate.set()
        assert maker.most == 1
        assert len([name for name in "abc" if cache.peek(name) is not None]) == 1

    trio.run(main)


def test_a_failure_reaches_all_waiters_and_is_not_cached() -> None:
    async def main() -> None:
        cache, maker = DecodedCache(10), Maker(1)
        calls = 0

        async def fail() -> Decoded:
            nonlocal calls
            calls += 1
            await trio.lowlevel.checkpoint()
            raise ReadError("k", "damaged")

        async def want() -> None:
            with pytest.raises(ReadError):
                await cache.get("a", 10, fail)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(want)
        assert calls == 1
        assert not cache.coming("a")
        maker.gate.set()
        assert (await cache.get("a", 10, maker.make)).value is maker.made[0]

    trio.run(main)


def test_cancelling_one_reader_leaves_the_others_alone() -> None:
    async def main() -> None:
        cache, maker = DecodedCache(10), Maker(1)
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0):
                await cache.get("a", 1, maker.make)
            nursery.start_soon(cache.get, "a", 1, maker.make)
            await trio.testing.wait_all_tasks_blocked()
            maker.gate.set()
        assert len(maker.made) == 1

    trio.run(main)
