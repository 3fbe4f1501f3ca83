"""The table of names that a server has reported: key -> file with size, time and tag, or directory, or absent.

The table is an unnamed SQLite file, of which a bounded part is in memory. A row is valid for metadata_ttl=. Two kinds
of responses are complete: the listing of a directory, and a page of a flat listing, which covers a span of keys in the
order of their UTF-8 bytes. A name that a complete response covers but does not contain is absent.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from zarrfs.cache.diskfiles import make_private_directory
from zarrfs.net.responses import Entry
from zarrfs.store.api import join_key, split_key
from zarrfs.store.uri import file_uri

_FILE, _DIRECTORY, _ABSENT = range(3)
_MEMORY = 8 << 20  # bytes of the table that are in memory
_MOST = 4 << 30  # bytes of a table on disk
_MOST_IN_MEMORY = 64 << 20  # bytes of a table that is only in memory
_DOCUMENT = 1 << 20  # bytes: a larger document is not stored in the table
_SPANS = 4096  # spans that are remembered
_MERGED = 1.0  # seconds: adjacent spans are merged if their times differ by no more
_AHEAD = 2.0  # seconds (or the ttl, if longer) by which a valid row may lie in the future: clocks may be set back
_ROWS = 1000  # rows per query
_HIDDEN_ENDS = ("~", "#", ",v", ",t")
END = b"\xff"  # sorts after every key
_LAYOUT = 1
_SCHEMA = f"""
CREATE TABLE names (
    parent BLOB NOT NULL, name BLOB NOT NULL, kind INTEGER NOT NULL, seen REAL NOT NULL, listed REAL, size INTEGER,
    mtime_ns INTEGER, tag TEXT, flags INTEGER, identity INTEGER, PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE TABLE documents (key BLOB PRIMARY KEY, size INTEGER NOT NULL, tag TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE spans (start BLOB NOT NULL, stop BLOB NOT NULL, seen REAL NOT NULL);
PRAGMA user_version = {_LAYOUT};
"""
_COLUMNS = "name, kind, seen, size, mtime_ns, tag, flags, identity, listed"
# The response to an earlier request may arrive later: it must not replace a newer row.
_PUT = (
    "INSERT INTO names VALUES (?, ?, ?, ?, NULL, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET kind = excluded.kind, "
    "seen = excluded.seen, listed = NULL, size = excluded.size, mtime_ns = excluded.mtime_ns, tag = excluded.tag, "
    "flags = excluded.flags, identity = excluded.identity WHERE seen <= excluded.seen"
)
_PUT_DIRECTORY = (
    "INSERT INTO names (parent, name, kind, seen, mtime_ns) VALUES (?, ?, 1, ?, ?) "
    "ON CONFLICT DO UPDATE SET kind = 1, seen = max(seen, excluded.seen), mtime_ns = excluded.mtime_ns, size = NULL"
)
_IMPLY_DIRECTORY = _PUT_DIRECTORY + " WHERE kind != 0 OR seen < excluded.seen - ?"
_PUT_NAME = (
    "INSERT INTO names (parent, name, kind, seen, listed, flags) VALUES (?, ?, 0, 0, ?, 0) ON CONFLICT DO UPDATE SET "
    "seen = iif(kind, 0, seen), size = iif(kind, NULL, size), kind = 0, listed = excluded.listed"
)
_STRONG, _ROUGH = 1, 2


class Known(NamedTuple):
    """An answer from the table: the entry of a name, or that the name is absent."""

    entry: Entry | None  # None: the name is absent
    identity: int | None = None  # as Info.identity: kept until a later entry shows another value
    seen: float = 0.0  # when the server reported it: seconds since 1970


def encoded(key: str) -> bytes:
    """Encode a key so that it sorts as in listings."""
    return key.encode("utf-8", "surrogateescape")


def span_of(directory: str) -> tuple[bytes, bytes]:
    """Return the span (start, stop) of all keys below a directory."""
    key = encoded(directory)
    return (key + b"/", key + b"0") if key else (b"", END)


def may_be_hidden(name: str) -> bool:
    """Return whether web servers may leave a name out of a listing.

    These are names that begin with a dot, and those that Apache's example configuration ignores. Source: IndexIgnore
    in httpd-autoindex.conf of httpd 2.4: .??* *~ *# HEADER* README* RCS CVS *,v *,t
    """
    return name in ("RCS", "CVS") or name.startswith((".", "HEADER", "README")) or name.endswith(_HIDDEN_ENDS)


class Emptied(Exception):
    """Raised if the table loses names while it is read: it is full or damaged, or forget() was called."""


class NameTable:
    """The table of the names of one store; see the docstring of the module.

    `ttl`: seconds for which a row is valid; `absent`: the same for absent names. `path`, if set, is a file that keeps
    the table for later mounts: rows seen since the time `since` are loaded from it at the first use, and keep()
    replaces it. `in_memory`: the table itself uses no disk. `may_omit_names`: listings may lack the names of
    may_be_hidden().
    """

    may_omit_names = False

    def __init__(self, ttl: float, absent: float, since: float = 0.0, in_memory: bool = False) -> None:
        self.ttl, self.absent, self._since, self._in_memory = ttl, absent, since, in_memory
        self.path: str | None = None
        self._database: sqlite3.Connection | None = None
        self._spans: list[tuple[bytes, bytes, float]] = []  # (start, stop, time), sorted and disjoint
        self._changed = False
        self.emptied = 0  # how often the whole table was lost, because it was full or damaged
        self.lost = 0  # how often a single name or the whole table was lost

    # -- queries

    def get(self, key: str, now: float | None = None) -> Known | None:
        """Look up a key; return None if the table has no answer that is valid at `now`."""
        now = time.time() if now is None else now
        parent, name = split_key(key)
        parent_, name_ = encoded(parent), encoded(name)
        row = self._row(f"SELECT {_COLUMNS} FROM names WHERE parent = ? AND name = ?", parent_, name_)
        listed = self._listed_around(key, parent, now)
        if row is not None and (known := self._if_valid(row, listed, now)) is not None:
            return known
        if self.may_omit_names and may_be_hidden(name):
            return None
        return Known(None, seen=listed) if listed and self._is_fresh(listed, self.absent, now) else None

    def _if_valid(self, row: tuple[Any, ...], listed: float, now: float) -> Known | None:
        """Return the decoded row if it is valid, else None; `listed`: when the whole directory was last listed."""
        _, kind, seen, *_, named = row
        if seen >= listed and self._is_fresh(seen, self.absent if kind == _ABSENT else self.ttl, now):
            return _known(row)
        if kind == _FILE and named is not None and named >= listed and self._is_fresh(named, self.ttl, now):
            if self._is_fresh(seen, self.ttl, now):
                return _known(row)
            # of its attributes, only the name is valid
            return Known(Entry(row[0].decode("utf-8", "surrogateescape"), False), None, named)
        return None

    def rows(self, directory: str) -> dict[str, Known]:
        """Return the last known entry of each value in a directory, valid or not."""
        rows = self._rows(f"SELECT {_COLUMNS} FROM names WHERE parent = ? AND kind = 0", encoded(directory))
        return {known.entry.name: known for known in map(_known, rows) if known.entry is not None}

    def last(self, key: str) -> Known | None:
        """Return the last known entry of a key, valid or not."""
        parent, name = split_key(key)
        query = f"SELECT {_COLUMNS} FROM names WHERE parent = ? AND name = ?"
        row = self._row(query, encoded(parent), encoded(name))
        return None if row is None else _known(row)

    def listed(self, directory: str, now: float | None = None) -> float:
        """Return when all names of a directory were reported, if that is still valid; else 0."""
        now = time.time() if now is None else now
        return max(self._listed_alone(directory, now), self._spanned(*span_of(directory), now))

    def covered(self, start: bytes, stop: bytes, now: float) -> bytes:
        """Return the position, at most `stop`, up to which valid pages cover all keys from `start` on."""
        at = max(bisect.bisect_right(self._spans, start, key=lambda span: span[0]) - 1, 0)
        for low, high, seen in self._spans[at:]:
            if low > start or start >= stop:
                break
            if high > start and self._is_fresh(seen, self.ttl, now):
                start = high
        return min(start, stop)

    def children(self, directory: str, after: str, upto: bytes | None, now: float) -> Iterator[tuple[str, Known]]:
        """Yield (name, Known) of the valid children of a directory, sorted: those after `after` and before `upto`.

        If the directory is listed, these are all its children. Raise Emptied if the table loses names meanwhile.
        """
        parent, at, lost = encoded(directory), encoded(after), self.lost
        listed = self.listed(directory, now)
        while True:
            query = f"SELECT {_COLUMNS} FROM names WHERE parent = ? AND name > ? ORDER BY name LIMIT {_ROWS}"
            rows = self._rows(query, parent, at)
            if self.lost != lost:
                raise Emptied
            for row in rows:
                if upto is not None and row[0] >= upto:
                    return
                name = row[0].decode("utf-8", "surrogateescape")
                around = listed or self._listed_around(join_key(directory, name), directory, now)
                known = self._if_valid(row, around, now) if name else None
                if known is not None and known.entry is not None:
                    yield name, known
            if len(rows) < _ROWS:
                return
            at = rows[-1][0]

    # -- writing

    def put(self, key: str, entry: Entry | None, identity: int | None = None) -> Known:
        """Store the entry of a key; None: the key is absent."""
        now = time.time()
        parent, name = split_key(key)
        if entry is None:
            self._write(_PUT, [(encoded(parent), encoded(name), _ABSENT, now, None, None, None, 0, None)])
        elif entry.directory:
            self._write(_PUT_DIRECTORY, [(encoded(parent), encoded(name), now, entry.mtime_ns)])
        else:
            self._write(_PUT, [_row(encoded(parent), encoded(name), entry, now, identity)])
        return Known(entry, identity, now)

    def put_listing(self, directory: str, found: Sequence[tuple[str, Entry, int | None]], since: float) -> bool:
        """Store (name, entry, identity) of all children of a directory, whose listing was requested at `since`.

        Attributes that are known of an entry without a size are kept. Return whether the table has room for all.
        """
        return self._with_room(lambda: self._put_listing(directory, found, since))

    def _with_room(self, put: Callable[[], None]) -> bool:
        """Call `put`, and once more if that emptied the table; return whether the table now has everything."""
        for _ in range(2):
            emptied = self.emptied
            put()
            if self.emptied == emptied:
                return True
        self._clear()  # an incomplete listing would look complete
        return False

    def _put_listing(self, directory: str, found: Sequence[tuple[str, Entry, int | None]], since: float) -> None:
        parent = encoded(directory)
        files, names, directories = [], [], []
        for name, entry, identity in found:
            if entry.directory:
                directories.append((parent, encoded(name), since, entry.mtime_ns))
            elif entry.size is None:
                names.append((parent, encoded(name), since))
            else:
                files.append(_row(parent, encoded(name), entry, since, identity))
        self._write(_PUT, files)
        self._write(_PUT_NAME, names)
        self._write(_PUT_DIRECTORY, directories)
        query = "DELETE FROM names WHERE parent = ? AND seen < ? AND name != x'' AND ifnull(listed, 0) < ?"
        self._write(query, [(parent, since, since)])
        self.put_listed(directory, since)

    def put_listed(self, directory: str, since: float) -> None:
        """Record that the table has all names that a directory had at `since`."""
        above, name = split_key(directory)
        self._write(_PUT_DIRECTORY, [(encoded(above), encoded(name), since, None)])
        query = "UPDATE names SET listed = ? WHERE parent = ? AND name = ?"
        self._write(query, [(since, encoded(above), encoded(name))])

    def put_page(self, found: Sequence[tuple[str, Entry]], start: bytes, stop: bytes, since: float) -> None:
        """Store a page of a flat listing: all keys in [start, stop), requested at `since`."""
        self._with_room(lambda: self._put_page(found, start, stop, since))

    def _put_page(self, found: Sequence[tuple[str, Entry]], start: bytes, stop: bytes, since: float) -> None:
        files, directories = [], dict[str, None]()
        for key, entry in found:
            parent, name = split_key(key)
            if entry.directory:
                parent = key
            else:
                files.append(_row(encoded(parent), encoded(name), entry, since, None))
            while parent and parent not in directories:
                directories[parent] = None
                parent = split_key(parent)[0]
        ttl = self.ttl
        rows = [(encoded(above), encoded(name), since, None, ttl) for above, name in map(split_key, directories)]
        self._write(_IMPLY_DIRECTORY, rows)  # a value takes precedence over a directory of the same name
        self._write(_PUT, files)
        self._add_span(start, stop, since)

    def forget(self, key: str) -> None:
        """Invalidate the row of `key`, and the complete responses that cover it.

        If a listing had the name without a size, the name itself stays valid.
        """
        self.lost += 1
        parent, name = split_key(key)
        self._write("UPDATE names SET seen = 0 WHERE parent = ? AND name = ?", [(encoded(parent), encoded(name))])
        self._cut(encoded(key), encoded(key) + b"\0")
        above, name = split_key(parent)
        self._write("UPDATE names SET listed = NULL WHERE parent = ? AND name = ?", [(encoded(above), encoded(name))])

    def document(self, key: str) -> bytes | None:
        """Return the bytes of a document if the table has them in the version of its row, else None."""
        known = self.get(key)
        if known is None or known.entry is None:
            return None
        query = "SELECT data FROM documents WHERE key = ? AND size = ? AND tag = ?"
        row = self._row(query, encoded(key), known.entry.size, known.entry.tag)
        return None if row is None else bytes(row[0])

    def put_document(self, key: str, data: bytes) -> None:
        """Store the bytes of a document, unless it is large, or no valid row has this size and a tag."""
        known = self.get(key)
        entry = None if known is None else known.entry
        if entry is not None and entry.tag is not None and entry.size == len(data) <= _DOCUMENT:
            query = "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)"
            self._write(query, [(encoded(key), entry.size, entry.tag, data)])

    # -- the file

    def keep(self) -> None:
        """Replace the file `path` by this table; blocks. Errors are ignored: the next mount is only slower."""
        if self.path is None or not self._changed or self._database is None:
            return
        scratch = os.path.join(os.path.dirname(self.path), f".zarrfs-{secrets.token_hex(8)}.tmp")
        with contextlib.suppress(OSError, sqlite3.Error):
            try:
                make_private_directory(os.path.dirname(self.path))
                os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                self._database.execute("DELETE FROM spans")
                self._database.executemany("INSERT INTO spans VALUES (?, ?, ?)", self._spans)
                self._database.execute("VACUUM INTO ?", (file_uri(scratch),))  # a plain path would have to be UTF-8
                os.rename(scratch, self.path)
                self._changed = False
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)

    def close(self) -> None:
        """Close the table."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = self._new()
            if self.path is not None and not self._take(self.path):
                self._database.close()
                self._database = self._new()
        return self._database

    def _new(self) -> sqlite3.Connection:
        place = ":memory:" if self._in_memory else ""
        database = sqlite3.connect(place, isolation_level=None, check_same_thread=False, uri=True)
        database.execute("PRAGMA journal_mode = OFF")
        database.execute(f"PRAGMA cache_size = -{_MEMORY >> 10}")
        database.execute(f"PRAGMA max_page_count = {(_MOST_IN_MEMORY if self._in_memory else _MOST) // 4096}")
        database.executescript(_SCHEMA)
        self._spans = []
        return database

    def _take(self, path: str) -> bool:
        """Load the table kept at `path`; return False if it is damaged, so that the loaded rows must not be used."""
        database = self._database
        assert database is not None
        try:
            status = os.lstat(path)
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
                return True
            with contextlib.closing(sqlite3.connect(f"{file_uri(path)}?mode=ro&immutable=1", uri=True)) as kept:
                if kept.execute("PRAGMA user_version").fetchone() != (_LAYOUT,):
                    return True
                kept.backup(database)
            database.execute("DELETE FROM names WHERE max(seen, ifnull(listed, 0)) < ?", (self._since,))
            query = "SELECT start, stop, seen FROM spans WHERE seen >= ? ORDER BY start"
            self._spans = database.execute(query, (self._since,)).fetchall()
            self.get("")
        except OSError:
            return True
        except (sqlite3.Error, TypeError, ValueError):
            return False
        return True

    def _row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        rows = self._rows(query, *values)
        return rows[0] if rows else None

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._opened().execute(query, values).fetchall()
        except sqlite3.Error:
            self._clear()
            return []

    def _write(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if not rows:
            return
        self._changed = True
        try:
            database = self._opened()
            database.execute("BEGIN")
            database.executemany(query, rows)
            database.execute("COMMIT")
        except sqlite3.Error:  # full, or damaged
            self._clear()

    def _clear(self) -> None:
        """Discard the table, which is full or damaged; the file `path` is neither loaded nor replaced any more."""
        self.close()
        self._spans, self.path = [], None
        self.emptied += 1
        self.lost += 1

    # -- listings and pages

    def _is_fresh(self, seen: float, ttl: float, now: float) -> bool:
        return seen + ttl > now and seen < now + max(ttl, _AHEAD)

    def _listed_around(self, key: str, parent: str, now: float) -> float:
        """Return the time of the last complete response that covers `key`, if that is still valid; else 0."""
        key_ = encoded(key)
        return max(self._listed_alone(parent, now), self._spanned(key_, key_ + b"0", now) if self._spans else 0.0)

    def _listed_alone(self, directory: str, now: float) -> float:
        """Return the time of the last listing of a directory, not counting pages, if that is still valid; else 0."""
        above, name = split_key(directory)
        row = self._row("SELECT listed FROM names WHERE parent = ? AND name = ?", encoded(above), encoded(name))
        return row[0] if row is not None and row[0] is not None and self._is_fresh(row[0], self.ttl, now) else 0.0

    def _spanned(self, start: bytes, stop: bytes, now: float) -> float:
        """Return the time of the oldest page that covers keys in [start, stop); 0 if some are not covered."""
        at = max(bisect.bisect_right(self._spans, start, key=lambda span: span[0]) - 1, 0)
        oldest = now + self.ttl
        for low, high, seen in self._spans[at:]:
            if low > start:
                break
            if high > start and self._is_fresh(seen, self.ttl, now):
                oldest, start = min(oldest, seen), high
                if start >= stop:
                    return oldest
        return 0.0

    def _add_span(self, start: bytes, stop: bytes, seen: float) -> None:
        if start >= stop:
            return
        self._cut(start, stop)
        at = bisect.bisect_left(self._spans, start, key=lambda span: span[0])
        self._spans.insert(at, (start, stop, seen))
        for left in (at, at - 1):  # merge with the span after it, then with the one before
            if 0 <= left < len(self._spans) - 1:
                (low, middle, one), (other_low, high, other) = self._spans[left : left + 2]
                if middle == other_low and abs(one - other) <= _MERGED:
                    self._spans[left : left + 2] = [(low, high, min(one, other))]
        if len(self._spans) > _SPANS:
            oldest = sorted(seen for _, _, seen in self._spans)[_SPANS // 2]
            self._spans = [span for span in self._spans if span[2] > oldest]

    def _cut(self, start: bytes, stop: bytes) -> None:
        """Remove [start, stop) from the spans."""
        at = max(bisect.bisect_right(self._spans, start, key=lambda span: span[0]) - 1, 0)
        end, kept = at, []
        while end < len(self._spans) and self._spans[end][0] < stop:
            low, high, seen = self._spans[end]
            if low < start:
                kept.append((low, min(high, start), seen))
            if high > stop:
                kept.append((max(low, stop), high, seen))
            end += 1
        self._spans[at:end] = kept


def _row(parent: bytes, name: bytes, entry: Entry, seen: float, identity: int | None) -> tuple[Any, ...]:
    flags = _STRONG * entry.strong | _ROUGH * entry.rough
    return parent, name, _FILE, seen, entry.size, entry.mtime_ns, entry.tag, flags, identity


def _known(row: tuple[Any, ...]) -> Known:
    name, kind, seen, size, mtime_ns, tag, flags, identity, _ = row
    if kind == _ABSENT:
        return Known(None, None, seen)
    text = name.decode("utf-8", "surrogateescape")
    if kind == _DIRECTORY:
        return Known(Entry(text, True, None, mtime_ns), None, seen)
    entry = Entry(text, False, size, mtime_ns, tag, False, bool(flags & _STRONG), bool(flags & _ROUGH))
    return Known(entry, identity, seen)
