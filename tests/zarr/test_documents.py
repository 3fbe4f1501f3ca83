"""Parsing of metadata documents of every generation, and the errors of malformed ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.zarr import sample_documents
from tests.zarr.sample_documents import DOCUMENTS, LITTLE, V2, array
from tests.zarrsamples import ROOT, SAMPLES, Sample
from zarrfs.zarr import ATTRIBUTE_DOCUMENTS, NODE_DOCUMENTS, dtypes
from zarrfs.zarr.documents import is_litter, parse_document, parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import load_json
from zarrfs.zarr.keys import DEFAULT, FLAT, NESTED, V0, KeyTemplate
from zarrfs.zarr.legacy import OtherFile
from zarrfs.zarr.model import ArrayMetadata, CodecSpec, GroupMetadata


def read(path: Path) -> ArrayMetadata | GroupMetadata:
    """Parse the node in a directory."""
    name = next(name for name in NODE_DOCUMENTS if (path / name).exists())
    attributes = path / ATTRIBUTE_DOCUMENTS.get(name, "")
    return parse_node(name, (path / name).read_bytes(), attributes.read_bytes() if attributes.is_file() else None)


# -- genuine stores


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.label)
def test_documents_of_sample_stores_are_parsed(sample: Sample) -> None:
    found = read(sample.store / sample.path)
    assert isinstance(found, ArrayMetadata)
    assert (found.generation, found.shape) == (sample.store.name[:2], sample.shape)
    assert found.dtype.numpy().str == sample.dtype
    if sample.attributes is not None:
        assert found.attributes == sample.attributes
    documents = {*NODE_DOCUMENTS, *ATTRIBUTE_DOCUMENTS.values()}
    keys = {str(path.relative_to(sample.store / sample.path)) for path in (sample.store / sample.path).rglob("*.*")}
    chunks = {key for key in keys if key not in documents and not is_litter(key) and "." in key.strip(".")}
    assert all(found.keys.index(key, found.grid) is not None for key in chunks)


@pytest.mark.parametrize("path", ["v2_hier", "v3_hier", "v2_hier/sub", "v3_hier/sub/deep"])
def test_groups_of_sample_stores_are_parsed(path: str) -> None:
    found = read(ROOT / path)
    assert isinstance(found, GroupMetadata)
    assert found.generation == path[:2]
    assert found.attributes == ({} if "/" in path else {"title": "t"})


def test_codec_pipelines_of_sample_stores() -> None:
    """Pipelines have the form of v3, whatever the generation."""

    def codecs(path: str) -> list[Any]:
        found = read(ROOT / path)
        assert isinstance(found, ArrayMetadata)
        return list(found.codecs)

    def blosc(typesize: int, cname: str, clevel: int, shuffle: str = "shuffle") -> CodecSpec:
        return CodecSpec(
            "blosc",
            {"typesize": typesize, "cname": cname, "clevel": clevel, "shuffle": shuffle, "blocksize": 0},
        )

    assert codecs("v0_int32_01") == [LITTLE, blosc(4, "lz4", 2)]
    assert codecs("v0_float64_06")[0] == CodecSpec("bytes", {"endian": "big"})
    assert codecs("v1_float64_05") == [LITTLE, blosc(8, "zstd", 6, "bitshuffle")]
    assert codecs("v1_int8_00") == [CodecSpec("bytes"), CodecSpec("numcodecs.zlib", {"level": 4})]
    assert codecs("v2_hier/forder") == [CodecSpec("transpose", {"order": [1, 0]}), LITTLE, blosc(4, "lz4", 5)]
    assert codecs("v2_hier/raw") == [LITTLE]
    assert codecs("v2_hier/zstd")[1] == CodecSpec("zstd", {"level": 3, "checksum": False})
    assert codecs("v2_hier/gzip")[1] == CodecSpec("gzip", {"level": 3})
    delta = CodecSpec("numcodecs.delta", {"astype": "<i8", "dtype": "<i8"})
    assert codecs("v2_hier/delta") == [delta, LITTLE, CodecSpec("numcodecs.zlib", {"level": 1})]
    shuffle = CodecSpec("numcodecs.shuffle", {"elementsize": 4})
    assert codecs("v2_hier/shuf") == [LITTLE, shuffle, CodecSpec("numcodecs.zlib", {"level": 1})]
    assert [codec.name for codec in codecs("v3_hier/crc")] == ["bytes", "zstd", "crc32c"]
    assert [codec.name for codec in codecs("v3_hier/shard")] == ["sharding_indexed"]


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
        assert case["dtype"] in (None, found.dtype.numpy().str)
        if case["fill"] is not None and found.dtype.text != "<f16":  # whose padding is random
            assert found.fill is not None
            assert found.fill.hex() == case["fill"], case["document"]
    assert refused == {"0.4": 116, "1.1": 97, "2.18": 0}[release]


# -- v0 and v1


def test_v0_documents_are_parsed() -> None:
    found = array("__zmeta__", fill_value=3, dtype="<i4", shuffle=2)
    assert (found.generation, found.keys, found.fill, found.chunk_bytes) == ("v0", V0, b"\3\0\0\0", 40)
    assert found.codecs[1].configuration["shuffle"] == "bitshuffle"
    assert array("__zmeta__", fill_value=None).fill is None
    data = json.dumps({**sample_documents.V0, "fill_value": math.nan}).encode()
    assert b"NaN" in data
    nan = parse_node("__zmeta__", data)
    assert isinstance(nan, ArrayMetadata)
    assert nan.fill == np.float32("nan").tobytes()


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


def test_v1_compressions_become_codecs() -> None:
    lzma = {"check": -1, "filters": None, "format": 1, "preset": 1}
    assert array("meta", compression="lzma", compression_opts=lzma).codecs[1] == CodecSpec("numcodecs.lzma", lzma)
    assert array("meta", compression="bz2", compression_opts=9).codecs[1] == CodecSpec("numcodecs.bz2", {"level": 9})
    assert array("meta").codecs == (LITTLE,)


@pytest.mark.parametrize("data", [b"", b"\0\1", b"name: x\n", b"{}", b"[1]", b'{"version": "zarr_format"}', b"{" * 9])
def test_meta_of_another_program_is_not_taken_for_a_node(data: bytes) -> None:
    with pytest.raises(OtherFile, match="not a document of Zarr v1"):
        parse_node("meta", data)


# -- v2


@pytest.mark.parametrize(
    ("filters", "dtype", "kind", "names"),
    [
        ([{"id": "vlen-utf8"}], "|O", "T", ["vlen-utf8", "numcodecs.zlib"]),
        ([{"id": "vlen-bytes"}], "|O", "B", ["vlen-bytes", "numcodecs.zlib"]),
        ([{"id": "json2", "encoding": "utf-8"}], "|O", "O", ["numcodecs.json2", "numcodecs.zlib"]),
        ([{"id": "pickle", "protocol": 5}], "|O", "O", ["numcodecs.pickle", "numcodecs.zlib"]),
        ([{"id": "categorize", "labels": ["a"], "dtype": "|O", "astype": "|u1"}], "|O", "O",
         ["numcodecs.categorize", "bytes", "numcodecs.zlib"]),
        ([{"id": "packbits"}], "|b1", "b", ["numcodecs.packbits", "bytes", "numcodecs.zlib"]),
        ([{"id": "bz2", "level": 1}, {"id": "delta", "dtype": "<i4"}], "<i4", "i",
         ["bytes", "numcodecs.bz2", "numcodecs.delta", "numcodecs.zlib"]),
        ([{"id": "crc32c"}], "<i4", "i", ["bytes", "crc32c", "numcodecs.zlib"]),
        ([{"id": "crc32c", "location": "start"}], "<i4", "i", ["bytes", "numcodecs.crc32c", "numcodecs.zlib"]),
    ],
)  # fmt: skip
def test_v2_filters_become_codecs(filters: Any, dtype: str, kind: str, names: list[str]) -> None:
    found = array(".zarray", filters=filters, dtype=dtype, compressor={"id": "zlib", "level": 1})
    assert found.dtype.kind == kind
    assert [codec.name for codec in found.codecs] == names


def test_bytes_codec_has_the_byte_order_of_filtered_items() -> None:
    def endian(*filters: Any) -> Any:
        codecs = array(".zarray", dtype="<f8", filters=list(filters)).codecs
        return next(codec for codec in codecs if codec.name == "bytes").configuration.get("endian")

    scale = {"id": "fixedscaleoffset", "scale": 10, "offset": 0, "dtype": "<f8"}
    assert endian({**scale, "astype": ">i2"}) == "big"
    assert endian({**scale, "astype": "|u1"}) is None
    assert endian(scale) == "little"
    assert endian({"id": "astype", "encode_dtype": ">f4", "decode_dtype": "<f8"}) == "big"


def test_v2_blosc_defaults() -> None:
    """Shuffle -1 depends on the size of items; typesize is limited to one byte."""

    def blosc(dtype: str, **opts: Any) -> tuple[Any, Any]:
        found = array(".zarray", dtype=dtype, fill_value=None, compressor={"id": "blosc", **opts}).codecs[1]
        return found.configuration["shuffle"], found.configuration["typesize"]

    assert blosc("|i1", shuffle=-1) == ("bitshuffle", 1)
    assert blosc("<i2", shuffle=-1) == ("shuffle", 2)
    assert blosc("|S300", shuffle=0) == ("noshuffle", 255)
    assert blosc("<f8") == ("shuffle", 8)


def test_optional_members_of_v2_are_parsed() -> None:
    assert array(".zarray", dimension_separator="/").keys == NESTED
    assert array(".zarray", dimension_separator=".").keys_assumed is False
    assert array(".zarray", dimension_separator=None).keys_assumed is True
    assert array(".zarray", order="F", shape=[4], chunks=[2]).codecs == (LITTLE,)
    assert array(".zarray", filters=[], compressor=..., order=..., unknown=1).codecs == (LITTLE,)
    assert array(".zarray", shape=[0, 6], chunks=[0, 6]).grid.chunks == (1, 6)  # as zarr-python writes them
    assert array(".zarray", shape=[], chunks=[]).keys.key(()) == "0"
    mixed = array(".zarray", dtype=[["a", "<i4"], ["b", ">i4"]], fill_value="AAAAAAAAAAA=")
    assert (mixed.codecs, mixed.dtype.mixed, mixed.fill) == ((CodecSpec("bytes"),), True, bytes(8))
    found = parse_node(".zarray", json.dumps(V2).encode(), b'{"a": NaN}')
    assert math.isnan(found.attributes["a"])


# -- v3


def test_v3_dtypes_have_the_byte_order_of_chunks() -> None:
    """Inner chunks of shards count, too."""
    big = {"name": "bytes", "configuration": {"endian": "big"}}
    assert array("zarr.json", codecs=[big]).dtype == dtypes.parse_v2(">f4")
    shard = {"name": "sharding_indexed", "configuration": {"chunk_shape": [5, 2], "codecs": [big]}}
    transpose = {"name": "transpose", "configuration": {"order": [1, 0]}}
    assert array("zarr.json", codecs=[transpose, shard]).dtype.endian == "big"
    assert array("zarr.json", data_type="int8", fill_value=1, codecs=["bytes"]).codecs == (CodecSpec("bytes"),)
    assert array("zarr.json", codecs=[{"name": "numcodecs.packbits"}, "bytes"]).dtype.endian == "little"
    assert array("zarr.json", codecs=[{**big, "name": "endian"}]).codecs[0].name == "bytes"
    with pytest.raises(MetadataError, match="bytes without endian"):
        array("zarr.json", codecs=["bytes"])


@pytest.mark.parametrize(
    ("encoding", "template"),
    [
        ("default", DEFAULT), ("v2", FLAT), ({"name": "default"}, DEFAULT), ({"name": "v2"}, FLAT),
        ({"name": "v2", "configuration": {"separator": "/"}}, NESTED),
        ({"name": "default", "configuration": {"separator": "."}}, KeyTemplate("", "c.", ".", "", "c")),
        ({"name": "v2", "configuration": {"prefix": "chunk", "suffix": "bin"}},
         KeyTemplate("", "chunk.", ".", ".bin", "chunk.bin")),
        ({"name": "v2", "configuration": {"prefix": "p", "separator": "-"}}, KeyTemplate("", "p-", "-", "", "p")),
        ({"name": "suffix", "configuration": {"suffix": ".tiff", "base_encoding": {"name": "default"}}},
         KeyTemplate("", "c/", "/", ".tiff", "c.tiff")),
        ({"name": "suffix", "configuration": {"suffix": ".zip", "base-encoding": {"name": "v2"}}},
         KeyTemplate("", "", ".", ".zip", "0.zip")),
        ({"name": "prefix", "configuration": {"prefix": "x/", "base_encoding": "v2"}},
         KeyTemplate("", "x/", ".", "", "x/0")),
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
    group = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": None, "x": {"must_understand": False}}
    assert parse_document("zarr.json", group) == GroupMetadata("v3", {})


def test_null_attributes_of_v3_are_empty() -> None:
    assert array("zarr.json", attributes=None) == array("zarr.json", attributes={})
    group = {"zarr_format": 3, "node_type": "group", "attributes": None}
    assert parse_document("zarr.json", group) == GroupMetadata("v3", {})


def test_equal_documents_make_equal_arrays() -> None:
    assert array(".zarray") == array(".zarray")  # callers need not process an equal array twice
    assert array(".zarray") != array(".zarray", shape=[7, 6])
    assert hash(array(".zarray").grid) == hash(array(".zarray").grid)


@pytest.mark.parametrize(("name", "litter"), [
    ("__zattr__.lock", True), ("0.8f0c.partial", True), ("zarr.json.abc.partial", True), ("0.0", False),
    ("lock", False),
])  # fmt: skip
def test_leftover_files_are_recognised_by_their_names(name: str, litter: bool) -> None:
    assert is_litter(name) == litter


# -- malformed documents

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


def test_sixty_four_dimensions_are_accepted() -> None:
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
        ("zarr.json", {"chunk_key_encoding": {"name": "suffix", "configuration": {"suffix": "7"}}}, "suffix begins"),
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
        codec = {"name": "sharding_indexed", "configuration": {"codecs": [codec]}}
    with pytest.raises(MetadataError, match="shards within shards"):
        array("zarr.json", codecs=[codec])
    encoding: Any = "default"
    for _ in range(50):
        encoding = {"name": "suffix", "configuration": {"suffix": ".x", "base_encoding": encoding}}
    with pytest.raises(MetadataError, match="within each other"):
        array("zarr.json", chunk_key_encoding=encoding)


def test_malformed_attributes_are_refused() -> None:
    cases = ((b"[]", r"\.zattrs is not a JSON object"), (b"{", "not JSON"), (nested_json(100_000), "too deep"))
    for data, rule in cases:
        with pytest.raises(MetadataError, match=rule):
            parse_node(".zarray", json.dumps(V2).encode(), data)
