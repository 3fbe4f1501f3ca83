"""Stores of small Zarr hierarchies, and views over them, for tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from tests.store.contract import Tree
from zarrfs.config.options import Options
from zarrfs.store.api import Info, Store, Value
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.index import IndexStore
from zarrfs.store.indexfile import IndexWriter
from zarrfs.store.targets import Targets
from zarrfs.store.values import BytesValue
from zarrfs.views.translated import TranslatedView

numbers = itertools.count()


def v0(**more: Any) -> bytes:
    """Return a __zmeta__ of zarr 0.4: 20 x 20 items in chunks of 10 x 10; `more` overrides members."""
    about = {"shape": [20, 20], "chunks": [10, 10], "dtype": "<i4", "fill_value": 9, "cname": "lz4", "clevel": 5}
    return json.dumps(about | {"shuffle": 1} | more).encode()


def v1(**more: Any) -> bytes:
    """Return a meta of zarr 1.1 for an array of the same shape and chunks."""
    about = {"zarr_format": 1, "shape": [20, 20], "chunks": [10, 10], "dtype": "<i4", "fill_value": None}
    return json.dumps(about | {"order": "C", "compression": "zlib", "compression_opts": 1} | more).encode()


def v2(**more: Any) -> bytes:
    """Return a .zarray for an array of the same shape and chunks."""
    about = {"zarr_format": 2, "shape": [20, 20], "chunks": [10, 10], "dtype": "<i4", "fill_value": 0, "order": "C"}
    return json.dumps(about | {"compressor": None, "filters": None} | more).encode()


def v3(**more: Any) -> bytes:
    """Return a zarr.json for an array of the same shape and chunks."""
    about = {
        "zarr_format": 3, "node_type": "array", "shape": [20, 20], "data_type": "int32", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10, 10]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}], "attributes": {},
    }  # fmt: skip
    return json.dumps(about | more).encode()


GROUP_2, GROUP_3 = b'{"zarr_format": 2}', b'{"zarr_format": 3, "node_type": "group"}'


def written(root: Path, tree: Tree) -> Path:
    """Write `tree` as files to a new directory below `root`; return that directory."""
    base = root / f"source{next(numbers)}"
    for key, value in tree.items():
        path = base / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    return base


def indexed(root: Path, tree: Tree, links: Mapping[str, str] = {}) -> IndexStore:
    """Return an index that holds `tree` and, as that of an archive does, symbolic links."""
    path = str(root / f"{next(numbers)}.index")
    with IndexWriter(path) as writer:
        for key, value in tree.items():
            writer.inline(key, value)
        for key, target in links.items():
            writer.symlink(key, target)
        writer.commit()
    return IndexStore(path, Targets(Options()))


@asynccontextmanager
async def viewed(
    root: Path, tree: Tree, version: Literal[2, 3], index: bool = False
) -> AsyncIterator[TranslatedView]:
    """Open a view of `tree`, stored in a directory or in an index."""
    store: Store = indexed(root, tree) if index else FileSystemStore(str(written(root, tree)))
    view = TranslatedView(store, version)
    yield view
    await view.aclose()


class Timeless(FileSystemStore):
    """A store without times, as behind a server that sends neither ETag nor Last-Modified."""

    async def info(self, key: str, sized: bool = True) -> Info:
        return (await super().info(key, sized))._replace(mtime_ns=None, identity=None)

    async def open(self, key: str) -> Value:
        found = await super().open(key)
        return BytesValue(found.info._replace(mtime_ns=None, identity=None), await found.read(0, found.size))
