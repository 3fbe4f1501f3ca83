"""What tests of gen share: an item read, and its rows."""

from __future__ import annotations

from typing import Any

from zarrfs.references.gen import Gen, read_gen
from zarrfs.references.templates import Templates


def gen(item: dict[str, Any], names: tuple[str, ...] = (), limit: int = 10**6) -> Gen:
    """An item of gen, checked; `names` are those of templates."""
    (made,) = read_gen([item], names, limit)
    return made


def rows(item: dict[str, Any], **named: str) -> list[tuple[str, ...]]:
    """All rendered rows of an item, with named templates."""
    return list(Templates(named).rows(gen(item, tuple(named))))
