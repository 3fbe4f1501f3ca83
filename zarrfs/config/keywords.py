"""Options as values of Python or TOML: each becomes an item of -o, so that one parser checks all of them."""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Mapping
from typing import Any

from zarrfs.config.options import TABLE, Given
from zarrfs.config.redaction import is_secret
from zarrfs.config.storage import is_converted, is_option
from zarrfs.config.values import FLAG, OCTAL, SIZE
from zarrfs.errors import UsageError


def as_items(given: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as items for options.parse(). An argument that is None counts as not given.

    Text is written as on the command line ("64MiB", "30s"). Numbers are bytes, seconds or counts, permission bits are
    integers as for os.chmod(), repeatable options take lists, storage_options takes {"s3": {"anon": True}}, and
    s3={"anon": True} is the same. Raise UsageError for a storage option that JSON cannot express; everything else is
    checked by options.parse().
    """
    storage = given.get("storage_options") or {}
    if not isinstance(storage, Mapping) or not all(isinstance(one, Mapping) for one in storage.values()):
        raise UsageError('option storage_options: expected {"s3": {"anon": True}}')
    items = [_storage(f"{place}.{key}", one) for place, table in storage.items() for key, one in table.items()]
    for name, value in given.items():
        if name == "storage_options":
            continue
        if name not in TABLE and isinstance(value, Mapping):  # s3={"anon": True}
            items += [_storage(f"{name}.{key}", one) for key, one in value.items()]
        elif name not in TABLE and "." in name:  # s3.anon, s3://bucket.anon
            items.append(_storage(name, value))
        elif name not in TABLE and isinstance(value, bool):  # an option of mount(8)
            Given().add([name])
            items += [name] * value
        elif value is not None:
            values = value if isinstance(value, list | tuple) else (value,)
            items += [f"{name}={_text(name, one)}" for one in values] or [f"{name}=[]"]
    return items


def _text(name: str, value: Any) -> str:
    kind = TABLE[name].kind if name in TABLE else None
    if not isinstance(value, str | numbers.Real | os.PathLike):
        raise UsageError(f"option {name}: expected text or a number, not a {type(value).__name__}")
    if isinstance(value, bool):
        if kind is not FLAG:
            raise UsageError(f"option {name}: expected a value, not {str(value).lower()}")
        return str(value).lower()
    if isinstance(value, numbers.Integral):
        return f"{int(value):o}" if kind is OCTAL else f"{value}B" if kind is SIZE else str(value)
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0").rstrip(".")
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _storage(name: str, value: Any) -> str:
    """Return the item of a storage option. Values keep their type, except numbers where clients need text."""
    place, _, key = name.rpartition(".")
    if type(value) in (int, float) and (is_option(place, key) or is_secret(key, str(value))):
        value = str(value)
    if isinstance(value, str) and not (value in ("true", "false", "null") and not is_converted(name)):
        return f"{name}={value}"
    try:
        return f"{name}:={json.dumps(value)}"
    except (TypeError, ValueError, RecursionError):
        raise UsageError(f"option {name}: expected values that JSON has: text, numbers, lists, objects") from None
