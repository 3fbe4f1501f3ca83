"""Stat-ahead: each name is requested once, and the directory is listed only a few times."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import trio

from zarrfs.fuse.statahead import StatAhead
from zarrfs.store.api import Info, Kind


class Unsized:
    """A store whose listing has no sizes."""

    def __init__(self, count: int) -> None:
        self.names = [f"{number:06}" for number in range(count)]
        self.listings = 0
        self.asked: list[str] = []

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        self.listings += 1
        for name in self.names:
            if name > after:
                yield Info(name, Kind.FILE, None)

    async def info(self, key: str, sized: bool = True) -> Info:
        self.asked.append(key.rpartition("/")[2])
        return Info(self.asked[-1], Kind.FILE, 1)


async def walk(ahead: StatAhead, store: Unsized, names: list[str]) -> None:
    for name in names:
        if ahead.due(f"d/{name}"):
            await ahead.advance(cast(Any, store), f"d/{name}")


def test_a_walk_lists_its_directory_a_few_times() -> None:
    store, ahead = Unsized(20_000), StatAhead()
    ahead.listed("d")
    trio.run(walk, ahead, store, store.names)
    assert sorted(store.asked) == store.names[1:]  # the client itself requests the first
    assert store.listings <= 4


def test_a_second_walk_requests_all_names_again() -> None:
    store, ahead = Unsized(300), StatAhead()
    ahead.listed("d")
    for _ in range(2):
        store.asked = []
        trio.run(walk, ahead, store, store.names)
        assert sorted(store.asked) == store.names[1:]
    assert store.listings == 2


def test_after_a_jump_the_names_that_follow_are_requested() -> None:
    store, ahead = Unsized(20_000), StatAhead()
    ahead.listed("d")
    trio.run(walk, ahead, store, store.names[:10])
    for at in (5000, 15_000):
        store.asked = []
        trio.run(walk, ahead, store, store.names[at : at + 1])
        assert sorted(store.asked) == store.names[at + 1 : at + 129]
    assert store.listings == 2  # the first listing already had the names after 5000


def test_names_that_a_client_passes_during_the_listing_are_not_requested() -> None:
    store, ahead = Unsized(1000), StatAhead()
    ahead.listed("d")

    async def body() -> None:
        assert ahead.due("d/000000")
        listed = store.list_dir

        async def slow(prefix: str, after: str = "") -> AsyncIterator[Info]:
            async for info in listed(prefix, after):
                if info.name == "000500":
                    assert not ahead.due("d/000200")
                yield info

        store.list_dir = slow  # type: ignore[method-assign]
        await walk_on("000000")

    async def walk_on(name: str) -> None:
        await ahead.advance(cast(Any, store), f"d/{name}")

    trio.run(body)
    assert sorted(store.asked) == store.names[201:329]
