"""Options as values of Python or TOML: each becomes an item of -o, so that one parser checks all of them."""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zarrfs.config.options import TABLE, Given
from zarrfs.config.values import FLAG, OCTAL, SIZE
from zarrfs.errors import UsageError


def as_items(given: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as items for options.parse(). An argument that is None counts as not given.

    Text is written as on the command line ("64MiB", "30s"). Numbers are bytes, seconds or counts, permission bits are
    integers as for os.chmod(), repeatable options take lists, storage_options takes {"s3": {"anon": True}}, and
    s3={"anon": True} is the same. Raise UsageError for an item that is wrong by itself.
    """
    items: list[str] = []
    for name, value in given.items():
        if name == "storage_options":
            value = value or {}
            if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
                raise UsageError('option storage_options: expected {"s3": {"anon": True}}')
            items += [item for place, table in value.items() for item in _storage(place, table)]
        elif name not in TABLE and isinstance(value, Mapping):  # s3={"anon": True}
            items += _storage(name, value)
        elif name not in TABLE and "." in name:  # s3.anon, s3://bucket.anon
            place, _, key = name.rpartition(".")
            items += _storage(place, {key: value})
        elif name not in TABLE and isinstance(value, bool):  # an option of mount(8)
            Given().add([name])
            items += [name] * value
        elif isinstance(value, list | tuple):
            if name in TABLE and not TABLE[name].many:
                raise UsageError(f"option {name}: expected one value, not a list")
            items += [f"{name}={_text(name, one)}" for one in value] or [f"{name}=[]"]
        elif value is not None:
            items.append(f"{name}={_text(name, value)}")
    for item in items:  # each by itself: the error about one that follows a secret may show its name
        Given().add([item])
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


def _storage(place: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the items of storage options. Values other than text are written as JSON."""
    for name, value in table.items():
        try:
            yield f"{place}.{name}={value if isinstance(value, str) else json.dumps(value)}"
        except (TypeError, ValueError, RecursionError):
            rule = "expected values that JSON has: text, numbers, lists, objects"
            raise UsageError(f"option {place}.{name}: {rule}") from None
