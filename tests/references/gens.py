"""Helpers for the tests of gen: check one item and render its rows."""

from __future__ import annotations

from typing import Any

from zarrfs.references.gen import Gen, read_gen
from zarrfs.references.templates import Templates


def gen(item: dict[str, Any], names: tuple[str, ...] = ()) -> Gen:
    """Check one item of gen and return it; `names` are the names of the templates."""
    (made,) = read_gen([item], names)
    return made


def rows(item: dict[str, Any], **named: str) -> list[tuple[str, ...]]:
    """Return all rendered rows of an item; `named` are the templates."""
    return list(Templates(named).rows(gen(item, tuple(named))))
