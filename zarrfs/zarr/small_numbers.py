"""Data types of registered extensions that numpy does not have: bfloat16, floats of 8 bits, integers of 4 and 2 bits.

Items of these types are handled as bits. Source: zarr-extensions (bfloat16, float8_*, int2, int4); stores written by
tensorstore, which puts integers of fewer than 8 bits in the low bits of a byte.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple


class _Float(NamedTuple):
    """The bits of a float: a sign, the exponent, the mantissa."""

    exponent: int  # bits
    mantissa: int  # bits
    bias: int
    missing: int  # the bits of NaN
    infinite: bool = False  # has infinities


_FLOATS = {
    "bfloat16": _Float(8, 7, 127, 0x7FC0, True), "float8_e3m4": _Float(3, 4, 3, 0x78, True),
    "float8_e4m3fn": _Float(4, 3, 7, 0x7F), "float8_e4m3fnuz": _Float(4, 3, 8, 0x80),
    "float8_e4m3b11fnuz": _Float(4, 3, 11, 0x80), "float8_e5m2": _Float(5, 2, 15, 0x7E, True),
    "float8_e5m2fnuz": _Float(5, 2, 16, 0x80),
}  # fmt: skip
_INTEGERS = {"int2": 2, "int4": 4}  # bits, in two's complement
SIZES = {**dict.fromkeys([*_FLOATS, *_INTEGERS], 1), "bfloat16": 2}  # bytes of an item


def bits_of(name: str, value: object) -> int | None:
    """Return the bits of the number `value` (or NaN, Infinity, -Infinity, bits in hexadecimal) as an item of `name`.

    Return None if the type has no such number.
    """
    if name in _INTEGERS:
        half = 1 << (_INTEGERS[name] - 1)
        return value & (2 * half - 1) if type(value) is int and -half <= value < half else None
    kind, width = _FLOATS[name], 2 * SIZES[name]
    if isinstance(value, str) and value.startswith("0x"):
        digits = value[2:]
        return int(digits, 16) if len(digits) == width and set(digits) <= set("0123456789abcdefABCDEF") else None
    if value == "NaN":
        return kind.missing
    number = {"Infinity": math.inf, "-Infinity": -math.inf}.get(value) if isinstance(value, str) else value
    if type(number) not in (int, float):
        return None
    try:
        return _float_bits(kind, float(number))  # type: ignore[arg-type]
    except OverflowError:  # an integer that is too large for a float
        return None


def _float_bits(kind: _Float, number: float) -> int | None:
    """Return the bits of the float that equals `number`, or None; for bfloat16, of the nearest float."""
    if math.isnan(number):
        return kind.missing
    if kind.mantissa == 7:
        try:
            bits = int.from_bytes(struct.pack(">f", number))
        except OverflowError:
            bits = int.from_bytes(struct.pack(">f", math.copysign(math.inf, number)))
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    sign = 1 << (kind.exponent + kind.mantissa) if math.copysign(1, number) < 0 else 0
    if math.isinf(number):
        return sign | (2**kind.exponent - 1) << kind.mantissa if kind.infinite else None
    if number == 0:
        return 0 if kind.missing == sign else sign  # a float with one zero has NaN in place of -0
    for bits in range(1, sign or 1 << (kind.exponent + kind.mantissa)):
        if bits != kind.missing and _magnitude(kind, bits) == abs(number):
            return sign | bits
    return None


def _magnitude(kind: _Float, bits: int) -> float:
    exponent, mantissa = bits >> kind.mantissa, bits & (2**kind.mantissa - 1)
    if kind.infinite and exponent == 2**kind.exponent - 1:
        return math.nan
    whole = mantissa if exponent == 0 else mantissa | 1 << kind.mantissa
    return math.ldexp(whole, max(exponent, 1) - kind.bias - kind.mantissa)
