"""Data types: numpy's typestrs and lists of fields, and the names of Zarr v3, compared with numpy and zarr-python."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import zarr.dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from zarrfs.zarr.dtypes import as_v3, parse_v2, parse_v3
from zarrfs.zarr.errors import MetadataError

SCALARS = st.one_of(
    npst.boolean_dtypes(), npst.integer_dtypes(endianness="?"), npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    npst.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    npst.byte_string_dtypes(endianness="?", min_len=1), npst.unicode_string_dtypes(endianness="?", min_len=1),
    npst.datetime64_dtypes(endianness="?"), npst.timedelta64_dtypes(endianness="?"),
    st.builds(lambda number, kind: np.dtype(f"{kind}8[{number}s]"), st.integers(1, 99), st.sampled_from(["<M", ">m"])),
    st.builds(lambda size: np.dtype(f"V{size}"), st.integers(1, 40)),
)  # fmt: skip
NAMES = st.text("abcdefé_ 0", min_size=1, max_size=5)
STRUCTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(st.tuples(NAMES, inner), min_size=1, max_size=4, unique_by=lambda f: f[0]).map(np.dtype),
    max_leaves=8,
)


def described(dtype: np.dtype[Any]) -> Any:
    """Return the dtype as zarr-python 2 writes it to JSON."""
    if dtype.fields is None:
        return dtype.str
    return [[name, described(dtype.fields[name][0])] for name in dtype.names or ()]


@settings(max_examples=50)
@given(STRUCTS)
def test_v2_dtypes_agree_with_numpy(dtype: np.dtype[Any]) -> None:
    found = parse_v2(json.loads(json.dumps(described(dtype))))
    assert found.numpy == dtype
    assert (found.itemsize, found.kind) == (dtype.itemsize, dtype.kind)
    assert found.text == described(dtype)
    assert parse_v2(found.text) == found
    orders = {leaf.byteorder for leaf in leaves(dtype)} - {"|"}
    if len(orders) < 2:
        assert found.endian == {"=": "little", "<": "little", ">": "big"}.get("".join(orders))


def leaves(dtype: np.dtype[Any]) -> list[np.dtype[Any]]:
    if dtype.fields is None:
        return [dtype]
    return [leaf for field in dtype.fields.values() for leaf in leaves(field[0])]


@settings(max_examples=50)
@given(STRUCTS)
def test_v3_data_types_agree_with_zarr_python(dtype: np.dtype[Any]) -> None:
    """zarrfs and zarr-python read each other's data types as the same type, in either byte order."""
    found = parse_v2(json.loads(json.dumps(described(dtype))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if len({leaf.byteorder for leaf in leaves(dtype)} - {"|"}) > 1:  # of several byte orders
            return
        document = zarr.dtype.parse_dtype(dtype, zarr_format=3).to_json(zarr_format=3)
        assert as_v3(found) == json.loads(json.dumps(document))
        again = zarr.dtype.data_type_registry.match_json(as_v3(found), zarr_format=3)
    assert parse_v3(json.loads(json.dumps(document)), found.endian or "little") == found
    assert again.to_native_dtype() == found.numpy.newbyteorder("<")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("i4", "<i4"), ("=i4", "<i4"), ("|i4", "<i4"), ("<i1", "|i1"), (">u1", "|u1"), ("<b1", "|b1"),
        ("float64", "<f8"),
        ("bool", "|b1"), ("|O8", "|O"), ("O", "|O"), ("<M8[1s]", "<M8[s]"), ("<M8", "<M8"), ("<m8[generic]", "<m8"),
        (">M8[25μs]", ">M8[25us]"), ("<S3", "|S3"), (">V7", "|V7"), ("U2", "<U2"), ("<f16", "<f16"),
    ],
)  # fmt: skip
def test_spellings_of_a_dtype_become_canonical(value: str, text: str) -> None:
    assert parse_v2(value).text == text
    assert parse_v2(value).numpy == np.dtype(text)


def test_padding_and_arrays_in_structs_are_fields() -> None:
    """A field of padding has the name that numpy gives it."""
    found = parse_v2([["a", "|i1"], ["", "|V7"], ["b", ">f8", [2, 3]], ["c", [["d", ">i2"]]]])
    fields = [["a", "|i1"], ["f1", "|V7"], ["b", ">f8", [2, 3]], ["c", [["d", ">i2"]]]]
    assert (found.itemsize, found.endian, found.text) == (58, "big", fields)
    assert found.numpy == np.dtype([("a", "i1"), ("f1", "V7"), ("b", ">f8", (2, 3)), ("c", [("d", ">i2")])])
    padded = as_v3(parse_v2([["a", "|i1"], ["", "|V7"]]))
    raw = {"name": "raw_bytes", "configuration": {"length_bytes": 7}}
    assert padded == {"name": "structured", "configuration": {"fields": [["a", "int8"], ["f1", raw]]}}
    with pytest.raises(MetadataError, match=r"fields that are arrays \(b\)"):
        as_v3(parse_v2([["a", "|i1"], ["b", ">f8", 3]]))


