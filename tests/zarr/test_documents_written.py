"""Writing nodes of any generation as documents of Zarr v2 and v3, and features that these lack."""

from __future__ import annotations

import base64
import json
import math
import struct
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.metadata import ArrayV2Metadata

from tests.views.viewstores import v0, v1, v2, v3
from zarrfs.zarr import v2 as zarr_v2
from zarrfs.zarr import v3 as zarr_v3
from zarrfs.zarr.documents import parse_node
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import strict_json
from zarrfs.zarr.model import ArrayMetadata

OBJECTS = {"dtype": "|O", "fill_value": None}
DELTA = {"id": "delta", "dtype": "<i4"}


def parsed(name: str, data: bytes, attributes: bytes | None = None) -> ArrayMetadata:
    found = parse_node(name, data, attributes)
    assert isinstance(found, ArrayMetadata)
    return found


def as_v3(data: bytes, name: str = ".zarray", attributes: bytes | None = None) -> Any:
    return json.loads(strict_json(zarr_v3.array_json(parsed(name, data, attributes))), parse_constant=pytest.fail)


def as_v2(data: bytes, name: str = "zarr.json") -> Any:
    return json.loads(strict_json(zarr_v2.array_json(parsed(name, data))), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "about",
    [
        {"dtype": [["a", "<i4"], ["b", ">f8"]]},
        {"dtype": [["a", ">i4"], ["b", ">f8"]]},  # zarr-python would read it as little-endian
        {"dtype": [["a", "<i4", [2]]]},
        OBJECTS | {"filters": [{"id": "json2"}]},
        OBJECTS | {"filters": [{"id": "pickle"}]},
        OBJECTS | {"filters": [{"id": "vlen-array", "dtype": "<i4"}]},
        {"filters": [{"id": "zlib", "level": 1}, DELTA]},
        OBJECTS | {"filters": [{"id": "zlib", "level": 1}, {"id": "vlen-utf8"}]},
        {"filters": [{"id": "categorize", "dtype": "<i4", "labels": []}]},
        {"compressor": {"id": "somebody's"}},
    ],
)
def test_features_missing_in_v3_are_refused(about: dict[str, Any]) -> None:
    array = parsed(".zarray", v2(**{"fill_value": None} | about))
    with pytest.raises(MetadataError) as raised:
        zarr_v3.array_json(array)
    assert str(raised.value)


@pytest.mark.parametrize(
    "about",
    [
        {"codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}}, {"name": "somebody's"}]},
        {"codecs": [
            {"name": "sharding_indexed", "configuration": {
                "chunk_shape": [5, 5], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            }},
        ]},
        {
            "shape": [4, 4, 4], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2, 2]}},
            "codecs": [{"name": "transpose", "configuration": {"order": [1, 2, 0]}}, "bytes"], "data_type": "int8",
        },
    ],
)  # fmt: skip
def test_features_missing_in_v2_are_refused(about: dict[str, Any]) -> None:
    array = parsed("zarr.json", v3(**about))
    with pytest.raises(MetadataError):
        zarr_v2.array_json(array)


def test_an_undefined_fill_value_becomes_zero_in_v3() -> None:
    assert as_v3(v1(), "meta")["fill_value"] == 0
    assert as_v3(v2(dtype="<f8", fill_value=None))["fill_value"] == 0.0
    assert as_v3(v2(fill_value=None, dtype="|b1"))["fill_value"] is False
    assert as_v3(v0(dtype="<f4", fill_value=math.nan), "__zmeta__")["fill_value"] == "NaN"


def test_conventions_of_xarray_are_converted() -> None:
    attributes = b'{"_ARRAY_DIMENSIONS": ["y", "x"], "units": "m"}'
    found = as_v3(v2(dtype="<f8", fill_value=-9.5), attributes=attributes)
    assert found["dimension_names"] == ["y", "x"]
    assert found["attributes"] == {"units": "m", "_FillValue": base64.b64encode(struct.pack("<d", -9.5)).decode()}
    assert as_v3(v2(fill_value=7), attributes=attributes)["attributes"] == {"units": "m", "_FillValue": 7}
    plain = b'{"_ARRAY_DIMENSIONS": "y", "_FillValue": 5}'  # not in the form of xarray
    assert as_v3(v2(), attributes=plain)["attributes"] == json.loads(plain)
    array = parsed("zarr.json", v3(dimension_names=["y", "x"], attributes={"units": "m"}))
    assert zarr_v2.attributes_json(array) == {"units": "m", "_ARRAY_DIMENSIONS": ["y", "x"]}
    assert zarr_v2.attributes_json(parsed("zarr.json", v3())) == {}
    grid = {"name": "regular", "configuration": {"chunk_shape": []}}  # xarray requires the attribute on scalars, too
    scalar = parsed("zarr.json", v3(shape=[], chunk_grid=grid))
    assert zarr_v2.attributes_json(scalar) == {"_ARRAY_DIMENSIONS": []}


