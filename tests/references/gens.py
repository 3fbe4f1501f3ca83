"""Helpers of the tests of gen: one checked item, and its rendered rows."""

from __future__ import annotations

from typing import Any

from zarrfs.references.gen import Gen, read_gen
from zarrfs.references.templates import Templates


def gen(item: dict[str, Any], names: tuple[str, ...] = (), limit: int = 10**6) -> Gen:
    """Return a checked item of gen; `names` are those of the templates."""
    (made,) = read_gen([item], names, limit)
    return made


def rows(item: dict[str, Any], **named: str) -> list[tuple[str, ...]]:
    """Return all rendered rows of an item, with named templates."""
    return list(Templates(named).rows(gen(item, tuple(named))))
