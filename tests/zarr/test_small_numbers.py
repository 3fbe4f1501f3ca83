"""The bits of number types that numpy lacks, compared with ml_dtypes, which tensorstore uses."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarrfs.zarr.small_numbers import SIZES, bits_of

NAMES = sorted(SIZES)
FLOATS_OF_8_BITS = [name for name in NAMES if name.startswith("float8")]


def written(name: str, value: float) -> int:
    """Return the bits with which ml_dtypes stores a number."""
    return int.from_bytes(np.array([value]).astype(getattr(ml_dtypes, name)).tobytes(), "little")


@pytest.mark.parametrize("name", FLOATS_OF_8_BITS)
def test_every_float_of_8_bits_has_the_bits_of_ml_dtypes(name: str) -> None:
    for bits in range(256):
        value = float(np.array([bits], "u1").view(getattr(ml_dtypes, name))[0])
        if math.isnan(value):
            assert bits_of(name, value) == bits_of(name, "NaN") == written(name, math.nan)
        else:
            text = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, value)
            assert bits_of(name, value) == bits_of(name, text) == bits, (bits, value)
        assert bits_of(name, f"0x{bits:02x}") == bits


@given(st.floats(allow_nan=False))
def test_bfloat16_is_rounded_as_by_ml_dtypes(value: float) -> None:
    assert bits_of("bfloat16", value) == written("bfloat16", np.float32(value))


@pytest.mark.parametrize("name", ["int2", "int4"])
def test_small_integers_have_the_bits_of_ml_dtypes(name: str) -> None:
    half = 2 ** (int(name[3:]) - 1)
    for value in range(-half, half):
        assert bits_of(name, value) == written(name, value)
    assert bits_of(name, half) is bits_of(name, -half - 1) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("float8_e5m2", 1.1), ("float8_e4m3fn", "Infinity"), ("float8_e4m3fn", 1e9), ("bfloat16", "x"),
        ("bfloat16", "0x7fc"), ("bfloat16", "0x7fcg"), ("bfloat16", True), ("bfloat16", None), ("bfloat16", [1]),
        ("int4", 1.0), ("int4", "0x1"), ("int4", True), ("float8_e4m3fn", 480.0), ("float8_e4m3fn", -480.0),
    ],
)  # fmt: skip
def test_other_values_are_refused(name: str, value: object) -> None:
    assert bits_of(name, value) is None


def test_whole_numbers_beyond_all_floats_are_refused() -> None:
    for name in ("bfloat16", "float8_e5m2", "int4"):
        assert bits_of(name, 10**400) is bits_of(name, -(10**400)) is None


def test_special_values_of_bfloat16() -> None:
    found = {value: bits_of("bfloat16", value) for value in ("NaN", "Infinity", "-Infinity", "0x8000", 1e300, 0)}
    assert found == {
        "NaN": 0x7FC0, "Infinity": 0x7F80, "-Infinity": 0xFF80, "0x8000": 0x8000, 1e300: 0x7F80, 0: 0
    }  # fmt: skip
