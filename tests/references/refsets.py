"""Helpers for tests of commits: read reference sets, and draw random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import trio
from hypothesis import strategies as st

from tests.sources.opening import open_source
from zarrfs.config.options import Options
from zarrfs.store.api import Kind, walk
from zarrfs.store.index import IndexStore

TARGET = bytes(range(256)) * 4  # the contents of each target of a random set


def entries(path: object) -> dict[str, Any]:
    """Return the set at `path` in order; a value is the bytes of an inline value, [url] or [url, offset, length]."""
    store = open_source(str(path), Options(), child=False)
    found: dict[str, Any] = {}

    async def collect() -> None:
        async for key, info in walk(store):
            assert key not in found
            if info.kind is Kind.FILE:
                where = await store.locate(key, shown=False)
                found[key] = list(where.values()) if "url" in where else bytes(await store.get(key))
        await store.aclose()

    trio.run(collect)
    if isinstance(store, IndexStore):
        assert list(found) == sorted(found, key=lambda key: key.split("/"))
    return found


def as_fsspec_reads(path: Path, **options: Any) -> dict[str, bytes]:
    """Return the bytes of every file of a set as fsspec reads them."""
    fs = fsspec.filesystem("reference", fo=str(path), skip_instance_cache=True, remote_protocol="file", **options)
    return {key: fs.cat_file(key) for key in fs.references}


def without_conflicts(document: dict[str, Any]) -> dict[str, Any]:
    """Return `document` without the keys that are also directories."""
    directories = {key[:at] for key in document for at, char in enumerate(key) if char == "/"}
    return {key: value for key, value in document.items() if key not in directories}


def targets(directory: Path) -> list[str]:
    """Create target files for random sets, with names that look like templates, chained or encoded URLs."""
    found = []
    for name in ("a", "b{{x}}", "{%c%}", "d%20 e", "{f}\n", "{{g\r\n", "hh::i"):
        path = directory / name
        path.write_bytes(TARGET)
        found.append(str(path))
    return found


NAMES = st.text(st.sampled_from("ab.é{ "), min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
KEYS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
BYTES = st.binary(max_size=12) | st.sampled_from([b"base64:", b"base64:AAEC", b"{{u}}", b"\xff", "é\0".encode()])


def random_sets(urls: list[str], keys: st.SearchStrategy[str] = KEYS) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for sets as entries() returns them, with ranges inside the files of targets()."""
    numbers = st.integers(0, len(TARGET) // 2)
    url = st.sampled_from(urls)
    values = BYTES | st.tuples(url).map(list) | st.tuples(url, numbers, numbers).map(list)
    return st.dictionaries(keys, values, max_size=8).map(without_conflicts)
