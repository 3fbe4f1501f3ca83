"""Translated views fulfil the store contract: v2 and v3, over a directory and over an index."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import trio
from hypothesis import strategies as st

from tests.store.contract import StoreContract, Tree, by_name, directories
from tests.views.viewstores import GROUP_2, v0, v1, v2, v3, viewed
from zarrfs.views.translated import TranslatedView

# name in the source -> names in the v2 view and in the v3 view
CHUNKS = {
    "old/__zdata__/0.0.blosc": ("old/0.0", "old/0.0"),
    "old/__zdata__/1.1.blosc": ("old/1.1", "old/1.1"),
    "g/one/0.1": ("g/one/0.1", "g/one/0.1"),
    "g/nested/0/1": ("g/nested/0/1", "g/nested/0/1"),
    "g/nested/1/0": ("g/nested/1/0", "g/nested/1/0"),
    "a.b/c/1/1": ("a.b/1/1", "a.b/c/1/1"),
    "a.b/c/1/0": ("a.b/1/0", "a.b/c/1/0"),
    "b/c": ("b/0", "b/c"),  # the chunk of a scalar
}
DOCUMENTS: Tree = {
    "old/__zmeta__": v0(), "old/__zattr__": b'{"units": "K"}', "old/__zattr__.lock": b"",
    "g/.zgroup": GROUP_2, "g/.zattrs": b'{"title": "t"}', "g/one/meta": v1(), "g/one/attrs": b"{}",
    "g/nested/.zarray": v2(dimension_separator="/"), "a.b/zarr.json": v3(),
    "b/zarr.json": v3(shape=[], chunk_grid={"name": "regular", "configuration": {"chunk_shape": []}}),
}  # fmt: skip
LITTER: Tree = {
    "old/__zdata__/0.0.blosc.partial": b"x", "old/__zdata__/2.0.blosc": b"x", "g/one/00.1": b"x", "g/one/0.0.0": b"x",
    "g/nested/2/0": b"x", "g/nested/0/x": b"x", "a.b/c/0": b"x", "a.b/notes": b"x", "README": b"x", "b/c2": b"x",
}  # fmt: skip
VALUES = {key: key.encode() * 20 for key in CHUNKS}


class ViewContract(StoreContract):
    version: ClassVar[Literal[2, 3]]
    index: ClassVar[bool]
    made: ClassVar[Tree]  # the documents that the view generates
    place: Path

    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[TranslatedView]:
        """Open a view that contains `tree`: all of `made` and some chunks."""
        shown = {key: names[self.version - 2] for key, names in CHUNKS.items()}
        source = DOCUMENTS | {key: tree[name] for key, name in shown.items() if name in tree}
        there = directories(source)
        source |= {key: data for key, data in LITTER.items() if key.rpartition("/")[0] in there}
        async with viewed(self.place, source, self.version, self.index) as view:
            yield view

    sorted_by_name = False

    def order(self, tree: Tree, prefix: str) -> list[str]:
        """Documents come first."""
        documents = (".zarray", ".zattrs", ".zgroup", "zarr.json")
        return sorted(by_name(tree, prefix), key=lambda name: name not in documents)

    def usable(self, tree: Tree) -> Tree:
        return {**self.made, **tree}


@pytest.fixture(autouse=True, scope="class")
def _place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    cls = request.cls
    if cls is None:
        return
    cls.place = tmp_path_factory.mktemp("views")
    name, other = (".zarray", "zarr.json") if cls.version == 2 else ("zarr.json", ".zarray")

    async def documents() -> Tree:
        async with viewed(cls.place, DOCUMENTS, cls.version) as view:
            found = [key async for key in view.list_prefix("")]
            assert not any(key.endswith(other) for key in found)
            assert {"old", "g/one", "g/nested", "a.b", "b"} == {
                key.rpartition("/")[0] for key in found if key.endswith(name) and key not in (name, f"g/{name}")
            }
            return {key: bytes(await view.get(key)) for key in found}

    cls.made = trio.run(documents)
    shown = {CHUNKS[key][cls.version - 2]: VALUES[key] for key in CHUNKS}
    cls.tree = cls.made | shown
    cls.file = f"b/{name}"
    cls.trees = st.dictionaries(st.sampled_from([*shown]), st.binary(max_size=300), min_size=1)


class TestV2OfADirectory(ViewContract):
    version, index = 2, False


class TestV3OfAnIndex(ViewContract):
    version, index = 3, True
