"""Hierarchies on a server that cannot list: changed documents are read again, unchanged ones are not."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.servers import Faulty, Nginx
from tests.sources.zarrstores import put_exact
from tests.store.contract import keys
from tests.views.viewstores import GROUP_2, GROUP_3, v2, v3
from zarrfs.config.options import Options
from zarrfs.sources import open_source
from zarrfs.views.arrays import ArraysView
from zarrfs.views.translated import TranslatedView


def metadata(**nodes: Any) -> bytes:
    documents = {".zgroup": json.loads(GROUP_2), **{f"{name}/.zarray": value for name, value in nodes.items()}}
    return json.dumps({"zarr_consolidated_format": 1, "metadata": documents}).encode()


async def pass_seconds(clock: MockClock) -> None:
    """Let what views have read be too old, by trio's clock, and what metadata_ttl=0.1 keeps, by the system's."""
    clock.jump(2.2)
    await trio.sleep(0.15)


def test_consolidated_metadata_is_read_again_when_it_changes(faulty: Faulty) -> None:
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
            assert await view.hierarchy.node("a") is seen  # so that nothing is made anew
            changed = json.loads(v2(dimension_separator=".", shape=[1000, 20]))
            faulty.put("/s/.zmetadata", metadata(a=changed), tag="2")
            await pass_seconds(clock)
            assert json.loads(bytes(await view.get("a/.zarray")))["shape"] == [1000, 20]
            assert json.loads(bytes(await view.get(".zmetadata")))["metadata"]["a/.zarray"]["shape"] == [1000, 20]
        finally:
            await view.aclose()

    trio.run(main, clock=clock)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_changed_chunk_is_seen_though_the_server_sends_no_times(
    faulty: Faulty, compressed: bool, whole: bool
) -> None:
    about = v2(shape=[400], chunks=[400], dtype="|u1", compressor={"id": "zlib"} if compressed else None)
    base = f"/{compressed}/{whole}"  # the server has what earlier tests have put
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
        view = open_source(f"{faulty.url}{base}", Options(view="arrays", arrays="raw", retries=0, metadata_ttl=0.1))
        assert isinstance(view, ArraysView)
        try:
            assert bytes(await view.get("x.bin")) == b"a" * 400
            put(b"b", "2")
            await pass_seconds(clock)
            assert bytes(await view.get("x.bin")) == b"b" * 400
        finally:
            await view.aclose()

    trio.run(main, clock=clock)


@pytest.mark.parametrize("key", ["0/0", "1/0", "1/1"])
def test_old_nested_chunks_are_found_where_the_server_cannot_list(faulty: Faulty, key: str) -> None:
    base = f"/old/{key}"
    faulty.put(f"{base}/x/.zarray", v2(dtype="|u1"))
    faulty.put(f"{base}/.zgroup", GROUP_2)
    faulty.put(f"{base}/x/{key}", b"\1" * 100)

    async def main() -> None:
        view = open_source(f"{faulty.url}{base}", Options(view="arrays", arrays="raw", retries=0))
        try:
            assert sum(bytes(await view.get("x.bin"))) == 100
        finally:
            await view.aclose()

    trio.run(main)


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("lists", [True, False])
def test_groups_and_arrays_that_are_called_as_documents(
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
