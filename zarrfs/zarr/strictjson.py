"""Documents as strict JSON: readers that are not Python take no bare NaN."""

from __future__ import annotations

import json
import math

import orjson

from zarrfs.zarr.documents import dump_json
from zarrfs.zarr.errors import JSON, MetadataError


def strict_json(value: JSON) -> bytes:
    """`value` as indented JSON. In attributes NaN, Infinity and -Infinity become texts, as in fill values of v3.

    MetadataError where it is too deep.
    """
    try:
        return _strict(value)
    except RecursionError:
        raise MetadataError("JSON too deep") from None


def _strict(value: JSON) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_INDENT_2)
    except TypeError:  # an integer of more than 64 bits, or a lone surrogate
        return dump_json(_named(value))
    if b"null" in data:  # which is also what orjson makes of NaN
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return dump_json(_named(value))
    return data


def _named(value: JSON) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _named(item) for name, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list) else value
