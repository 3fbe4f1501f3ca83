"""Waiting ranges of one server that share a request, and the order of its requests."""

from __future__ import annotations

import random

import pytest
import trio

from tests.net.clockedserver import Server, run, settled
from zarrfs.config.options import Options
from zarrfs.net.request_queue import GAP, PART, RequestQueue
from zarrfs.net.responses import Fetched

K = 1 << 10
VALUE = random.Random(0).randbytes(3 * PART)


class Ranges(Server):
    """A server with one slow value; `asked` lists the ranges of its requests."""

    asked: list[tuple[int, int | None]]

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        self.asked.append((start, stop))
        await trio.sleep(1)
        return Fetched(VALUE[start:stop], "1", len(VALUE))


@pytest.mark.parametrize(
    ("wanted", "ahead", "requests"),
    [
        ([(0, 10), (10, 20), (20, 30)], [], [(0, 30)]),
        ([(20, 30), (0, 10), (12, 22), (0, 10)], [], [(0, 30)]),
        ([(0, 10), (10 + GAP, 20 + GAP)], [], [(0, 20 + GAP)]),
        ([(0, 10), (11 + GAP, 20 + GAP)], [], [(0, 10), (11 + GAP, 20 + GAP)]),
        ([(0, PART - K), (PART - K, PART + K)], [], [(0, PART - K), (PART - K, PART + K)]),
        ([(0, 100 * K), (10, 20)], [], [(0, 100 * K)]),
        ([(PART, PART + 10), (0, 10)], [], [(PART, PART + 10), (0, 10)]),  # in the order of the readers
        ([(PART, PART + 9)], [(2 * PART, 2 * PART + 9), (0, 9)], [(PART, PART + 9), (0, 9), (2 * PART, 2 * PART + 9)]),
        ([(10, 20)], [(0, 10), (20, 30)], [(0, 30)]),
    ],
)  # fmt: skip
def test_ranges_that_wait_share_requests_with_their_neighbours(
    wanted: list[tuple[int, int]], ahead: list[tuple[int, int]], requests: list[tuple[int, int]]
) -> None:
    """Readers go before read-ahead, which begins with the lowest offset; each caller gets its own bytes."""

    async def answer(path: str) -> None:
        """Answer nothing special."""

    server, queue = Ranges(answer), RequestQueue(Options(host_requests=1))
    server.asked = []

    async def read(start: int, stop: int, ahead: bool) -> None:
        assert bytes((await queue.fetch(server, "a", start, stop, ahead)).data) == VALUE[start:stop]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, 0, 1, False)
            for pieces, early in ((ahead, True), (wanted, False)):
                for start, stop in pieces:
                    await trio.sleep(0.01)
                    nursery.start_soon(read, start, stop, early)
        assert settled(queue)

    run(main)
    assert server.asked == [(0, 1), *requests]
