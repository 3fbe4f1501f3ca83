"""Fill values of every generation: as zarr-python writes them, and back to strict JSON."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import zarr
import zarr.storage
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from zarr.core.buffer import default_buffer_prototype

from tests.zarr.test_dtypes import SCALARS, described
from zarrfs.zarr import dtypes
from zarrfs.zarr.documents import parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.fillvalues import as_v2, as_v3, from_v2, from_v3
from zarrfs.zarr.grid import Grid
from zarrfs.zarr.jsontext import JSON
from zarrfs.zarr.keys import FLAT
from zarrfs.zarr.model import ArrayMetadata


def data_type(text: Any) -> dtypes.DataType:
    return {"T": dtypes.TEXT, "B": dtypes.BYTES}.get(str(text)) or dtypes.parse_v2(text)


def filled(fill: bytes | None, fill_object: JSON, dtype: dtypes.DataType) -> ArrayMetadata:
    """Return the metadata of an array of one item."""
    return ArrayMetadata("v2", (1,), Grid([1], [1]), dtype, fill, (), FLAT, {}, fill_object=fill_object)


# -- v2 and v3, compared with zarr-python


def documents_of(dtype: np.dtype[Any], fill: Any, version: int) -> bytes:
    """Return the metadata document that zarr-python writes."""
    store = zarr.storage.MemoryStore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.create_array(store, shape=(1,), chunks=(1,), dtype=dtype, fill_value=fill, zarr_format=version)
    return store._store_dict["zarr.json" if version == 3 else ".zarray"].to_bytes()


def values_of(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    if dtype.kind == "V":
        return st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize).map(np.void)
    return npst.from_dtype(dtype)


@settings(max_examples=50)
@given(SCALARS.flatmap(lambda dtype: st.tuples(st.just(dtype), values_of(dtype))), st.sampled_from([2, 3]))
def test_values_written_by_zarr_python_are_read_and_written_again(
    case: tuple[np.dtype[Any], Any], version: int
) -> None:
    """Parsed bytes equal numpy's, and so do those that zarrfs writes again, except for the bits of a NaN."""
    dtype, fill = case
    document = documents_of(dtype, fill, version)
    found = parse_node("zarr.json" if version == 3 else ".zarray", document)
    assert isinstance(found, ArrayMetadata)
    stored = dtype.newbyteorder("<") if version == 3 else dtype
    assert found.dtype.numpy == (stored if dtype.itemsize > 1 else dtype)
    wanted = np.array([fill], dtype=dtype).astype(found.dtype.numpy)
    assert found.fill is not None
    got = np.frombuffer(found.fill, found.dtype.numpy)
    has_nan = dtype.kind in "fc" and bool(np.isnan(wanted).any())
    if has_nan:
        assert (np.isnan(got.real) == np.isnan(wanted.real)).all()
    else:
        assert found.fill == wanted.tobytes()
    again = json.loads(json.dumps(as_v3(found) if version == 3 else as_v2(found), allow_nan=False))
    read = from_v3 if version == 3 else from_v2
    assert read(again, found.dtype) == (found.fill, None) or has_nan
    assert read(json.loads(document)["fill_value"], found.dtype) == (found.fill, None)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), SCALARS), min_size=1, unique_by=lambda f: f[0]).map(np.dtype),
    st.data(),
)
def test_structs_written_by_zarr_python_are_read_and_written_again(dtype: np.dtype[Any], data: st.DataObject) -> None:
    fill = np.frombuffer(data.draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)), dtype)[0]
    document = json.loads(documents_of(dtype, fill, 2))
    found = from_v2(document["fill_value"], dtypes.parse_v2(described(dtype)))[0]
    assert found == fill.tobytes()
    assert as_v2(filled(found, None, data_type(described(dtype)))) == document["fill_value"]


@settings(max_examples=50)
@given(st.sampled_from([2, 4, 8]), st.sampled_from("<>"), st.data())
def test_every_float_survives_v3(size: int, order: str, data: st.DataObject) -> None:
    """NaNs with a sign or a payload survive as well: they are written as hexadecimal bits."""
    number = data.draw(st.integers(0, 256**size - 1))
    if data.draw(st.booleans()):  # a NaN or an infinity
        number |= {2: 0x7C00, 4: 0x7F80 << 16, 8: 0x7FF0 << 48}[size]
    bits = number.to_bytes(size, "big" if order == ">" else "little")
    dtype = data_type(f"{order}f{size}")
    told = json.loads(json.dumps(as_v3(filled(bits, None, dtype)), allow_nan=False))
    assert from_v3(told, dtype) == (bits, None)


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("0x7fc00000", "<f4", "0000c07f"), ("0x7fc00001", ">f4", "7fc00001"), ("NaN", ">f4", "7fc00000"),
        ("-Infinity", "<f2", "00fc"),
        (1, "<f2", "003c"), (3.0, "<i2", "0300"), ([1, "NaN"], "<c8", "0000803f0000c07f"),
        (["0x3f800000", "-Infinity"], ">c8", "3f800000ff800000"), ([1, 255], "|V2", "01ff"), ("Af8=", "|V2", "01ff"),
        ("YQ==", "|S3", "610000"), ([97], "|S3", "610000"), ("a", ">U2", "0000006100000000"), (True, "|b1", "01"),
        ("NaT", ">M8[s]", "8000000000000000"), (-5, "<m8[s]", "fbffffffffffffff"),
        ({"b": 2, "a": "NaN"}, [["a", ">f4"], ["b", ">i2"]], "7fc000000002"),
        ("AQI=", [["a", "|i1"], ["b", "|i1"]], "0102"),
        ({"p": {"x": 1}}, [["p", [["x", "|i1"]]]], "01"),
    ],
)  # fmt: skip
def test_every_form_of_a_v3_value_is_read(value: Any, text: Any, expected: str) -> None:
    fill, fill_object = from_v3(value, data_type(text))
    assert fill is not None
    assert (fill.hex(), fill_object) == (expected, None)


