"""Archives compiled and read as in production: prepare.compile_document, then IndexStore and BlobReader."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from zarrfs.archives.blob_reader import BlobReader
from zarrfs.config.options import Options
from zarrfs.documents.document import Document
from zarrfs.errors import SourceError
from zarrfs.sources.prepare import compile_document
from zarrfs.store.api import Kind, join_key
from zarrfs.store.index import IndexStore

F, D, L = 0o100644, 0o040755, 0o120777  # modes of a file, a directory, a symlink
READ_AT_MOST = 1 << 24


class Node(NamedTuple):
    """One entry of an archive, as a reader sees it."""

    kind: Kind
    mode: int | None
    mtime_ns: int | None
    size: int
    data: bytes | str | None  # the bytes of a small file, or the target of a symlink
    allocated: int | None


class Tree(NamedTuple):
    nodes: dict[str, Node]
    warnings: tuple[str, ...]
    kind: str


def file(data: object = None, **more: Any) -> dict[str, Any]:
    """Return a file entry; `data` that is a string gets the encoding utf-8."""
    entry: dict[str, Any] = {"mode": F, **more}
    if data is not None:
        entry["data"] = data
        if isinstance(data, str):
            entry.setdefault("encoding", "utf-8")
    return entry


def blobref(data: bytes, algorithm: str = "sha1") -> str:
    return f"{algorithm}-{hashlib.new(algorithm, data).hexdigest()}"


def put(place: Path, data: bytes, algorithm: str = "sha1") -> str:
    """Store a blob in a directory and return its blobref."""
    name = blobref(data, algorithm)
    (place / name).write_bytes(data)
    return name


@contextlib.contextmanager
def opened(document: Any, **options: Any) -> Iterator[tuple[IndexStore, Any]]:
    """Compile a document (JSON text as bytes, or an object to encode) and yield (store, plan)."""
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    chosen = Options(**options)
    plan = compile_document(Document("test.json", raw, "/", None), chosen, time.monotonic() + 60)
    store = IndexStore(plan.index, BlobReader(chosen.blobs), plan.mtime_ns)
    try:
        yield store, plan
    finally:
        trio.run(store.aclose)


def tree(document: Any, **options: Any) -> Tree:
    """Compile an archive and return all its nodes, read through the store; the root has the key ""."""
    with opened(document, **options) as (store, plan):
        return Tree(trio.run(_nodes, store), plan.warnings, plan.kind)


async def _nodes(store: Any) -> dict[str, Node]:
    nodes: dict[str, Node] = {}

    async def walk(key: str) -> None:
        info = await store.info(key)
        data: bytes | str | None = info.target
        if info.kind is Kind.FILE and info.size <= READ_AT_MOST:
            data = bytes(await store.get(key))
            assert len(data) == info.size
        nodes[key] = Node(info.kind, info.mode, info.mtime_ns, info.size, data, info.allocated)
        if info.kind is Kind.DIRECTORY:
            async for child in store.list_dir(key):
                await walk(join_key(key, child.name))

    await walk("")
    return nodes


def refused(document: Any, entry: str | None, rule: str, **options: Any) -> None:
    """Check that an archive is refused with a one-line error that names `entry` and contains `rule`."""
    options.setdefault("type", "archive")
    with pytest.raises(SourceError) as caught:
        tree(document, **options)
    assert caught.value.entry == entry
    assert rule in caught.value.rule
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("test.json: ")
