"""Bad metadata documents: one clear error each, in every generation."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.zarr.sample_documents import DOCUMENTS, V2, array
from zarrfs.zarr.documents import (
    NODE_DOCUMENTS,
    parse_node,
)  # fmt: skip
from zarrfs.zarr.errors import MetadataError

COMMON: list[tuple[dict[str, Any], str]] = [
    ({"shape": [-1, 6]}, "shape: expected whole numbers, 0 or more"), ({"shape": ...}, "shape is missing"),
    ({"shape": [4.0, 6]}, "shape"), ({"shape": [True, 6]}, "shape"), ({"shape": 4}, "shape"),
    ({"shape": None}, "shape"),
    ({"shape": [4]}, "shape has 1 dimensions, chunks has 2"), ({"shape": [1 << 63, 6]}, "2\\^63"),
    ({"shape": [10**200, 6]}, "2\\^63|255"), ({"shape": ["4", 6]}, "shape"), ({"shape": {"0": 4}}, "shape"),
    ({"shape": [math.nan, 6]}, "shape"), ({"shape": [math.inf, 6]}, "shape"),
    ({"chunks": [0, 5]}, "chunks: expected whole numbers, 1 or more"), ({"chunks": [-2, 5]}, "chunks"),
    ({"chunks": None}, "chunks"),
    ({"chunks": [1 << 40, 1 << 40]}, "2\\^63"), ({"chunks": [2**63 - 1, 1]}, "2\\^63"),
    ({"chunks": ...}, "is missing"),
    ({"shape": [1] * 65, "chunks": [1] * 65}, "more than 64 dimensions"), ({"dtype": ...}, "is missing"),
    ({"shape": [4] * 200, "chunks": [2] * 200}, "255 characters|64 dimensions"),
    ({"dtype": "x"}, "not known"), ({"dtype": 3}, "type"), ({"dtype": []}, "type"),
    ({"fill_value": "x"}, "fill_value"),
    ({"fill_value": {}}, "fill_value"), ({"zarr_format": 7}, "zarr_format is not"),
    ({"zarr_format": None}, "zarr_format is not"),
]  # fmt: skip


CASES = [
    (name, members, rule)
    for members, rule in COMMON
    for name in DOCUMENTS
    if not (name == "__zmeta__" and "zarr_format" in members)  # it has none
]


@pytest.mark.parametrize(("name", "members", "rule"), CASES, ids=range(len(CASES)))
def test_rules_of_all_generations(name: str, members: dict[str, Any], rule: str) -> None:
    members = dict(members)
    if name == "zarr.json" and "chunks" in members:
        chunks = {"chunk_shape": members.pop("chunks")}
        members["chunk_grid"] = {"name": "regular", "configuration": {k: v for k, v in chunks.items() if v is not ...}}
    if name == "zarr.json" and "dtype" in members:
        members["data_type"] = members.pop("dtype")
    with pytest.raises(MetadataError, match=rule.replace("chunks:", "chunks?:")):
        array(name, **members)


def test_sixty_four_dimensions() -> None:
    for name in DOCUMENTS:
        members: dict[str, Any] = {"shape": [1] * 64, "chunks": [1] * 64}
        if name == "zarr.json":
            members["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": members.pop("chunks")}}
        assert array(name, **members).ndim == 64


@pytest.mark.parametrize(
    ("name", "members", "rule"),
    [
        ("__zmeta__", {"dtype": "|O", "fill_value": None}, "addresses"),
        ("__zmeta__", {"cname": ...}, "cname is missing"),
        ("__zmeta__", {"shuffle": 3}, "blosc with"), ("__zmeta__", {"shuffle": []}, "blosc with"),
        ("__zmeta__", {"clevel": "9"}, "blosc"),
        ("__zmeta__", {"cname": None}, "blosc with"), ("__zmeta__", {"shape": [], "chunks": []}, "no dimensions"),
        ("__zmeta__", {"fill_value": ...}, "fill_value is missing"),
        ("__zmeta__", {"shape": [0, 6], "chunks": [0, 6]}, "chunks"),
        ("meta", {"shape": [], "chunks": []}, "no dimensions"),
        ("meta", {"compression": "lz77"}, "'lz77' is not known"),
        ("meta", {"compression": []}, "not known"), ("meta", {"compression": "blosc"}, "not those of blosc"),
        ("meta", {"compression": "zlib", "compression_opts": {}}, "not those of zlib"),
        ("meta", {"order": "A"}, "order: neither"),
        ("meta", {"compression": "lzma", "compression_opts": 3}, "not those of lzma"),
        ("meta", {"dtype": "|O"}, "addresses"),
        (".zarray", {"order": None}, "order: neither"), (".zarray", {"order": ["C"]}, "order"),
        (".zarray", {"filters": {"a": 1}}, "filters: neither"),
        (".zarray", {"filters": "x"}, "filters"),
        (".zarray", {"filters": ["x"]}, "filters: expected objects with an id"),
        (".zarray", {"filters": [{}]}, "filters"),
        (".zarray", {"compressor": {}}, "compressor: expected objects with an id"),
        (".zarray", {"compressor": "zlib"}, "compressor"), (".zarray", {"compressor": {"id": 3}}, "compressor"),
        (".zarray", {"compressor": {"id": "blosc", "shuffle": 7}}, "blosc with"),
        (".zarray", {"dimension_separator": "-"}, "dimension_sep"),
        (".zarray", {"dimension_separator": ["."]}, "dimension_sep"),
        (".zarray", {"filters": [{"id": "delta", "astype": "x9"}]}, "dtype"),
        (".zarray", {"zarr_format": True}, "zarr_format"),
        ("zarr.json", {"node_type": "x"}, "node_type"), ("zarr.json", {"node_type": ["array"]}, "node_type"),
        ("zarr.json", {"zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0"}, "experimental v3"),
        ("zarr.json", {"attributes": []}, "attributes"),
        ("zarr.json", {"new": 1}, "'new' must be understood, and is not known"),
        ("zarr.json", {"new": {"must_understand": True}}, "'new' must be understood"),
        ("zarr.json", {"fill_value": ...}, "fill_value"),
        ("zarr.json", {"chunk_grid": {"name": "rectilinear"}}, "chunk_grid 'rectilinear' is not known"),
        ("zarr.json", {"chunk_grid": 3}, "chunk_grid: expected"),
        ("zarr.json", {"chunk_key_encoding": "fanout"}, "'fanout' is not known"),
        ("zarr.json", {"chunk_key_encoding": ...}, "missing"),
        ("zarr.json", {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "-"}}}, "separator"),
        ("zarr.json", {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": 3}}}, "no text"),
        ("zarr.json", {"chunk_key_encoding": {"name": "v2", "configuration": {"prefix": "../.."}}}, "is not a key"),
        ("zarr.json", {"chunk_key_encoding": {"name": "suffix", "configuration": {"suffix": "7"}}}, "told from"),
        ("zarr.json", {"codecs": []}, "codecs"), ("zarr.json", {"codecs": [3]}, "codecs"),
        ("zarr.json", {"codecs": {}}, "codecs"),
        ("zarr.json", {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]}, "endian"),
        ("zarr.json", {"codecs": [{"name": "bytes", "configuration": []}]}, "codecs"),
        ("zarr.json", {"dimension_names": ["x"]}, "dimension"),
        ("zarr.json", {"dimension_names": [1, 2]}, "dimension_names"),
        ("zarr.json", {"storage_transformers": {"a": 1}}, "storage_tr"),
        ("zarr.json", {"storage_transformers": [{"name": "indexed"}]}, "'indexed' must be understood"),
        ("zarr.json", {"fill_value": None}, "fill_value"),
    ],
)  # fmt: skip
def test_rules(name: str, members: dict[str, Any], rule: str) -> None:
    with pytest.raises(MetadataError, match=rule):
        array(name, **members)


def nested_json(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize("name", NODE_DOCUMENTS)
@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"3", b"\xff\xfe{}", "{}".encode("utf-16"), b"{} x", b"{'a': 1}",
        nested_json(100_000),
        b'{"zarr_format": 2, "zarr_format": 2}', b'{"zarr_format": ' + b"9" * 10_000 + b"}",
        b"{\"zarr_format\": 2, \"a\": \"\n\"}",
    ],
    ids=range(14),
)  # fmt: skip
def test_what_is_no_document(name: str, data: bytes) -> None:
    with pytest.raises(MetadataError):
        parse_node(name, data)


def test_sharding_within_sharding_within() -> None:
    codec: Any = "bytes"
    for _ in range(50):
        codec = {"name": "sharding_indexed", "configuration": {"codecs": [codec]}}
    with pytest.raises(MetadataError, match="shards within shards"):
        array("zarr.json", codecs=[codec])
    encoding: Any = "default"
    for _ in range(50):
        encoding = {"name": "suffix", "configuration": {"suffix": ".x", "base_encoding": encoding}}
    with pytest.raises(MetadataError, match="within each other"):
        array("zarr.json", chunk_key_encoding=encoding)


def test_attributes_that_are_none() -> None:
    cases = ((b"[]", r"\.zattrs is not a JSON object"), (b"{", "not JSON"), (nested_json(100_000), "too deep"))
    for data, rule in cases:
        with pytest.raises(MetadataError, match=rule):
            parse_node(".zarray", json.dumps(V2).encode(), data)
