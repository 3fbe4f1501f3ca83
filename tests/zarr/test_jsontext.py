"""Parsing and serialising JSON."""

from __future__ import annotations

import math

import pytest

from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.jsontext import load_json, strict_json


def test_load_json_accepts_byte_order_marks_and_infinity() -> None:
    assert load_json(b"\xef\xbb\xbf[Infinity]") == [math.inf]
    assert load_json(memoryview(b'{"a": "\xc3\xa9"}')) == {"a": "é"}


def test_load_json_refuses_repeated_members() -> None:
    with pytest.raises(MetadataError, match="two members of the same name"):
        load_json(b'{"x": {"a": 1, "a": 2}}')


def test_strict_json_is_indented_also_where_orjson_refuses_a_value() -> None:
    assert strict_json({"a": ["é", 1]}) == '{\n  "a": [\n    "é",\n    1\n  ]\n}'.encode()
    assert strict_json({"a": ["é", 10**30]}) == b'{\n  "a": [\n    "\\u00e9",\n    %d\n  ]\n}' % 10**30


def test_strict_json_writes_nan_as_text_beside_values_that_orjson_refuses() -> None:
    big = {"n": 10**30, "s": "\ud800", "x": math.nan}
    assert load_json(strict_json(big)) == {"n": 10**30, "s": "\ud800", "x": "NaN"}
