"""Names of a tree on a server: whatever pages, clocks and changes do, a listing is complete and absence is true."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
import trio
import trio.testing

from tests.mounts.test_big_bucket import Bucket, bucket, using, walked
from tests.store.contract import keys
from zarrfs.errors import NotDirectory, NotFound, ReadError, StoreError
from zarrfs.store.api import Kind
from zarrfs.store.remote import FsspecStore
from zarrfs.store.unlisted import UnlistedStore

__all__ = ["bucket"]

WORDS = ["a", "a-b", "a.b", "b", "0", "1", "10", "c", "é", "zarr.json"]


def tree(chance: random.Random) -> list[str]:
    """Return random keys, none of which is also a directory."""
    found = {"/".join(chance.choices(WORDS, k=chance.randint(1, 4))) for _ in range(chance.randint(1, 120))}
    return sorted(key for key in found if not any(other.startswith(f"{key}/") for other in found))


async def state(store: FsspecStore, key: str) -> Kind | None:
    try:
        return (await store.info(key)).kind
    except (NotFound, NotDirectory):
        return None


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", ["as find does", "in order", "together"])
def test_random_trees_are_listed_completely_and_lookups_agree(bucket: Bucket, how: str, seed: int) -> None:
    chance = random.Random(f"{how} {seed}")
    present = tree(chance)
    bucket.keys = sorted(f"x/{key}" for key in present)
    bucket.most = chance.choice([1, 2, 7, 1000])
    above = {key.rsplit("/", depth)[0] for key in present for depth in range(1, key.count("/") + 1)}
    expected = dict.fromkeys(present, Kind.FILE) | dict.fromkeys(above, Kind.DIRECTORY)

    async def check(store: FsspecStore) -> None:
        for key in chance.choices([*present, *WORDS], k=chance.choice([0, 3])):
            assert await state(store, key) == expected.get(key)
        if how == "as find does":
            assert sorted(await walked(store, "")) == present
        elif how == "in order":
            assert sorted(await keys(store)) == present
        else:
            async with trio.open_nursery() as nursery:
                for directory in ["", *above, *above]:
                    nursery.start_soon(below, store, directory)
        asked = len(bucket.pages)
        for key in present:
            for other in (key, f"{key}x", key.rpartition("/")[0] or "nope"):
                assert await state(store, other) == expected.get(other), other
        assert len(bucket.pages) == asked or how == "together"
        for key in present:
            assert await state(store, f"{key}/x") is None

    async def below(store: FsspecStore, directory: str) -> None:
        found = sorted(await keys(store, directory))
        assert found == [key for key in present if not directory or key.startswith(f"{directory}/")]

    using(bucket, check)


@pytest.mark.parametrize(("most", "delay"), [(1000, 0.002), (20, 0.04)])
def test_names_that_stay_are_in_each_listing_while_others_come_and_go(
    bucket: Bucket, most: int, delay: float
) -> None:
    """The directory is listed by several readers while single names are looked up, and answers expire all the time."""
    stays = [f"x/d/{number:03}" for number in range(0, 300, 2)]
    bucket.keys, bucket.most, bucket.delay = sorted(stays), most, delay
    chance, over = random.Random(most), threading.Event()

    async def check(store: FsspecStore) -> None:
        async def read() -> None:
            for _ in range(2):
                found = {info.name async for info in store.list_dir("d")}
                assert found >= {key[4:] for key in stays}

        async def look() -> None:
            while not over.is_set():
                key = chance.choice(stays)
                store.names.forget(key[2:])
                assert (await store.info(key[2:])).size == 3
                other = f"x/d/{chance.randrange(1, 300, 2):03}"
                bucket.keys = sorted({*bucket.keys} ^ {other})
                await state(store, other[2:])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            async with trio.open_nursery() as readers:
                for _ in range(3):
                    readers.start_soon(read)
            over.set()

    using(bucket, check, metadata_ttl=0.01)


@pytest.mark.parametrize("seed", range(2))
def test_walks_that_break_off_and_go_on_later_list_each_name(bucket: Bucket, seed: int) -> None:
    """Walks share flat listings, which outlast failed pages, cancelled readers and answers that expire."""
    chance = random.Random(seed)
    stays, others = tree(chance), [f"{word}/{other}" for word in "abcz" for other in ("0/x", "m", "é/x")]
    others = [key for key in others if not any(f"{one}/".startswith(f"{key}/") or f"{key}/".startswith(f"{one}/")
                                               for one in stays)]  # fmt: skip
    bucket.keys, bucket.most, bucket.delay = sorted(f"x/{key}" for key in stays), chance.choice([1, 3, 20]), 0.002
    bucket.fault = lambda number, keys, more: (503 if chance.random() < 0.03 else 200, keys, more)
    above = ["", *{key.rsplit("/", depth)[0] for key in stays for depth in range(1, key.count("/") + 1)}]

    def present(directory: str, names: list[str]) -> list[str]:
        return sorted(key for key in names if not directory or key.startswith(f"{directory}/"))

    async def check(store: FsspecStore) -> None:
        async def walk(directory: str, within: float) -> None:
            with trio.move_on_after(within), contextlib.suppress(ReadError):
                found = await (walked if chance.random() < 0.5 else keys)(store, directory)
                assert set(found) >= set(present(directory, stays)), directory
                assert set(found) <= set(present(directory, stays + others)), directory

        def change() -> None:
            bucket.keys = sorted({*bucket.keys} ^ {f"x/{key}" for key in chance.sample(others, len(others) // 3)})

        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(chance.randint(1, 3)):
                    nursery.start_soon(walk, chance.choice(above), chance.choice([0.01, 0.05, 60]))
            change()
            await trio.sleep(chance.choice([0, 0.06]))
        bucket.fault = None
        for directory in above[:10]:
            await walk("", 0.008)
            change()
            await trio.sleep(0.06)
            assert sorted(await keys(store, directory)) == present(directory, [key[2:] for key in bucket.keys])

    using(bucket, check, metadata_ttl=0.05)


def test_a_value_that_is_also_a_directory_is_a_value(bucket: Bucket) -> None:
    bucket.keys = ["x/a", "x/a/b", "x/c/d"]

    async def check(store: FsspecStore) -> None:
        assert {info.name: info.kind async for info in store.list_dir("")} == {"a": Kind.FILE, "c": Kind.DIRECTORY}
        with pytest.raises(StoreError):
            assert [info async for info in store.list_dir("a")]
        assert [info.name async for info in store.list_dir("c")] == ["d"]

    using(bucket, check)


def test_a_lookup_begins_the_listing_and_a_directory_may_come_after_names_that_begin_like_it(bucket: Bucket) -> None:
    bucket.keys, bucket.most = ["x/a-b", "x/a-c", "x/a/1", "x/b"], 2

    async def check(store: FsspecStore) -> None:
        assert await state(store, "a+") is None  # "+" sorts before "-": the page tells
        assert len(bucket.pages) == 1
        assert await state(store, "a") is Kind.DIRECTORY
        assert [info.name async for info in store.list_dir("")] == ["a", "a-b", "a-c", "b"]
        assert bucket.pages[-1] == "x/a-c"  # no page is requested twice

    using(bucket, check)


def test_a_page_answers_for_the_documents_that_a_node_lacks(bucket: Bucket) -> None:
    bucket.keys = ["x/a/.zarray", "x/a/0"]

    async def check(store: FsspecStore) -> None:
        for name in ("zarr.json", ".zgroup", ".zattrs", ".zmetadata"):
            with pytest.raises(NotFound):
                await UnlistedStore(store, lists=True).info(f"a/{name}")
        assert (bucket.reads, len(bucket.pages)) == (0, 1)

    using(bucket, check)


def test_an_empty_listing_does_not_make_a_value_absent(bucket: Bucket) -> None:
    """Some servers answer so for what may be read but not listed."""
    bucket.keys, bucket.fault = ["x/a/1", "x/b"], lambda number, found, more: (200, [], False)

    async def check(store: FsspecStore) -> None:
        for key in ("b", "a/1"):
            assert bytes(await store.get(key)) == b"abc"
        assert await state(store, "c") is None

    using(bucket, check)


def test_keys_that_are_no_paths_do_not_hide_the_directory_before_them(bucket: Bucket) -> None:
    present = [f"{directory}/{number}" for directory in "abcd" for number in range(10)]
    bucket.keys = sorted([f"x/{key}" for key in present] + [f"x/e//{number:03}" for number in range(100)])
    bucket.most = 20

    async def check(store: FsspecStore) -> None:
        assert [info.name async for info in store.list_dir("")] == ["a", "b", "c", "d", "e"]
        for directory in "abcd":
            assert len([info async for info in store.list_dir(directory)]) == 10

    using(bucket, check)


def test_a_store_that_is_emptied_and_written_again_is_listed_completely(bucket: Bucket) -> None:
    bucket.keys = ["y"]

    async def check(store: FsspecStore) -> None:
        with pytest.raises(ReadError):
            await keys(store)
        bucket.keys = ["x/a", "x/d/b", "y"]
        assert await keys(store) == ["a", "d/b"]

    using(bucket, check)
