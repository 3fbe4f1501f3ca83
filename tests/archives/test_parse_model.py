"""Archives against models: random trees against a dict, random blobvecs against a bytearray."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archives.compiled import D, F, L, file, opened, put, tree
from zarrfs.errors import SourceError
from zarrfs.store.api import Kind

NAMES = st.sampled_from(["a", "b", "ab", "a.b", "a-", "é"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
COMMON = st.fixed_dictionaries({}, optional={"mtime": st.integers(-(2**33), 2**33), "ctime": st.integers()})


def written(entry: dict[str, Any]) -> bytes | str | None:
    """Return the bytes of an entry, computed independently of the compiler."""
    if entry["mode"] in (D, L):
        return entry.get("data")
    if "data" not in entry:
        return bytes(entry["size"])
    if entry.get("encoding") == "base64":
        return base64.b64decode(entry["data"])
    if entry.get("encoding") == "utf-8":
        return entry["data"].encode()
    return json.dumps(entry["data"], ensure_ascii=False, separators=(",", ":")).encode()


def entries() -> st.SearchStrategy[dict[str, Any]]:
    kinds = (
        st.just({"mode": D}),
        TEXTS.filter(lambda text: text and "\0" not in text).map(lambda text: {"mode": L, "data": text}),
        TEXTS.map(lambda text: file(text)),
        TEXTS.map(lambda text: file(text, size=len(text.encode()))),
        st.binary(max_size=9).map(lambda data: file(base64.b64encode(data).decode(), encoding="base64")),
        st.integers(0, 99).map(lambda size: file(size=size)),
        JSON.map(lambda value: {"mode": F, "data": value}),
    )
    return st.tuples(st.one_of(kinds), COMMON).map(lambda parts: {**parts[0], **parts[1]})


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(PATHS, entries()), max_size=8))
def test_archives_of_random_trees_equal_a_model(listed: list[tuple[str, dict[str, Any]]]) -> None:
    model = dict(listed)
    parents = {path[:at] for path in model for at in range(len(path)) if path[at] == "/"}
    document = [{"path": path, **entry} for path, entry in listed]
    if any(model[parent]["mode"] != D for parent in parents & model.keys()):
        with pytest.raises(SourceError, match="the parent of"):
            tree(document)
        return
    found = tree(document)
    assert found.nodes.keys() == model.keys() | parents | {""}
    for path in parents - model.keys():
        assert found.nodes[path].kind is Kind.DIRECTORY
        assert found.nodes[path].mode is None
    for path, entry in model.items():
        node = found.nodes[path]
        assert node.kind is {F: Kind.FILE, D: Kind.DIRECTORY, L: Kind.SYMLINK}[entry["mode"]]
        assert node.mode == entry["mode"] & 0o7777
        assert node.mtime_ns == (entry["mtime"] * 10**9 if "mtime" in entry else None)
        assert node.data == written(entry)
    assert found.warnings == () or len(model) < len(listed)
    if len(model) == len(listed):
        assert tree(model).nodes == found.nodes


SIZE = 64
BLOBS = [bytes(range(64 * n, 64 * n + length)) for n, length in enumerate((1, 7, 16, 40))]


def painted(chosen: list[tuple[int, bytes]]) -> bytearray:
    model = bytearray(SIZE)
    for start, blob in chosen:
        model[start : start + len(blob)] = blob
    return model


def test_every_range_of_one_blobvec(tmp_path: Path) -> None:
    """Holes at the start, in the middle, at the end; touching regions, out of order."""
    chosen = [(37, BLOBS[1]), (4, BLOBS[2]), (20, BLOBS[0]), (30, BLOBS[1])]
    model = painted(chosen)
    data = [[start, len(blob), put(tmp_path, blob)] for start, blob in chosen]
    entry = file(data, encoding="blobvec", size=SIZE)
    other = file(data[:1], encoding="blobvec", size=SIZE)  # its regions are adjacent in the index
    with opened({"e": other, "f": entry, "g": other}, blobs=(str(tmp_path),)) as (store, _):

        async def main() -> None:
            where = await store.locate("f")
            assert [(region["start"], region["length"], region["offset"]) for region in where["regions"]] == [
                (4, 16, 0), (20, 1, 0), (30, 7, 0), (37, 7, 0),
            ]  # fmt: skip
            for start in range(SIZE + 1):
                for stop in range(start, SIZE + 2):
                    assert bytes(await store.get("f", start, stop - start)) == bytes(model[start:stop])

        trio.run(main)
