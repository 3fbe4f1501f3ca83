"""Parsing of metadata documents of every generation, and the errors of malformed ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.zarr.sample_documents import DOCUMENTS, array
from tests.zarrsamples import ROOT
from zarrfs.zarr import NODE_DOCUMENTS
from zarrfs.zarr.documents import parse_document, parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import load_json
from zarrfs.zarr.keys import DEFAULT, FLAT, NESTED, KeyTemplate
from zarrfs.zarr.layout import OtherFile
from zarrfs.zarr.model import ArrayMetadata, GroupMetadata

# -- genuine stores


@pytest.mark.parametrize(("release", "name"), [("0.4", "__zmeta__"), ("1.1", "meta"), ("2.18", ".zarray")])
def test_random_documents_of_released_versions_are_parsed(release: str, name: str) -> None:
    """Fill values equal the bytes that the release itself reads for a missing chunk.

    Values that numpy 1 converted, such as the text "0" to a bool, are refused.
    """
    refused = 0
    for case in load_json((ROOT / f"documents-{release}.json").read_bytes()):
        try:
            found = parse_document(name, case["document"])
        except MetadataError:
            refused += 1
            continue
        assert isinstance(found, ArrayMetadata)
        assert found.dtype.itemsize == case["itemsize"]
        assert case["dtype"] in (None, found.dtype.numpy.str)
        if case["fill"] is not None and found.dtype.text != "<f16":  # whose padding is random
            assert found.fill is not None
            assert found.fill.hex() == case["fill"], case["document"]
    assert refused == {"0.4": 116, "1.1": 97, "2.18": 0}[release]


# -- v0 and v1


def test_v1_order_f_applies_to_blosc_only() -> None:
    """zarr 1.x passed bytes in order F to Blosc alone."""
    blosc = {"cname": "lz4", "clevel": 5, "shuffle": 1}
    names = [codec.name for codec in array("meta", order="F", compression="blosc", compression_opts=blosc).codecs]
    assert names == ["transpose", "bytes", "blosc"]
    for name, opts in (("zlib", 1), ("bz2", 1), ("lzma", None), (None, None), ("none", None)):
        found = array("meta", order="F", compression=name, compression_opts=opts)
        assert "transpose" not in [codec.name for codec in found.codecs]
    one = array("meta", shape=[4], chunks=[2], order="F", compression="blosc", compression_opts=blosc)
    assert [codec.name for codec in one.codecs] == ["bytes", "blosc"]


@pytest.mark.parametrize("data", [b"", b"\0\1", b"name: x\n", b"{}", b"[1]", b'{"version": "zarr_format"}', b"{" * 9])
def test_meta_of_another_program_is_not_taken_for_a_node(data: bytes) -> None:
    with pytest.raises(OtherFile, match="not a document of Zarr v1"):
        parse_node("meta", data)


# -- v2


def test_bytes_codec_has_the_byte_order_of_filtered_items() -> None:
    def endian(*filters: Any) -> Any:
        codecs = array(".zarray", dtype="<f8", filters=list(filters)).codecs
        return next(codec for codec in codecs if codec.name == "bytes").configuration.get("endian")

    scale = {"id": "fixedscaleoffset", "scale": 10, "offset": 0, "dtype": "<f8"}
    assert endian({**scale, "astype": ">i2"}) == "big"
    assert endian({**scale, "astype": "|u1"}) is None
    assert endian(scale) == "little"
    assert endian({"id": "astype", "encode_dtype": ">f4", "decode_dtype": "<f8"}) == "big"


# -- v3


@pytest.mark.parametrize(
    ("encoding", "template"),
    [
        ("default", DEFAULT), ("v2", FLAT), ({"name": "default"}, DEFAULT), ({"name": "v2"}, FLAT),
        ({"name": "v2", "configuration": {"separator": "/"}}, NESTED),
        ({"name": "default", "configuration": {"separator": "."}}, KeyTemplate("c.", ".", "", "c")),
        ({"name": "v2", "configuration": {"prefix": "chunk", "suffix": "bin"}},
         KeyTemplate("chunk.", ".", ".bin", "chunk.bin")),
        ({"name": "v2", "configuration": {"prefix": "p", "separator": "-"}}, KeyTemplate("p-", "-", "", "p")),
        ({"name": "suffix", "configuration": {"suffix": ".tiff", "base_encoding": {"name": "default"}}},
         KeyTemplate("c/", "/", ".tiff", "c.tiff")),
        ({"name": "suffix", "configuration": {"suffix": ".zip", "base-encoding": {"name": "v2"}}},
         KeyTemplate("", ".", ".zip", "0.zip")),
        ({"name": "prefix", "configuration": {"prefix": "x/", "base_encoding": "v2"}},
         KeyTemplate("x/", ".", "", "x/0")),
    ],
)  # fmt: skip
def test_v3_chunk_key_encodings_become_templates(encoding: Any, template: KeyTemplate) -> None:
    assert array("zarr.json", chunk_key_encoding=encoding).keys == template


def test_optional_members_of_v3_are_parsed() -> None:
    found = array(
        "zarr.json", dimension_names=["y", None], storage_transformers=[{"name": "x", "must_understand": False}],
        hint={"must_understand": False}, attributes={"a": 1}, extensions=[],
    )  # fmt: skip
    assert (found.dimension_names, found.attributes) == (("y", None), {"a": 1})
    assert array("zarr.json", data_type="string", fill_value="x", codecs=["vlen-utf8"]).fill_object == "x"
    group = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": None, "x": {"must_understand": False},
             "attributes": None}  # fmt: skip
    assert parse_document("zarr.json", group) == GroupMetadata("v3", {})


# -- malformed documents

COMMON: list[tuple[dict[str, Any], str]] = [
    ({"shape": [-1, 6]}, "shape: expected whole numbers, 0 or more"), ({"shape": ...}, "shape is missing"),
    ({"shape": [4.0, 6]}, "shape"), ({"shape": [True, 6]}, "shape"), ({"shape": None}, "shape"),
    ({"shape": [4]}, "shape has 1 dimensions, chunks has 2"), ({"shape": [1 << 63, 6]}, "2\\^63"),
    ({"shape": [10**200, 6]}, "2\\^63|255"), ({"shape": [math.nan, 6]}, "shape"),
    ({"chunks": [0, 5]}, "chunks: expected whole numbers, 1 or more"), ({"chunks": ...}, "is missing"),
    ({"chunks": [1 << 40, 1 << 40]}, "2\\^63"), ({"chunks": [2**63 - 1, 1]}, "2\\^63"),
    ({"shape": [1] * 65, "chunks": [1] * 65}, "more than 64 dimensions"), ({"dtype": ...}, "is missing"),
    ({"shape": [4] * 200, "chunks": [2] * 200}, "255 characters|64 dimensions"),
    ({"dtype": "x"}, "not known"), ({"dtype": []}, "type"), ({"fill_value": {}}, "fill_value"),
    ({"zarr_format": 7}, "zarr_format is not"), ({"zarr_format": None}, "zarr_format is not"),
]  # fmt: skip


CASES = [
    (name, members, rule)
    for members, rule in COMMON
    for name in DOCUMENTS
    if not (name == "__zmeta__" and "zarr_format" in members)  # that document has no such member
]


@pytest.mark.parametrize(("name", "members", "rule"), CASES, ids=range(len(CASES)))
def test_rules_of_every_generation_are_enforced(name: str, members: dict[str, Any], rule: str) -> None:
    members = dict(members)
    if name == "zarr.json" and "chunks" in members:
        chunks = {"chunk_shape": members.pop("chunks")}
        members["chunk_grid"] = {"name": "regular", "configuration": {k: v for k, v in chunks.items() if v is not ...}}
    if name == "zarr.json" and "dtype" in members:
        members["data_type"] = members.pop("dtype")
    with pytest.raises(MetadataError, match=rule.replace("chunks:", "chunks?:")):
        array(name, **members)


@pytest.mark.parametrize(
    ("name", "members", "rule"),
    [
        ("__zmeta__", {"dtype": "|O", "fill_value": None}, "addresses"),
        ("__zmeta__", {"cname": ...}, "cname is missing"),
        ("__zmeta__", {"shuffle": []}, "blosc with"), ("__zmeta__", {"shape": [], "chunks": []}, "no dimensions"),
        ("__zmeta__", {"fill_value": ...}, "fill_value is missing"),
        ("meta", {"shape": [], "chunks": []}, "no dimensions"),
        ("meta", {"compression": "lz77"}, "'lz77' is not known"),
        ("meta", {"compression": "zlib", "compression_opts": {}}, "not those of zlib"),
        ("meta", {"order": "A"}, "order: neither"),
        (".zarray", {"order": ["C"]}, "order"),
        (".zarray", {"filters": {"a": 1}}, "filters: neither"),
        (".zarray", {"filters": [{}]}, "filters: expected objects with an id"),
        (".zarray", {"compressor": "zlib"}, "compressor: expected objects with an id"),
        (".zarray", {"compressor": {"id": "blosc", "shuffle": 7}}, "blosc with"),
        (".zarray", {"dimension_separator": "-"}, "dimension_sep"),
        (".zarray", {"filters": [{"id": "delta", "astype": "x9"}]}, "dtype"),
        (".zarray", {"zarr_format": True}, "zarr_format"),
        ("zarr.json", {"node_type": "x"}, "node_type"), ("zarr.json", {"node_type": ["array"]}, "node_type"),
        ("zarr.json", {"zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0"}, "experimental v3"),
        ("zarr.json", {"attributes": []}, "attributes"),
        ("zarr.json", {"new": 1}, "'new' must be understood, and is not known"),
        ("zarr.json", {"chunk_grid": {"name": "rectilinear"}}, "chunk_grid 'rectilinear' is not known"),
        ("zarr.json", {"chunk_key_encoding": "fanout"}, "'fanout' is not known"),
        ("zarr.json", {"chunk_key_encoding": ...}, "missing"),
        ("zarr.json", {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "-"}}}, "separator"),
        ("zarr.json", {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": 3}}}, "not text"),
        ("zarr.json", {"chunk_key_encoding": {"name": "v2", "configuration": {"prefix": "../.."}}}, "is not a key"),
        ("zarr.json", {"chunk_key_encoding": {"name": "suffix", "configuration": {"suffix": "7"}}}, "suffix begins"),
        ("zarr.json", {"codecs": [3]}, "codecs"),
        ("zarr.json", {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]}, "endian"),
        ("zarr.json", {"dimension_names": ["x"]}, "dimension"),
        ("zarr.json", {"dimension_names": [1, 2]}, "dimension_names"),
        ("zarr.json", {"storage_transformers": [{"name": "indexed"}]}, "'indexed' must be understood"),
        ("zarr.json", {"fill_value": None}, "fill_value"),
    ],
)  # fmt: skip
def test_rules_of_one_generation_are_enforced(name: str, members: dict[str, Any], rule: str) -> None:
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
def test_malformed_documents_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(MetadataError):
        parse_node(name, data)


def test_deeply_nested_extensions_are_refused() -> None:
    codec: Any = "bytes"
    for _ in range(50):
        codec = {"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 5], "codecs": [codec]}}
    with pytest.raises(MetadataError, match="shards within shards"):
        array("zarr.json", codecs=[codec])
    encoding: Any = "default"
    for _ in range(50):
        encoding = {"name": "suffix", "configuration": {"suffix": ".x", "base_encoding": encoding}}
    with pytest.raises(MetadataError, match="within each other"):
        array("zarr.json", chunk_key_encoding=encoding)
