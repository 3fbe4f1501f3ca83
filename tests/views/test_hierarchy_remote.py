"""Hierarchies on servers, with and without listings: only changed documents are read again."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.servers import Faulty, Nginx
from tests.sources.opening import open_source
from tests.sources.zarrstores import put_exact
from tests.store.contract import keys
from tests.views.arraystores import items_of, read_array
from tests.views.viewstores import GROUP_2, GROUP_3, v2, v3, written
from zarrfs.config.options import Options
from zarrfs.errors import ReadError, TargetChanged
from zarrfs.views.arrays import ArraysView
from zarrfs.views.translated import TranslatedView


def metadata(**nodes: Any) -> bytes:
    documents = {".zgroup": json.loads(GROUP_2), **{f"{name}/.zarray": value for name, value in nodes.items()}}
    return json.dumps({"zarr_consolidated_format": 1, "metadata": documents}).encode()


async def pass_seconds(clock: MockClock) -> None:
    """Let cached metadata expire: that of views by trio's clock, that of stores (metadata_ttl=0.1) by the system's."""
    clock.jump(2.2)
    await trio.sleep(0.15)


def test_chunks_are_errors_when_consolidated_metadata_has_changed(faulty: Faulty) -> None:
    faulty.put("/s/.zgroup", GROUP_2)
    faulty.put("/s/.zmetadata", metadata(a=json.loads(v2(dimension_separator="."))))
    clock = MockClock(rate=1.0)

    async def main() -> None:
        view = open_source(f"{faulty.url}/s", Options(view="v2", retries=0, metadata_ttl=0.1))
        assert isinstance(view, TranslatedView)
        try:
            seen = await view.hierarchy.node("a")
            assert seen is not None
            await pass_seconds(clock)
            assert await view.hierarchy.node("a") is seen  # unchanged, so the node is not parsed again
            changed = json.loads(v2(dimension_separator=".", shape=[1000, 20]))
            faulty.put("/s/.zmetadata", metadata(a=changed), tag="2")
            await pass_seconds(clock)
            assert json.loads(bytes(await view.get("a/.zarray")))["shape"] != [1000, 20]
            with pytest.raises(TargetChanged, match="a has changed"):
                await view.get("a/0.0")
        finally:
            await view.aclose()

    trio.run(main, clock=clock)


def test_a_bad_group_in_consolidated_metadata_is_an_error_for_itself_alone(faulty: Faulty) -> None:
    bad = json.loads(GROUP_3) | {"foo": {"must_understand": True}}
    nodes = {"g": bad, "g/x": json.loads(v3()), "old": {"zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0"}}
    inline = {"kind": "inline", "must_understand": False, "metadata": nodes}
    root = json.dumps(json.loads(GROUP_3) | {"consolidated_metadata": inline}).encode()
    tree = {"zarr.json": root, "g/zarr.json": json.dumps(bad).encode(), "g/x/zarr.json": v3(), "g/x/c/0/0": b"1" * 400}
    url = put_exact(faulty, "badgroup", tree)

    async def main() -> None:
        view = open_source(url, Options(view="v2", retries=0))
        try:
            assert json.loads(bytes(await view.get("g/x/.zarray")))["shape"] == [20, 20]
            assert bytes(await view.get("g/x/0/0")) == b"1" * 400
            with pytest.raises(ReadError, match="'foo' must be understood"):
                await view.get("g/.zgroup")
            assert [node.path async for node in view.hierarchy.walk("old")] == ["old"]
            assert "the experimental v3" in (await view.left_out("old"))["old"]
        finally:
            await view.aclose()

    trio.run(main)


@pytest.mark.parametrize(("whole", "compressed"), [(False, True), (True, False)])
def test_a_changed_chunk_is_seen_though_the_server_sends_no_times(
    faulty: Faulty, compressed: bool, whole: bool
) -> None:
    about = v2(shape=[400], chunks=[400], dtype="|u1", compressor={"id": "zlib"} if compressed else None)
    base = "/s"
    clock = MockClock(rate=1.0)
    faulty.put(f"{base}/x/.zarray", about)
    if whole:
        faulty.put(f"{base}/.zmetadata", metadata(x=json.loads(about)))
    faulty.put(f"{base}/.zgroup", GROUP_2)

    def put(value: bytes, tag: str) -> None:
        data = value * 400
        faulty.put(f"{base}/x/0", zlib.compress(data) if compressed else data, tag=tag)

    async def main() -> None:
        put(b"a", "1")
        view = open_source(f"{faulty.url}{base}", Options(view="arrays", retries=0, metadata_ttl=0.1))
        assert isinstance(view, ArraysView)
        try:
            assert bytes(await items_of(view)) == b"a" * 400
            put(b"b", "2")
            await pass_seconds(clock)
            assert bytes(await items_of(view)) == b"b" * 400
        finally:
            await view.aclose()

    trio.run(main, clock=clock)


@pytest.mark.parametrize(
    ("place", "key", "side"),
    [("zip", "3/4", 100), ("listing", "3/4", 100), *(("plain", key, 20) for key in ("0/0", "1/0", "1/1"))],
)
def test_old_nested_chunks_are_found(
    nginx: Nginx, faulty: Faulty, place: str, key: str, side: int, tmp_path: Path
) -> None:
    """A document without dimension_separator does not tell that they are nested; a plain server cannot list."""
    tree = {".zgroup": GROUP_2, "x/.zarray": v2(shape=[side, side], dtype="|u1"), f"x/{key}": b"\1" * 100}
    if place == "zip":
        url = str(tmp_path / "s.zip")
        with zipfile.ZipFile(url, "w") as archive:
            for name, value in tree.items():
                archive.writestr(name, value)
    elif place == "listing":
        url = f"{nginx.listing.url}/{written(nginx.listing.root, tree).name}"
    else:
        url = put_exact(faulty, f"old/{key}", tree)
    assert int(read_array(url, "x", Options(retries=0)).sum()) == 100


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("lists", [True, False])
def test_groups_and_arrays_named_like_documents_are_found(
    nginx: Nginx, faulty: Faulty, lists: bool, generation: int
) -> None:
    name, group, array = (".zgroup", GROUP_2, v2) if generation == 2 else ("zarr.json", GROUP_3, v3)
    arrays = [f"{above}/{below}" for above in ("g", "meta", "attrs") for below in ("meta", "attrs")]
    tree = {name: group, **{f"{above}/{name}": group for above in ("g", "meta", "attrs")}}
    for path in arrays:
        tree[f"{path}/{'.zarray' if generation == 2 else name}"] = array()
    if lists:
        url = f"{nginx.listing.url}/called{generation}"
        for key, value in tree.items():
            file = nginx.listing.root / f"called{generation}" / key
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(value)
    else:
        url = put_exact(faulty, f"called{generation}", tree)

    async def main() -> None:
        view = open_source(url, Options(view="v3", retries=0))
        try:
            for path in arrays:
                document = json.loads(bytes(await view.get(f"{path}/zarr.json")))
                assert document["shape"] == [20, 20], path
            if lists:
                assert {*arrays} <= {key.removesuffix("/zarr.json") for key in await keys(view)}
        finally:
            await view.aclose()

    trio.run(main)
