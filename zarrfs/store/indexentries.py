"""Entries of an index with what they are made of, many at a time: plain tuples, which processes can be sent."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence

from zarrfs.store.api import Entry, Kind, PlainPart
from zarrfs.store.indexfile import Place

TARGET_MAX = 4095  # bytes of a symbolic link's target
_MANY_REGIONS = 4096  # of a file: more are not held for a listing

_QUERY = """
SELECT e.name, e.kind, e.size, e.mode, e.mtime_ns, e.held, e.place, v.data, r.start, r.length, t.url, r.offset
FROM entry e
LEFT JOIN value v ON (e.place=0 OR e.kind=2) AND v.id=e.ref
LEFT JOIN region r ON e.place=3 AND r.owner=e.ref
LEFT JOIN target t ON t.id=r.target
WHERE e.parent=? AND {which} ORDER BY e.name, r.start
"""
_ALL, _SOME = "e.name>''", "e.name IN (SELECT value FROM json_each(?)) AND e.kind=0"


def entries_of(
    db: sqlite3.Connection, parent: int, usual_ns: int | None, names: Sequence[str] | None = None
) -> Iterator[Entry]:
    """All of the directory of id `parent`, or its files of some `names`; what has no time has `usual_ns`.

    Of files of very many regions only those named have them. Blocks, in any thread. sqlite3.Error.
    """
    entry: Entry | None = None
    last = ""
    most = _MANY_REGIONS if names is None else 1 << 62
    which, more = (_ALL, ()) if names is None else (_SOME, (json.dumps(names),))
    for name, kind, size, mode, mtime_ns, held, place, data, start, length, url, offset in db.execute(
        _QUERY.format(which=which), (parent, *more)
    ):
        if name == last and entry is not None:  # one more region
            if entry[7] is not None:
                entry[7].append((start, length, None, url, offset))
                entry = (*entry[:7], None) if len(entry[7]) > most else entry
            continue
        if entry is not None:
            yield entry
        last, target = name, None
        parts: list[PlainPart] | None = None
        if kind == Kind.SYMLINK:
            target = data.decode() if size == len(data) <= TARGET_MAX else None
        elif kind == Kind.DIRECTORY:
            size = 0  # not how many directories are in it
        elif kind == Kind.FILE and place == Place.REGIONS:
            parts = [] if start is None else [(start, length, None, url, offset)]
        elif kind == Kind.FILE and place == Place.INLINE:
            parts = [(0, len(data), data, "", 0)] if data else []
        elif kind == Kind.FILE and place == Place.HOLE:
            parts = []
        entry = name, kind, size, mode, usual_ns if mtime_ns is None else mtime_ns, held, target, parts
    if entry is not None:
        yield entry
