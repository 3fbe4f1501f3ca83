"""Translated views: contents, nodes left out with a warning, and changes of the source."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import trio
from trio.testing import MockClock

from tests.conftest import DATA
from tests.sources.zarrstores import tree_of
from tests.store.contract import Tree, keys, listed
from tests.views.viewstores import GROUP_2, Timeless, indexed, v1, v2, v3, viewed, written
from zarrfs.errors import NotFound, ReadError, TargetChanged
from zarrfs.store.directory import FileSystemStore
from zarrfs.views.translated import TranslatedView


def on_view(
    root: Path, tree: Tree, version: Literal[2, 3], check: Callable[[TranslatedView], Awaitable[None]], **how: Any
) -> None:
    async def main() -> None:
        async with viewed(root, tree, version, **how) as view:
            await check(view)

    trio.run(main)


async def document(view: TranslatedView, key: str) -> Any:
    """Return a parsed document, after checking that it is strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(bytes(await view.get(key)), parse_constant=refuse)


def test_only_the_hierarchy_is_shown(tmp_path: Path) -> None:
    tree = {
        "a/meta": v1(), "a/0.0": b"x", "a/0.0.6ba7b810.partial": b"x", "a/attrs.lock": b"", "a/5.0": b"x",
        "a/x/y": b"", "deep/er/b/.zarray": v2(), ".git/config": b"", "notes.txt": b"",
    }  # fmt: skip

    async def check(view: TranslatedView) -> None:
        assert sorted(await keys(view)) == [
            "a/0.0", "a/zarr.json", "deep/er/b/zarr.json", "deep/er/zarr.json", "deep/zarr.json", "zarr.json",
        ]  # fmt: skip
        for key in ("deep", "deep/er"):
            assert await document(view, f"{key}/zarr.json") == {
                "zarr_format": 3, "node_type": "group", "attributes": {},
            }  # fmt: skip
        for key in ("a/5.0", "a/meta", "a/x", "notes.txt", "a/0.0.6ba7b810.partial", "a/01.0"):
            with pytest.raises(NotFound):
                await view.info(key)

    on_view(tmp_path, tree, 3, check)


def test_the_chunk_of_a_scalar_below_a_prefix_is_listed(tmp_path: Path) -> None:
    encoding = {"name": "prefix", "configuration": {"prefix": "p/"}}
    grid = {"name": "regular", "configuration": {"chunk_shape": []}}
    tree = {"a/zarr.json": v3(shape=[], chunk_grid=grid, chunk_key_encoding=encoding), "a/p/c": b"1234"}

    async def check(view: TranslatedView) -> None:
        assert await keys(view) == [".zgroup", "a/.zarray", "a/.zattrs", "a/0"]
        assert bytes(await view.get("a/0")) == b"1234"

    on_view(tmp_path, tree, 2, check)


def test_nested_chunks_of_old_stores_are_detected(tmp_path: Path) -> None:
    both = {"flat/.zarray": v2(), "flat/1.1": b"x", "nested/.zarray": v2(), "nested/1/0": b"x", "none/.zarray": v2()}
    both |= {"declared/.zarray": v2(dimension_separator="."), "declared/1/0": b"x"}

    async def as_v2(view: TranslatedView) -> None:
        assert "dimension_separator" not in await document(view, "flat/.zarray")
        assert "dimension_separator" not in await document(view, "none/.zarray")
        assert (await document(view, "nested/.zarray"))["dimension_separator"] == "/"
        assert bytes(await view.get("nested/1/0")) == b"x"

    async def as_v3(view: TranslatedView) -> None:
        for path, separator in ("flat", "."), ("nested", "/"), ("declared", "."):
            encoding = {"name": "v2", "configuration": {"separator": separator}}
            assert (await document(view, f"{path}/zarr.json"))["chunk_key_encoding"] == encoding

    for index in False, True:
        on_view(tmp_path, both, 2, as_v2, index=index)
        on_view(tmp_path, both, 3, as_v3, index=index)


EVICTED = ["evicted", "evicted and removed", "evicted, no document"]


def test_a_changed_document_of_a_store_without_times_is_noticed(tmp_path: Path) -> None:
    base = written(tmp_path, {"a/.zarray": v2(), "a/0.0": b"1"})

    async def main() -> None:
        view = TranslatedView(Timeless(str(base)), 3)
        for _ in range(2):
            assert bytes(await view.get("a/0.0")) == b"1"
            await trio.sleep(1.1)
        (base / "a/.zarray").write_bytes(v2(shape=[20, 30]))  # of the same size
        with pytest.raises(TargetChanged, match="a has changed"):
            await view.get("a/0.0")
        with pytest.raises(TargetChanged, match="a has changed"):  # the array has more chunks than the view would list
            await listed(view, "a")
        await view.aclose()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("change", ["type", "nested", "removed", *EVICTED])
