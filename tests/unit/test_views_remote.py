"""Hierarchies on a server: consolidated metadata is read again when it changes, and not before."""

from __future__ import annotations

import json
from typing import Any

import trio

from tests.servers import Faulty
from tests.unit.viewstores import GROUP_2, v2
from zarrfs.options import Options
from zarrfs.sources import open_source
from zarrfs.views.translated import TranslatedView


def metadata(**nodes: Any) -> bytes:
    documents = {".zgroup": json.loads(GROUP_2), **{f"{name}/.zarray": value for name, value in nodes.items()}}
    return json.dumps({"zarr_consolidated_format": 1, "metadata": documents}).encode()


def test_consolidated_metadata_is_read_again_when_it_changes(faulty: Faulty) -> None:
    faulty.put("/s/.zgroup", GROUP_2)
    faulty.put("/s/.zmetadata", metadata(a=json.loads(v2(dimension_separator="."))))

    async def main() -> None:
        view = open_source(f"{faulty.url}/s", Options(view="v2", retries=0))
        assert isinstance(view, TranslatedView)
        try:
            seen = await view.hierarchy.node("a")
            assert seen is not None
            await trio.sleep(1.1)
            assert await view.hierarchy.node("a") is seen  # so that nothing is made anew
            changed = json.loads(v2(dimension_separator=".", shape=[1000, 20]))
            faulty.put("/s/.zmetadata", metadata(a=changed), tag="2")
            await trio.sleep(2.2)  # a second each: of the store, and of the hierarchy
            assert json.loads(bytes(await view.get("a/.zarray")))["shape"] == [1000, 20]
            assert json.loads(bytes(await view.get(".zmetadata")))["metadata"]["a/.zarray"]["shape"] == [1000, 20]
        finally:
            await view.aclose()

    trio.run(main)
