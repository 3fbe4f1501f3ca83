"""Helpers for the tests of gen: check one item and render its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zarrfs.references.gen import Gen, read_gen
from zarrfs.references.templates import Templates


def gen(item: dict[str, Any], names: tuple[str, ...] = (), limit: int = 10**6) -> Gen:
    """Check one item of gen and return it; `names` are the names of the templates."""
    (made,) = read_gen([item], names, limit)
    return made


def rows_of(templates: Templates, item: Gen) -> Iterator[tuple[str, ...]]:
    """Yield the rendered fields of every combination, in order, one row at a time."""
    for keys, urls, offsets, lengths in templates.batches(item):
        if offsets is None or lengths is None:
            yield from zip(keys, urls, strict=True)
        else:
            yield from zip(keys, urls, map(str, offsets), map(str, lengths), strict=True)


def rows(item: dict[str, Any], **named: str) -> list[tuple[str, ...]]:
    """Return all rendered rows of an item; `named` are the templates."""
    return list(rows_of(Templates(named), gen(item, tuple(named))))