def test_fill_attributes_of_xarray_are_numbers_in_v2() -> None:
    half, none = (base64.b64encode(struct.pack("<d", value)).decode() for value in (-9.5, math.nan))
    for data_type, fill, attribute, expected in [
        ("float32", 0.0, half, -9.5), ("float64", 0.0, none, "NaN"), ("float64", 0.0, "NaN", "NaN"),
        ("float32", 0.0, "of another form", "of another form"), ("int16", 0, -9999, -9999),
        ("complex128", [0.0, 0.0], [half, half], [-9.5, -9.5]), ("complex64", [0.0, 0.0], half, half),
    ]:  # fmt: skip
        about = v3(
            data_type=data_type, fill_value=fill, dimension_names=["y", None], attributes={"_FillValue": attribute}
        )
        found = strict_json(zarr_v2.attributes_json(parsed("zarr.json", about)))
        assert json.loads(found) == {"_FillValue": expected}
    nameless = parsed("zarr.json", v3(data_type="float32", fill_value=0.0, attributes={"_FillValue": half}))
    assert zarr_v2.attributes_json(nameless) == {"_FillValue": half}


def test_attributes_are_strict_json() -> None:
    attributes = b'{"a": NaN, "b": [Infinity, {"c": -Infinity}], "d": null, "e": 1.5}'
    found = as_v3(v2(dtype="<f4", fill_value="NaN"), attributes=attributes)
    assert found["attributes"] == {"a": "NaN", "b": ["Infinity", {"c": "-Infinity"}], "d": None, "e": 1.5}


# -- fill values of v3, as zarr-python reads them in v2


def _hex(size: int) -> st.SearchStrategy[Any]:
    return st.binary(min_size=size, max_size=size).map(lambda data: "0x" + data.hex())


def _real(size: int) -> st.SearchStrategy[Any]:
    """Draw any float, including NaNs with sign and payload."""
    first = {2: "7c", 4: "7f8", 8: "7ff"}[size]
    nans = st.tuples(st.sampled_from([first, f"{int(first[0]) | 8:x}{first[1:]}"]), st.binary(min_size=8, max_size=8))
    named = st.sampled_from(["NaN", "Infinity", "-Infinity", 0.0, -0.0])
    return named | _hex(size) | nans.map(lambda pair: "0x" + (pair[0] + pair[1].hex())[: 2 * size])


def _base64(most: int) -> st.SearchStrategy[Any]:
    return st.binary(max_size=most).map(lambda data: base64.b64encode(data).decode())


def _named(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


_TIMES = [
    _named(f"numpy.{kind}64", unit=unit, scale_factor=factor)
    for kind in ("datetime", "timedelta")
    for unit, factor in (("ns", 1), ("s", 10), ("D", 1), ("generic", 1))
]
_TIME = st.just("NaT") | st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(codec=None), max_size=3)  # lone surrogates, too
_FILLS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "bool": ("bool", st.booleans()),
    **{f"int{bits}": (f"int{bits}", st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (f"uint{bits}", st.integers(0, 2**bits - 1)) for bits in (8, 16, 32, 64)},
    **{f"float{8 * size}": (f"float{8 * size}", _real(size)) for size in (2, 4, 8)},
    "complex64": ("complex64", st.lists(_real(4), min_size=2, max_size=2)),
    "complex128": ("complex128", st.lists(_real(8), min_size=2, max_size=2)),
    **{f"{time['name']} {time['configuration']}": (time, _TIME) for time in _TIMES},
    "utf32": (_named("fixed_length_utf32", length_bytes=12), _TEXT),
    "S": (_named("null_terminated_bytes", length_bytes=3), _base64(3)),
    "V": (_named("raw_bytes", length_bytes=3), _base64(3)),
    "r": ("r24", st.lists(st.integers(0, 255), min_size=3, max_size=3)),
    "struct": (
        _named("struct", fields=[{"name": "a", "data_type": "int32"}, {"name": "b", "data_type": "float64"}]),
        st.fixed_dictionaries({"a": st.integers(-5, 5), "b": _real(8)}),
    ),
    "string": ("string", _TEXT),
    "bytes": ("variable_length_bytes", _base64(5)),
}  # fmt: skip


@settings(max_examples=100)
@given(st.sampled_from(sorted(_FILLS)), st.data())
def test_v3_fill_values_survive_v2_or_are_refused(name: str, data: st.DataObject) -> None:
    """zarr-python reads a bit-identical fill value from the written document."""
    data_type, fills = _FILLS[name]
    fill, endian = data.draw(fills), data.draw(st.sampled_from(["little", "big"]))
    codec = {"string": "vlen-utf8", "bytes": "vlen-bytes"}.get(name, _named("bytes", endian=endian))
    array = parsed("zarr.json", v3(data_type=data_type, fill_value=fill, codecs=[codec]))
    try:
        document = strict_json(zarr_v2.array_json(array))
    except MetadataError as exc:
        rule = "a NaN with a sign" if name.startswith(("float", "complex")) else "a date without a unit"
        assert rule in str(exc)  # noqa: PT017
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = ArrayV2Metadata.from_dict(json.loads(document)).fill_value
    if array.fill is None:
        assert theirs == array.fill_object
    else:
        item = np.array(theirs, array.dtype.numpy)
        if item.dtype != array.dtype.numpy:  # numpy forgets the byte order of times without a unit
            item = item.byteswap()
        assert item.tobytes() == array.fill


def test_a_nan_with_payload_is_refused_in_v2() -> None:
    odd = ("float16", "0xfe00"), ("float64", "0x7ff8000000000001"), ("complex64", [1.0, "0xffc00000"])
    for data_type, fill in odd:
        with pytest.raises(MetadataError, match="a NaN with a sign or bits of its own"):
            as_v2(v3(data_type=data_type, fill_value=fill))
    for fill in ("NaN", "0x7fc00000"):
        assert as_v2(v3(data_type="float32", fill_value=fill))["fill_value"] == "NaN"
