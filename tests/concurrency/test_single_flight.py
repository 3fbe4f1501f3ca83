"""SingleFlight: tasks that need the same value share one fetch, and fetch again after a failure."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing

from zarrfs.concurrency.single_flight import SingleFlight


def test_many_tasks_one_fetch() -> None:
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


@pytest.mark.parametrize("end", ["fails", "cancelled"])
def test_a_waiter_of_a_fetch_that_came_to_nothing_fetches_itself(end: str) -> None:
    async def main() -> None:
        flight, found, fetches = SingleFlight[str](), list[int](), list[int]()

        async def fetch() -> int:
            fetches.append(len(fetches))
            await trio.sleep(1)
            if len(fetches) == 1:
                raise OSError
            found.append(7)
            return 7

        async def first() -> None:
            with trio.move_on_after(0.5 if end == "cancelled" else 5):
                with contextlib.suppress(OSError):
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
