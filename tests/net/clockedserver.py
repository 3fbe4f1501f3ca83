"""A server without sockets, for tests on trio's mock clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from trio.testing import MockClock

from zarrfs.net.request_queue import RequestQueue
from zarrfs.net.responses import Entry, Fetched, Page

Answer = Callable[[str], Awaitable[None]]


class Server:
    """A system whose requests await `answer`, which may wait or raise; `sent` lists (time, path) of each request."""

    immutable, nested, sends_versions, flat = False, False, True, False

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.sent: list[tuple[float, str]] = []

    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        self.sent.append((round(trio.current_time(), 3), path))
        await trio.lowlevel.checkpoint()
        await self.answer(path)
        return Fetched(path.encode() * 10, "1", 10 * len(path))

    async def stat(self, path: str) -> Entry:
        return Entry("", False, len((await self.fetch(path, 0, 1)).data))

    async def listing(self, path: str) -> list[Entry] | None:
        return None

    async def page(self, path: str, after: str) -> Page:
        raise NotImplementedError

    def child(self, path: str, name: str) -> str:
        return path + name

    def shown(self, path: str) -> str:
        return f"http://server/{path}"

    def host(self, path: str) -> str:
        return "server"

    def identity(self, path: str) -> str:
        return path

    async def aclose(self) -> None:
        """Do nothing: there is no connection to close."""


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run `main` on a mock clock that starts at 0 and skips all waiting; return its result."""

    async def from_zero() -> Any:
        assert trio.current_time() == 0
        return await main()

    return trio.run(from_zero, clock=MockClock(autojump_threshold=0))


def settled(ranges: RequestQueue) -> bool:
    return not any(ranges.gauges().values())
