"""Tampered metadata gives an array, a group or a MetadataError, whatever sizes it declares."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any

import numcodecs  # noqa: F401  # its import takes memory, too
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zarrsamples import DRAFT, ROOT
from zarrfs.zarr import NODE_DOCUMENTS, draft
from zarrfs.zarr.codecs import check_codecs
from zarrfs.zarr.consolidated import consolidated
from zarrfs.zarr.documents import parse_document, parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.fillvalues import as_v2, as_v3
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

GENUINE = [
    (path.name, path.read_bytes())
    for store in ("v0_int32_01", "v1_float64_05", "v1_str160_09", "v2_hier", "v3_hier")
    for path in sorted((ROOT / store).rglob("*"))
    if path.name in NODE_DOCUMENTS
]
DRAFTS = [path.read_bytes() for path in sorted((DRAFT[0].store / "meta").rglob("*.json"))]
WORDS = sorted({
    "zarr_format", "node_type", "array", "group", "shape", "chunks", "dtype", "fill_value", "order", "filters",
    "compressor",
    "id", "name", "configuration", "codecs", "bytes", "endian", "sharding_indexed", "codec", "transpose",
    "chunk_shape",
    "data_type", "struct", "fields", "raw_bytes", "length_bytes", "regular", "string", "r8", "<f4", "|O", "|V0",
    "<M8[s]", "NaN",
    "0x7fc00000", "default", "v2", "prefix", "suffix", "base_encoding", "separator", "/", ".", "..",
    "must_understand", "blosc",
    "shuffle", "delta", "astype", "vlen-utf8", "numpy.datetime64", "unit", "scale_factor", "extensions", "chunk_grid",
})  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.sampled_from([1 << 31, 1 << 63, 1 << 64, 10**30, -(1 << 63)]),
    st.floats(), st.text(max_size=4), st.sampled_from(WORDS),
)  # fmt: skip
JSONS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)),
    max_leaves=12,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in a document."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *places(inner)]
    return found


def tamper(document: Any, draw: st.DataObject) -> Any:
    for _ in range(draw.draw(st.integers(1, 3))):
        container, key = draw.draw(st.sampled_from(places(document)))
        if isinstance(container, dict) and draw.draw(st.booleans()):
            container.pop(key)
            container[draw.draw(st.sampled_from(WORDS))] = draw.draw(JSONS)
        else:
            container[key] = draw.draw(JSONS)
        if not places(document):
            break
    return document


def check(found: ArrayMetadata | GroupMetadata) -> None:
    """Use every property of a parsed node."""
    if isinstance(found, GroupMetadata):
        return
    assert found.ndim == len(found.grid.counts) <= 64
    assert found.chunk_bytes < 1 << 63
    if found.fill is not None:
        assert len(found.fill) == found.dtype.itemsize
    json.dumps(as_v2(found))
    if found.dtype.kind != "O":
        json.dumps(as_v3(found), allow_nan=False)
    dtype = found.dtype.numpy
    assert dtype == np.dtype(object) or dtype.itemsize == found.dtype.itemsize
    for template in (found.keys, found.nested):
        if template is not None and found.grid.size:
            index = found.grid.index(found.grid.size - 1)
            assert template.index(template.key(index), found.grid) == index


@given(st.sampled_from(GENUINE), st.data())
@settings(max_examples=80)
def test_a_tampered_document_is_a_node_or_a_metadata_error(genuine: tuple[str, bytes], draw: st.DataObject) -> None:
    name, data = genuine
    document = tamper(json.loads(data), draw)
    with contextlib.suppress(MetadataError):
        check(
            parse_node(
                name, json.dumps(document).encode(), draw.draw(st.none() | JSONS.map(json.dumps).map(str.encode))
            )
        )


@settings(max_examples=50)
@given(st.sampled_from(DRAFTS), st.data())
def test_a_tampered_document_of_the_v3_draft_is_a_node_or_a_metadata_error(data: bytes, draw: st.DataObject) -> None:
    document = json.dumps(tamper(json.loads(data), draw)).encode()
    with contextlib.suppress(MetadataError):
        check(draft.parse("array", document))
    with contextlib.suppress(MetadataError):
        draft.entry_point(document)


@given(st.sampled_from(["v2_hier/.zmetadata", "v3_hier/zarr.json"]), st.data())
@settings(max_examples=30)
def test_tampered_consolidated_metadata_is_parsed_or_a_metadata_error(path: str, draw: st.DataObject) -> None:
    document = tamper(json.loads((ROOT / path).read_bytes()), draw)
    with contextlib.suppress(MetadataError):
        consolidated(path.split("/")[1], json.dumps(document).encode())


def test_declared_sizes_allocate_no_memory() -> None:
    members: list[dict[str, Any]] = [
        {"chunks": [1, 1, 1 << 60], "dtype": "<f4"}, {"chunks": [1, 1, 1], "dtype": "|S16777217"},
        {"chunks": [1, 1, 1], "dtype": [["a", "|V1", [1 << 30]]]}, {"chunks": [1, 1, 1], "dtype": "<U536870911"},
        {"chunks": [1, 1, 1], "dtype": "|i1", "filters": [{"id": "astype", "encode_dtype": "|S2147483647"}]},
        {"chunks": [1, 1, 1], "dtype": "<U4194304",
         "filters": [{"id": "categorize", "dtype": "<U4194304", "labels": ["a", "b"]}]},
    ]  # fmt: skip
    tracemalloc.start()
    try:
        for changed in members:
            with contextlib.suppress(MetadataError):
                document = {"zarr_format": 2, "fill_value": None, "shape": [1 << 62, 1 << 62, 1], **changed}
                found = parse_document(".zarray", document)
                assert isinstance(found, ArrayMetadata)
                check_codecs(found)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
