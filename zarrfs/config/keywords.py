"""Options as keyword arguments of Python: each becomes an item of -o, so that one kind checks all of them."""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Mapping
from typing import Any

from zarrfs.config.options import TABLE, read
from zarrfs.config.values import LIFETIME, OCTAL, SECONDS, SIZE, Kind
from zarrfs.errors import UsageError


def as_items(given: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as items for options.read(). An argument that is None counts as not given.

    Text is written as on the command line ("64MiB", "30s"). Numbers are bytes, seconds or counts, permission bits are
    integers as for os.chmod(), repeatable options take lists, storage_options takes {"s3": {"anon": True}}, and
    s3={"anon": True} is the same. Raise UsageError for a storage option that JSON cannot express, and for False as the
    value of an unknown name; everything else is checked by options.read().
    """
    items: list[str] = []
    storage = given.get("storage_options")
    storage = {} if storage is None else storage
    if not isinstance(storage, Mapping) or not all(isinstance(one, Mapping) for one in storage.values()):
        raise UsageError('option storage_options: expected {"s3": {"anon": True}}')
    for name, value in {**storage, **given}.items():
        kind = TABLE[name].kind if name in TABLE else None
        if value is None or name == "storage_options":
            continue
        if kind is None and isinstance(value, Mapping):  # s3={"anon": True}
            items += [f"{name}.{key}={_storage(f'{name}.{key}', one)}" for key, one in value.items()]
        elif kind is None and "." in name:  # s3.anon, s3://bucket.anon
            items.append(f"{name}={_storage(name, value)}")
        elif isinstance(value, list | tuple) and kind is not None:
            items += [f"{name}={_text(kind, one)}" for one in value]
        elif value is True:
            items.append(name)
        elif value is False and kind is None:
            read([name])  # an option of mount(8) that is off: only check that there is one of this name
        else:
            items.append(f"{name}={_text(kind, value)}")
    return items


def _text(kind: Kind | None, value: Any) -> str:
    """Format a value so that its option's kind accepts it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, numbers.Integral):
        return f"{int(value):o}" if kind is OCTAL else f"{value}B" if kind is SIZE else str(value)
    if isinstance(value, numbers.Real) and kind in (SECONDS, LIFETIME):
        return f"{float(value):.9f}".rstrip("0").rstrip(".")
    return str(value)


def _storage(name: str, value: Any) -> str:
    """Format the value of a storage option: text as it is, all else as JSON."""
    try:
        if isinstance(value, str):
            return value
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise UsageError(f"option {name}: expected values that JSON has: text, numbers, lists, objects") from None
