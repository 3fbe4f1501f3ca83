"""Parsing and serialising JSON: lenient when reading old documents, strict when writing new ones."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

from zarrfs.system.buffers import Buffer
from zarrfs.zarr.errors import MetadataError

JSON = Any  # a value as json.loads() returns it


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise MetadataError("a JSON object with two members of the same name")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def load_json(data: Buffer) -> JSON:
    """Parse a JSON document, which may contain bare NaN, Infinity and -Infinity, as old writers left them.

    Raise MetadataError for invalid JSON or UTF-8, repeated member names, and documents that are nested too deeply.
    """
    try:
        return _DECODER.decode(str(data, "utf-8-sig" if data[:1] == b"\xef" else "utf-8"))
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, or an integer with too many digits
        raise MetadataError(f"not JSON: {error}") from None
    except RecursionError:
        raise MetadataError("JSON too deep") from None


def named(value: JSON, member: str) -> tuple[str, dict[str, JSON]]:
    """Return name and configuration of an extension, which may be a name alone. Raise MetadataError."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict):
        name, configuration = value.get("name"), value.get("configuration", {})
        if isinstance(name, str) and isinstance(configuration, dict):
            return name, configuration
    raise MetadataError(f"{member}: expected a name, or an object with name and configuration")


def strict_json(value: JSON) -> bytes:
    """Serialise `value` as strict JSON, which readers in every language accept, indented as zarr-python does.

    Attributes may hold NaN and infinities: they become the strings "NaN", "Infinity" and "-Infinity", as in fill
    values of Zarr v3. Raise MetadataError for values that are nested too deeply.
    """
    try:
        return _strict(value)
    except RecursionError:
        raise MetadataError("JSON too deep") from None


def _strict(value: JSON) -> bytes:
    try:
        data = orjson.dumps(value, option=orjson.OPT_INDENT_2)
        if b"null" in data:  # orjson serialises NaN as null, too
            json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # an integer of more than 64 bits, a lone surrogate, or a NaN
        return json.dumps(_nonfinite_as_text(value), indent=2, allow_nan=False).encode()
    return data


def _nonfinite_as_text(value: JSON) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _nonfinite_as_text(item) for name, item in value.items()}
    return [_nonfinite_as_text(item) for item in value] if isinstance(value, list) else value