def test_chunks_of_an_array_without_chunks_at_first_are_never_those_of_another_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A document without dimension_separator does not tell whether chunks are nested."""
    monkeypatch.setattr("zarrfs.views.hierarchy._KNOWN", 3)
    base = written(tmp_path, {".zgroup": GROUP_2, **{f"{name}/.zarray": v2() for name in "abcdef"}})

    async def main() -> None:
        view = TranslatedView(FileSystemStore(str(base)), 3)
        assert await document(view, "a/zarr.json")
        with pytest.raises(NotFound):
            await view.get("a/0.0")
        if change == "nested":
            (base / "a/0").mkdir()
            (base / "a/0/0").write_bytes(b"1")
        elif change.endswith("removed"):
            shutil.rmtree(base / "a")
        elif change == "evicted, no document":
            (base / "a/.zarray").unlink()
        else:
            (base / "a/.zarray").write_bytes(v2(dtype="<f4", fill_value=-1.0))
            (base / "a/0.0").write_bytes(b"1")
        for _ in range(3):
            await trio.sleep(1.1)
            for name in "bcdef" if change.startswith("evicted") else "":
                assert await document(view, f"{name}/zarr.json")
            with pytest.raises(TargetChanged, match="a has changed"):
                await view.get("a/0.0")
        if change in EVICTED:
            with pytest.raises(ReadError, match="has changed: zarrfs refresh"):
                await view.get("a/zarr.json")
        await view.aclose()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("name", "change"), [("zarr.json", "mode"), ("zarr.json", "attribute"), (".zarray", "other writer")]
)
def test_chunks_stay_readable_when_a_document_changes_in_nothing_but_attributes(
    tmp_path: Path, name: str, change: str
) -> None:
    make = v3 if name == "zarr.json" else v2
    chunk = "c/0/0" if name == "zarr.json" else "0.0"
    base = written(tmp_path, {f"a/{name}": make(), f"a/{chunk}": b"1"})
    source = base / "a" / name

    async def main() -> None:
        view = TranslatedView(FileSystemStore(str(base)), 3)
        assert bytes(await view.get(f"a/{chunk}")) == b"1"
        if change == "mode":
            source.chmod(0o600)
        else:
            more = {"attributes": {"w": 1}} if change == "attribute" and name == "zarr.json" else {}
            source.write_text(json.dumps(json.loads(make(**more)), indent=3))
        for _ in range(3):
            await trio.sleep(1.1)
            assert bytes(await view.get(f"a/{chunk}")) == b"1"
        source.write_bytes(make(shape=[20, 30]))  # the array itself is looked at after that, too
        os.utime(source, ns=(7, 7))
        await trio.sleep(1.1)
        with pytest.raises(TargetChanged, match="a has changed"):
            await view.get(f"a/{chunk}")
        await view.aclose()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_what_lies_in_the_place_of_a_chunk_is_an_error_and_not_an_absent_chunk(tmp_path: Path) -> None:
    tree = {"a/.zarray": v2(), "a/0.0/x": b"", "b/.zarray": v2(dimension_separator="/"), "b/0": b"", "b/1/0": b"y"}

    async def main() -> None:
        view = TranslatedView(FileSystemStore(str(written(tmp_path, tree))), 3)
        assert (await view.info("a/0.0")).unreadable
        for key in ("a/0.0", "b/0/1"):
            with pytest.raises(ReadError, match="in the place of"):
                await view.get(key)
        with pytest.raises(NotFound):
            await view.get("b/1/1")
        await view.aclose()

    trio.run(main)


def test_links_appear_as_files_and_never_leave_the_source(tmp_path: Path) -> None:
    base = written(tmp_path, {"a/.zarray": v2(), "a/real": b"12", "g/.zgroup": GROUP_2})
    (base / "a/0.0").symlink_to("real")
    (base / "a/0.1").symlink_to("/etc/passwd")
    (base / "g/up").symlink_to("..")
    (base / "b").symlink_to("a")
    (base / "c").mkdir()
    (base / "c/.zarray").symlink_to("../a/.zarray")

    async def main() -> None:
        view = TranslatedView(FileSystemStore(str(base)), 3)
        assert (await view.info("a/0.0")).size == 2
        assert bytes(await view.get("a/0.0")) == bytes(await view.get("b/0.0")) == b"12"
        assert (await view.info("a/0.1")).unreadable
        with pytest.raises(ReadError):
            await view.get("a/0.1")
        assert bytes(await view.get("g/up/a/0.0")) == b"12"
        assert [node.path async for node in view.hierarchy.walk()] == ["", "a", "b", "c", "g"]
        assert (await view.info("c/zarr.json")).size == (await view.info("a/zarr.json")).size
        await view.aclose()

    trio.run(main)


def test_nodes_below_a_link_to_a_group_in_an_archive_are_found(tmp_path: Path) -> None:
    tree = {"g/.zgroup": GROUP_2, "g/h/a/.zarray": v2(), "g/h/a/0.0": b"y"}
    links = {"l": "g", "g/m": "h", "g/up": "..", "g/h/a/0.1": "0.0"}

    async def main() -> None:
        view = TranslatedView(indexed(tmp_path, tree, links), 2)
        for group in ("g/h", "g/m", "l/h", "l/m", "g/up/l/m"):
            assert [info.name for info in await listed(view, group)] == [".zgroup", "a"]
            assert (await document(view, f"{group}/a/.zarray"))["shape"] == [20, 20]
            assert bytes(await view.get(f"{group}/a/0.0")) == bytes(await view.get(f"{group}/a/0.1")) == b"y"
        with pytest.raises(NotFound):
            await view.info("l/nothing")
        assert [info.name for info in await listed(view, "g")] == [".zgroup", "h", "m"]
        await view.aclose()

    trio.run(main)


@pytest.mark.parametrize("target", ["nowhere", "x", "../../outside"])
def test_links_in_an_archive_without_a_target_in_the_source_are_errors(tmp_path: Path, target: str) -> None:
    """Chunks below such a link are not absent."""
    tree = {".zgroup": GROUP_2, "good/.zarray": v2(), "good/0.0": b"y", "y/0.0": b"z"}
    tree |= {"nested/.zarray": v2(dimension_separator="/"), "nested/0/0": b"y"}
    links, name = {"x": target, "y/.zarray": target, ".x": target, "nested/1": target}, ".zarray"
    links |= {"good/0.1": target, "l": "nested"}

    async def main() -> None:
        view = TranslatedView(indexed(tmp_path, tree, links), 2)
        for key in ("nested/1/0", "l/1/0", "good/0.1"):
            with pytest.raises(ReadError):
                await view.get(key)
        with pytest.raises(NotFound):
            await view.get("nested/0/1")
        names = [info.name for info in await listed(view, "")]
        assert [found for found in names if not found.startswith((".z", "zarr"))] == ["good", "l", "nested", "x", "y"]
        for path in ("x", "y"):
            assert [info.name for info in await listed(view, path)] == [name]
            with pytest.raises(ReadError, match="leads nowhere"):
                await view.get(f"{path}/{name}")
        assert bytes(await view.get("good/0.0")) == b"y"
        await view.aclose()

    trio.run(main)


def test_dangling_links_in_a_store_of_the_v3_draft_are_errors(tmp_path: Path) -> None:
    links = {"array.array.json": "nowhere", "group": "nowhere", "same.array.json": "scalar.array.json"}
    links = {f"meta/root/{name}": target for name, target in links.items()}
    store = indexed(tmp_path, tree_of(DATA / "zarr/v3_draft"), links)

    async def main() -> None:
        view = TranslatedView(store, 3)
        assert {"array", "group", "same", "scalar", "sub"} <= {info.name for info in await listed(view, "")}
        for path in ("array", "group"):
            with pytest.raises(ReadError, match="leads nowhere"):
                await view.get(f"{path}/zarr.json")
        assert bytes(await view.get("same/zarr.json")) == bytes(await view.get("scalar/zarr.json"))
        await view.aclose()

    trio.run(main)


def test_a_node_with_the_name_of_a_document_is_left_out(tmp_path: Path) -> None:
    tree = {"g/.zgroup": GROUP_2, "g/zarr.json/.zarray": v2(), "g/a/.zarray": v2()}

    async def as_v3(view: TranslatedView) -> None:
        assert [info.name for info in await listed(view, "g")] == ["zarr.json", "a"]
        assert (await document(view, "g/zarr.json"))["node_type"] == "group"
        assert await view.left_out("") == {"g/zarr.json": "has the name of a document"}

    async def as_v2(view: TranslatedView) -> None:
        assert (await document(view, "g/zarr.json/.zarray"))["shape"] == [20, 20]

    on_view(tmp_path, tree, 3, as_v3)
    on_view(tmp_path, tree, 2, as_v2)
