"""The contract of every Store, as tests: subclasses of StoreContract or WritableContract define open().

A model is a dict of keys and values; its directories are the proper prefixes of its keys.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zarrfs.errors import InvalidKey, IsDirectory, NameTooLong, NotDirectory, NotFound
from zarrfs.store.api import Info, Kind, Store, Usage, WritableStore, join_key

Tree = dict[str, bytes]
Check = Callable[[Any], Awaitable[None]]

TREE: Tree = {
    "zarr.json": b'{"zarr_format": 3, "node_type": "group"}',
    "a/zarr.json": b"{}",
    "a/c/0/0": bytes(range(256)) * 40,
    "a/c/0/1": b"x",
    "a/c/10/0": b"",
    "a b/100%/q?x#y&z=1;+'\"": b"odd names",
    "é/ключ/鍵": b"more names",
    "b": b"file beside the directory a b",
    "B": b"capital",
    "a.b/c": b"sorts between a and a/b",
}

_NAMES = st.text(
    st.sampled_from("abcAB019.-_ %?#&+;:@!$'()*,=~[]^\\\"<>|é鍵😀"), min_size=1, max_size=6
).filter(lambda name: name not in (".", "..") and not name.startswith(".zarrfs-staging"))
_KEYS = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)


def without_conflicts(tree: Tree) -> Tree:
    """Return the tree without the keys that have another key as a directory."""
    kept: Tree = {}
    for key in sorted(tree):
        parts = key.split("/")
        if not any("/".join(parts[:depth]) in kept for depth in range(1, len(parts))):
            kept[key] = tree[key]
    return kept


TREES = st.dictionaries(_KEYS, st.binary(max_size=300), min_size=1, max_size=12).map(without_conflicts)
RANGES = st.lists(
    st.tuples(st.integers(0, 320), st.none() | st.integers(0, 320)), min_size=1, max_size=6
)


def directories(tree: Tree) -> set[str]:
    """Return the directories of a model, including the root."""
    found = {""}
    for key in tree:
        parts = key.split("/")
        found |= {"/".join(parts[:depth]) for depth in range(1, len(parts))}
    return found


def children(tree: Tree, prefix: str) -> dict[str, Kind]:
    """Return the names in a directory of a model, with their kinds."""
    start = prefix + "/" if prefix else ""
    found = {}
    for key in tree:
        if key.startswith(start):
            name, slash, _ = key[len(start) :].partition("/")
            found[name] = Kind.DIRECTORY if slash else Kind.FILE
    return found


async def listed(store: Store, prefix: str, after: str = "") -> list[Info]:
    """Return the entries of list_dir()."""
    return [info async for info in store.list_dir(prefix, after)]


async def keys(store: Store, prefix: str = "") -> list[str]:
    """Return the keys of list_prefix()."""
    return [key async for key in store.list_prefix(prefix)]


Order = Callable[[Tree, str], list[str]]


def by_name(tree: Tree, prefix: str) -> list[str]:
    """Return the names in a directory of a model in the order that most stores promise: by code points."""
    return sorted(children(tree, prefix))


async def check_tree(store: Store, tree: Tree, order: Order = by_name) -> None:
    """Check that the store holds exactly the model, and lists it in the promised order."""
    for prefix in directories(tree):
        info, infos = await store.info(prefix), await listed(store, prefix)
        assert (info.name, info.kind) == (prefix.rpartition("/")[2], Kind.DIRECTORY)
        assert {info.name: info.kind for info in infos} == children(tree, prefix)
        assert [info.name for info in infos] == order(tree, prefix)
        for info in infos:  # a listing may not know the size
            assert info.kind is Kind.DIRECTORY or info.size in (None, len(tree[join_key(prefix, info.name)]))
        below = [key for key in tree if key.startswith(f"{prefix}/" if prefix else "")]
        assert sorted(await keys(store, prefix)) == sorted(below)
    for key, value in tree.items():
        assert bytes(await store.get(key)) == value
        info = await store.info(key)
        assert (info.name, info.kind, info.size) == (key.rpartition("/")[2], Kind.FILE, len(value))


async def check_ranges(store: Store, tree: Tree, ranges: list[tuple[int, int | None]]) -> None:
    """Check that each range of every value has the same bytes as in the model."""
    for key, value in tree.items():
        for start, length in ranges:
            wanted = value[start:] if length is None else value[start : start + length]
            assert bytes(await store.get(key, start, length)) == wanted


class StoreContract:
    """Tests of the methods that read."""

    tree: ClassVar[Tree] = TREE  # a tree that the store can hold; some stores cannot hold every tree
    file: ClassVar[str] = "b"  # a file in `tree`
    trees: ClassVar[st.SearchStrategy[Tree]] = TREES  # random trees that the store can hold
    examples: ClassVar[int] = 25  # the number of random trees; fewer if making one is slow
    sorted_by_name: ClassVar[bool] = True

    def order(self, tree: Tree, prefix: str) -> list[str]:
        """Return the names in a directory of a model in the order that the store promises."""
        return by_name(tree, prefix)

    def usable(self, tree: Tree) -> Tree:
        """Return the part of a random tree that the store can hold."""
        return tree

    def open(self, tree: Tree) -> AbstractAsyncContextManager[Any]:
        """Return a context manager for a store that holds `tree` and is removed afterwards."""
        raise NotImplementedError

    def run(self, check: Check, tree: Tree | None = None) -> None:
        """Run `check` with a store that holds `tree`."""

        async def main() -> None:
            async with self.open(self.tree if tree is None else tree) as store:
                await check(store)

        trio.run(main)

    def test_the_store_holds_exactly_the_tree(self) -> None:
        async def check(store: Store) -> None:
            assert isinstance(await store.usage(), Usage)
            await check_tree(store, self.tree, self.order)
            await store.aclose()  # the context closes it again

        self.run(check)

    def test_ranges_have_the_right_bytes(self) -> None:
        ranges = [(0, None), (0, 0), (0, 1), (5, 3), (255, 2), (10_239, 5), (10_240, 1), (99_999, None)]
        ranges.append((3, 1 << 48))  # memory is allocated only for the bytes that exist
        self.run(lambda store: check_ranges(store, self.tree, ranges))

    def test_a_listing_resumes_after_a_name(self) -> None:
        async def check(store: Store) -> None:
            for directory in directories(self.tree):
                names = self.order(self.tree, directory)
                for number, name in enumerate(names):
                    assert [info.name for info in await listed(store, directory, name)] == names[number + 1 :]
            if self.sorted_by_name:
                names = self.order(self.tree, "")
                assert [info.name for info in await listed(store, "", "a!")] == [n for n in names if n > "a!"]

        self.run(check)

    def test_missing_keys_are_not_found(self) -> None:
        async def check(store: Store) -> None:
            calls = (store.info, store.get, store.open, lambda key: listed(store, key), lambda key: keys(store, key))
            for key in ("nope", "a/nope", "nope/a", "a/c/0/2", "zarr", "zarr.jso", "é/é", f"{self.file}/c"):
                for call in calls:
                    with pytest.raises((NotFound, NotDirectory) if key.startswith(f"{self.file}/") else NotFound):
                        await call(key)

        self.run(check)

    def test_a_directory_cannot_be_read_and_a_value_cannot_be_listed(self) -> None:
        async def check(store: Store) -> None:
            for key in directories(self.tree):
                for call in (store.get, store.open):
                    with pytest.raises(IsDirectory):
                        await call(key)
            for listing in (listed, keys):
                with pytest.raises(NotDirectory):
                    await listing(store, self.file)

        self.run(check)

    def test_invalid_keys_are_not_found_or_refused(self) -> None:
        async def check(store: Store) -> None:
            for key in ("/a", "a/", "a//b", "a/../b", "..", ".", "a/./b", "a\0b", "a/" + "x" * 300):
                for call in (store.info, store.get):
                    with pytest.raises((InvalidKey, NotFound)):
                        await call(key)
                with contextlib.suppress(InvalidKey, NotFound):
                    assert not await listed(store, key), key

        self.run(check)

    def test_values_are_located(self) -> None:
        async def check(store: Store) -> None:
            for key in self.tree:
                where = await store.locate(key)
                assert where
                assert json.loads(json.dumps(where)) == where
            with pytest.raises(NotFound):
                await store.locate("nope")

        self.run(check)

    def test_concurrent_readers_get_the_right_bytes(self) -> None:
        async def check(store: Store) -> None:
            async def read(key: str) -> None:
                assert bytes(await store.get(key)) == self.tree[key]

            async with trio.open_nursery() as nursery:
                for key in [*self.tree] * 8:
                    nursery.start_soon(read, key)

        self.run(check)

    def test_an_open_value_is_read_exactly(self) -> None:
        async def check(store: Store) -> None:
            for key, data in self.tree.items():
                value = await store.open(key)
                assert value.size == value.info.size == len(data)
                assert bytes(await value.read(0, len(data) + 10)) == data  # cut at the end of the value
                assert bytes(await value.read(1, 2)) == data[1:3]
                assert not len(await value.read(len(data), 1))
                descriptor = value.fileno()
                if descriptor is not None:
                    assert os.pread(descriptor, len(data) + 1, 0) == data
                value.close()
                value.close()  # does nothing
            assert (await store.open(self.file)).version == (await store.open(self.file)).version

        self.run(check)

    def test_a_reader_gets_all_bytes_after_another_was_cancelled(self) -> None:
        """A reader is cancelled after each possible number of steps; the next reader does not hang."""

        async def check(store: Store) -> None:
            async def read(key: str) -> bytes:
                with contextlib.closing(await store.open(key)) as value:
                    return bytes(await value.read(0, value.size))

            for steps in range(1, 40):
                with trio.CancelScope() as scope:
                    counter = _CancelAfter(steps, scope)
                    trio.lowlevel.add_instrument(counter)
                    try:
                        for key, data in self.tree.items():
                            assert await read(key) == data
                    finally:
                        trio.lowlevel.remove_instrument(counter)
                if not scope.cancelled_caught:
                    break
            with trio.fail_after(30):
                for key, data in self.tree.items():
                    assert await read(key) == data

        self.run(check)

    def test_random_trees(self) -> None:
        @settings(max_examples=self.examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(tree=self.trees, ranges=RANGES)
        def check(tree: Tree, ranges: list[tuple[int, int | None]]) -> None:
            async def both(store: Store) -> None:
                await check_tree(store, part, self.order)
                await check_ranges(store, part, ranges)

            part = self.usable(tree)
            if part:
                self.run(both, part)

        check()


class _CancelAfter(trio.abc.Instrument):
    """An instrument that cancels `scope` after `steps` steps of the task that created it."""

    def __init__(self, steps: int, scope: trio.CancelScope) -> None:
        self._left, self._scope, self._task = steps, scope, trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if not self._left:
                self._scope.cancel()


_CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["set", "delete", "open"]),
        st.sampled_from(["x", "z", "d", "d/x", "d/e", "d/e/y", "d/n/e/w", "x/y", "z/y/y"]),
        st.binary(max_size=40),
    ),
    max_size=25,
)  # fmt: skip


class WritableContract(StoreContract):
    """Tests of the operations that read and of those that write."""

    def test_random_changes(self) -> None:
        """Values and listings are compared with a dict; an open value keeps the bytes it had when it was opened."""

        @settings(max_examples=self.examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(changes=_CHANGES)
        def check(changes: list[tuple[str, str, bytes]]) -> None:
            model: Tree = {"z": b"stays", "d/x": b"1", "d/e/y": b"2", "other/file": b"3"}
            made = directories(model)

            async def change(store: WritableStore, operation: str, key: str, data: bytes) -> None:
                parts = key.split("/")
                above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
                if operation == "set":
                    if key in made or above & set(model):
                        with pytest.raises(IsDirectory if key in made else NotDirectory):
                            await store.set(key, data)
                    else:
                        await store.set(key, data)
                        model[key] = data
                        made.update(above)
                elif key not in model and key not in made:
                    with pytest.raises((NotFound, NotDirectory)):
                        await store.delete(key)
                else:
                    await store.delete(key)
                    for names in (model, made):
                        for name in [name for name in names if name == key or name.startswith(key + "/")]:
                            names.pop(name) if isinstance(names, dict) else names.remove(name)

            async def run(store: WritableStore) -> None:
                held = []
                for operation, key, data in changes:
                    if operation != "open":
                        await change(store, operation, key, data)
                    elif key in model:
                        held.append((await store.open(key), model[key]))
                for value, expected in held:
                    assert bytes(await value.read(0, value.size)) == expected
                    value.close()
                assert {key: bytes(await store.get(key)) for key in await keys(store)} == model
                for directory in made:
                    wanted = {key.rpartition("/")[2] for key in {*model, *made} - {""} if _above(key) == directory}
                    assert {info.name for info in await listed(store, directory)} == wanted

            self.run(run, dict(model))

        check()

    @pytest.mark.parametrize("key", ["new", "a/c/0/0", "n/e/w"])
    def test_a_value_is_set_whole_or_not_at_all(self, key: str) -> None:
        """The writer is cancelled after each possible number of steps."""

        async def check(store: WritableStore) -> None:
            data = bytearray(b"new" * 1000)
            for steps in range(1, 20):
                with trio.CancelScope() as scope:
                    counter = _CancelAfter(steps, scope)
                    trio.lowlevel.add_instrument(counter)
                    try:
                        await store.set(key, memoryview(data))
                    finally:
                        trio.lowlevel.remove_instrument(counter)
                if not scope.cancelled_caught:
                    break
                await check_tree(store, self.tree)
            await check_tree(store, {**self.tree, key: bytes(data)})

        self.run(check)

    def test_invalid_keys_are_not_written(self) -> None:
        async def check(store: WritableStore) -> None:
            for key in ("", "/a", "a/", "a//b", "a/../b", "..", ".", "a\0b", "x" * 300):
                with pytest.raises((InvalidKey, NameTooLong)):
                    await store.set(key, b"")
                with pytest.raises((InvalidKey, NameTooLong)):
                    await store.delete(key)
            await check_tree(store, self.tree)

        self.run(check)


def _above(key: str) -> str:
    return key.rpartition("/")[0]
