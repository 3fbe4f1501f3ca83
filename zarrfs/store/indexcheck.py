"""Checking the rows of an index of a reference set, which may come from anybody."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any

from zarrfs.store.api import Kind, name_rule
from zarrfs.store.indexfile import ROOT, Place, open_database

_END_MAX = 2**63 - 1
_QUERY = (
    "SELECT e.name, e.kind, e.ref, e.size, e.place, e.start, typeof(t.url), length(t.url), typeof(v.data), "
    "length(v.data) "
    "FROM entry e LEFT JOIN target t ON t.id=e.ref LEFT JOIN value v ON v.id=e.ref "
    "WHERE e.parent=? AND e.name>'' ORDER BY e.name"
)


def first_fault(path: str) -> tuple[str, str] | None:
    """(key, rule) of something in an index file that cannot be used in a reference set; None: all is well."""
    try:
        with contextlib.closing(open_database(path)) as db:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()  # pages that are used twice would go on for ever
            return ("", f"damaged: {found}") if found != "ok" else next(row_faults(db), None)
    except sqlite3.Error as exc:
        return "", f"damaged: {exc}"


def row_faults(db: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """(key, rule) of every row that is reached from the root and cannot be used in a reference set."""
    levels = [("", db.execute(_QUERY, (ROOT,)))]
    seen = {ROOT}
    try:
        while levels:
            prefix, rows = levels[-1]
            for name, kind, ident, *rest in rows:
                key = f"{prefix}{name}"
                rule = name_rule(name) if isinstance(name, str) and "/" not in name else "not a name"
                if rule is None and kind == Kind.DIRECTORY:
                    if type(ident) is int and ident not in seen:
                        seen.add(ident)
                        levels.append((f"{key}/", db.execute(_QUERY, (ident,))))
                        break
                    rule = "a directory that is in two places"
                rule = rule or _file_rule(kind, *rest)
                if rule:
                    yield key, rule
            else:
                levels.pop()
    except sqlite3.Error as exc:
        yield "", f"damaged: {exc}"


def _file_rule(
    kind: Any, size: Any, place: Any, start: Any, url: Any, url_size: Any, value: Any, held: Any
) -> str | None:
    """The rule that the row of a file breaks; `url` and `value` are the types of what it refers to.

    `held` is how many bytes the value has.
    """
    if kind != Kind.FILE:
        return "a symbolic link, which no reference set has" if kind == Kind.SYMLINK else f"of no kind: {kind!r:.40}"
    if place == Place.INLINE:
        if value != "blob":
            return "no inline value"
        if type(size) is not int or size < 0:
            return "no size"
        return None if size == held else f"{held} bytes inline, and a size of {size}"  # zeros follow in archives only
    if place not in (Place.RANGE, Place.WHOLE):
        return "a file made of regions, which no reference set has" if place in list(Place) else "of no place"
    if url != "text" or not url_size:
        return "no target"
    if place == Place.RANGE:
        if type(size) is not int or type(start) is not int or size < 0 or start < 0:
            return "offset and length: expected whole numbers, 0 or more"
        if start + size > _END_MAX:
            return "offset + length is over 2^63 - 1"
    return None