def test_variable_length_values_are_read_and_written() -> None:
    text, data = data_type("T"), data_type("B")
    assert from_v3("né", text) == from_v2("né", text) == (None, "né")
    assert from_v3("Af8=", data) == from_v3([1, 255], data) == from_v2("Af8=", data) == (None, b"\1\xff")
    assert from_v2(0, text) == (None, "0")  # as zarr-python 2 wrote and zarr-python 3 reads it
    assert from_v2(0, data) == (None, b"")
    with pytest.raises(MetadataError, match="fill_value"):
        from_v3(0, data)
    assert from_v2({"a": 1}, data_type("|O")) == (None, {"a": 1})
    assert (as_v3(filled(None, "né", text)), as_v3(filled(None, None, text))) == ("né", "")
    assert (as_v3(filled(None, b"\1\xff", data)), as_v2(filled(None, b"\1\xff", data))) == ("Af8=", "Af8=")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("name", "fill"), [("f", "-9999.0"), ("f", "nan"), ("f", "1e300"), ("T", 0), ("T", 1.5), ("T", True)]
)
def test_numbers_as_text_and_text_as_numbers_are_read_as_by_zarr_python(name: str, fill: Any, version: int) -> None:
    """zarr-python 2 wrote numbers as the fill values of variable-length text."""
    dtype = np.dtypes.StringDType() if name == "T" else np.dtype("<f4")
    document = documents_of(dtype, "" if name == "T" else 0, version)
    changed = json.dumps({**json.loads(document), "fill_value": fill}).encode()
    store = zarr.storage.MemoryStore()
    key = "zarr.json" if version == 3 else ".zarray"
    store._store_dict[key] = default_buffer_prototype().buffer.from_bytes(changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = zarr.open_array(store, mode="r").fill_value
    found = parse_node(key, changed)
    assert isinstance(found, ArrayMetadata)
    assert (found.fill, found.fill_object) == ((None, expected) if name == "T" else (expected.tobytes(), None))


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("", "|S2", "0000"), ("YWJj", "|S2", "6162"), ("x-", "|S4", "782d0000"), (0, "|S2", "3000"),
        (0, "<U1", "30000000"),
        ("abc", "<U1", "61000000"), ("", "|V2", "0000"), (0, "|V2", "0000"), (1, "|b1", "01"), (0.0, "|b1", "00"),
        ("-12", "<i2", "f4ff"), (5, "<c8", "0000a04000000000"), (math.nan, "<f4", "0000c07f"),
        ("1970-01-03", "<M8[D]", "02" + 14 * "0"), (0, [["a", ">i2"], ["b", "|S2"]], "00000000"),
    ],
)  # fmt: skip
def test_v2_values_of_old_writers_are_read(value: Any, text: Any, expected: str) -> None:
    assert from_v2(value, data_type(text)) == (bytes.fromhex(expected), None)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="float128 has no padding on this machine")
def test_the_padding_of_a_long_double_is_zero() -> None:
    """It was memory of the process, which readers of missing chunks got."""
    for value in (0.5, "NaN", 7):
        for order in "<>":
            fill, _none = from_v2(value, data_type(f"{order}f16"))
            assert fill is not None
            assert (fill[10:] if order == "<" else fill[:6]) == bytes(6)
            assert np.array_equal(np.frombuffer(fill, f"{order}f16")[0], np.longdouble(value), equal_nan=True)


@pytest.mark.parametrize("read", [from_v2, from_v3])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1.5", "<i4"), ("0x1", "<i4"), (True, "<i4"), (10**400, "<f8"),
        pytest.param(10**5000, "<i4", id="many digits"),
        (True, "<f8"), ([1], "<f8"), ("0x7fc0", "<f4"), ("0x+fc00000", "<f4"), ("0x7fc0 000", "<f4"), ("x", "|b1"),
        (2, "|b1"),
        ([1, 2, 3], "<c8"), ([1, "x"], "<c8"), ([], "<c8"), ("x", "<c8"), (1 << 63, "<M8[s]"), ("never", "<M8[s]"),
        (1.5, "|V2"),
        ("AAAA", "|V2"), ("A", "|V2"), ("é", "|V2"), ({}, "|V2"), ([], "<U2"), ({"a": 1}, "<U2"),
        ({"b": 1}, [["a", "|i1"]]),
        (["a"], "|S2"), ({}, "|S3"), ({}, "T"), ([256], "B"), ("é", "B"), ([], "T"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(read: Any, value: Any, text: Any) -> None:
    with pytest.raises(MetadataError, match="fill_value"):
        read(value, data_type(text))
