"""SingleFlight: tasks that need the same value share one fetch, and its failure."""

from __future__ import annotations

import traceback

import pytest
import trio
import trio.testing

from zarrfs.concurrency.single_flight import SingleFlight


def test_many_tasks_share_one_fetch() -> None:
    async def main() -> None:
        flight, found, fetches = SingleFlight[str](), dict[str, int](), list[str]()

        async def fetch(key: str) -> int:
            fetches.append(key)
            await trio.sleep(1)
            found[key] = len(key)
            return found[key]

        async def want(key: str) -> None:
            assert await flight.run(key, lambda: fetch(key), lambda: found.get(key)) == len(key)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(want, "a")
                nursery.start_soon(want, "bb")
        assert sorted(fetches) == ["a", "bb"]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_waiters_of_a_cancelled_fetch_share_another_one() -> None:
    async def main() -> None:
        flight, found, fetches = SingleFlight[str](), list[int](), list[int]()

        async def fetch() -> int:
            fetches.append(len(fetches))
            await trio.sleep(1)
            found.append(7)
            return 7

        async def first() -> None:
            with trio.move_on_after(0.5):
                await flight.run("a", fetch, lambda: found[0] if found else None)

        async def later() -> None:
            await trio.sleep(0.1)
            assert await flight.run("a", fetch, lambda: found[0] if found else None) == 7

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            for _ in range(5):
                nursery.start_soon(later)
        assert len(fetches) == 2

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_all_waiters_get_the_same_failure_and_later_tasks_fetch_again() -> None:
    """If each waiter fetched in turn, a silent server would time out as many times as there are waiters."""

    async def main() -> None:
        flight, fetches, depths = SingleFlight[str](), list[int](), list[int]()

        async def fetch() -> int:
            fetches.append(len(fetches))
            await trio.sleep(1)
            raise OSError

        async def want() -> None:
            try:
                await flight.run("a", fetch, lambda: None)
            except OSError as exc:
                depths.append(len(traceback.extract_tb(exc.__traceback__)))

        for number in (1, 2):
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(want)
            assert trio.current_time() - began == pytest.approx(1)
            assert len(fetches) == number
        assert len(depths) == 12
        assert max(depths) <= 3, "the traceback of a shared failure grows with its readers"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