DEEP: Any = "<i4"
for _ in range(100):
    DEEP = [["a", DEEP]]


@pytest.mark.parametrize(
    "value",
    [
        "", "i3", "x4", "<i", "|S0", "<i4[s]", "<M8[q]", "<M8[0s]", "<M8[s/3]", "<M4[s]", "<c4", "|S3000000000",
        "<U" + "9" * 5000, "|S-1", "i4,f8", "(2,3)i4", "<i4\n", "٣", 4, None, {}, [], [[]], [["a"]],
        [["a", "<i4", [2], 3]], [[1, "<i4"]], [[["t", "a"], "<i4"]], [["a", "<i4"], ["a", "<f8"]], ["<i4"],
        [["a", "|O"]], [["a", "<i4", [-1]]], [["a", "<i4", [1 << 40]]], [["a", "<i4", [1] * 40]],
        [["a", "|S9000000"], ["b", "|S9000000"]], "|S16777217", DEEP,
    ],
)  # fmt: skip
def test_invalid_v2_dtypes_are_refused(value: Any) -> None:
    with pytest.raises(MetadataError, match="dtype"):
        parse_v2(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("r8", "|V1"), ("r24", "|V3"), ({"name": "r16"}, "|V2"), ({"name": "int16", "configuration": {}}, ">i2"),
        ({"name": "raw_bytes", "configuration": {"length_bytes": 5}}, "|V5"),
        ({"name": "fixed_length_utf32", "configuration": {"length_bytes": 20}}, ">U5"),
        ({"name": "null_terminated_bytes", "configuration": {"length_bytes": 6}}, "|S6"),
        ({"name": "numpy.datetime64", "configuration": {"unit": "s", "scale_factor": 25}}, ">M8[25s]"),
        ({"name": "numpy.timedelta64", "configuration": {"unit": "generic", "scale_factor": 1}}, ">m8"),
        ({"name": "numpy.datetime64", "configuration": {"unit": "μs", "scale_factor": 1}}, ">M8[us]"),
    ],
)  # fmt: skip
def test_v3_names_are_parsed(value: Any, text: str) -> None:
    assert parse_v3(value, "big") == parse_v2(text)


def test_struct_and_structured_are_the_same() -> None:
    """The specification says struct, zarr-python 3.1 writes structured."""
    point = {"name": "struct", "configuration": {"fields": [{"name": "x", "data_type": "float32"}]}}
    fields = [{"name": "p", "data_type": point}, {"name": "n", "data_type": "uint8"}]
    old = [["p", {"name": "structured", "configuration": {"fields": [["x", "float32"]]}}], ["n", "uint8"]]
    found = parse_v3({"name": "struct", "configuration": {"fields": fields}}, "big")
    assert found == parse_v2([["p", [["x", ">f4"]]], ["n", "|u1"]])
    assert found == parse_v3({"name": "structured", "configuration": {"fields": old}}, "big")
    assert as_v3(found) == {"name": "structured", "configuration": {"fields": old}}


NESTED: Any = "int8"
for _ in range(100):
    NESTED = {"name": "struct", "configuration": {"fields": [{"name": "a", "data_type": NESTED}]}}


def configured(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


@pytest.mark.parametrize(
    "value",
    [
        "int3", "r7", "r0", "r" + "9" * 500, "bfloat17", None, {}, {"name": 4}, "struct", "raw_bytes", ["int8"],
        {"name": "struct", "configuration": []}, configured("struct", fields=[]),
        configured("struct", fields=[["", "int8"]]), configured("struct", fields=[["a", "string"]]),
        configured("struct", fields=[["a", "int8"], ["a", "int8"]]), configured("struct", fields=[{"name": "a"}]),
        configured("fixed_length_utf32", length_bytes=5), configured("raw_bytes", length_bytes=0),
        configured("raw_bytes", length_bytes=1 << 40), configured("numpy.datetime64", unit="q", scale_factor=1),
        configured("numpy.datetime64", unit="s", scale_factor=0), configured("numpy.datetime64", unit=["s"]),
        configured("numpy.datetime64", unit="s]i4[", scale_factor=1), NESTED,
        configured("numpy.datetime64", unit="5s", scale_factor=1), configured("numpy.datetime64", unit=""),
    ],
)  # fmt: skip
def test_invalid_v3_data_types_are_refused(value: Any) -> None:
    with pytest.raises(MetadataError, match=r"dtype|data_type"):
        parse_v3(value)


def test_lookups_on_servers_do_not_import_numpy() -> None:
    """A mount without views starts faster and takes less memory."""
    code = (
        "import sys, zarrfs.store.unlisted; from zarrfs.zarr.layout import layout_of;"
        "layout_of('.zarray', {'zarr_format': 2, 'shape': [4], 'chunks': [2]}); print('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
