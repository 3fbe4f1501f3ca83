"""The index file: its SQLite schema, the writer that documents are compiled with, and checks of its rows.

There is one row per entry, keyed by (parent directory, name), so that a listing is one range scan in the order of
names. A file's row says where its bytes are (ContentKind). Inline values, target URLs and regions have tables of
their own, so that a listing of files does not read them.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import operator
import os
import sqlite3
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from zarrfs.errors import SourceError
from zarrfs.store.api import Kind
from zarrfs.store.uri import file_uri
from zarrfs.system.buffers import Buffer

ROOT = 1  # the id of the root; every other directory has a larger id than its parent

_REMEMBERED = 200_000  # keys kept in memory


class Directories:
    """The directories of an index that is being written; in a temporary table, because there may be very many."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute(
            "CREATE TEMP TABLE directory (id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, name TEXT NOT NULL, "
            "mode INTEGER, mtime_ns INTEGER, UNIQUE (parent, name))"
        )
        # the root has the parent 0 and the empty name, which no key can have
        db.execute("INSERT INTO directory VALUES (?, 0, '', NULL, NULL)", (ROOT,))
        self.known = {"": ROOT}  # ids by key, of some

    def find(self, key: str) -> int:
        """Return the id of the directory `key`; add it and its parents if they are new."""
        above = key
        while (ident := self.known.get(above)) is None:
            above = above.rpartition("/")[0]
        while above != key:
            start = len(above) + 1 if above else 0
            stop = key.find("/", start)
            above = key if stop < 0 else key[:stop]
            ident = self.known[above] = self._child(ident, above[start:])
        if len(self.known) > _REMEMBERED:
            self.known.clear()
            self.known[""] = ROOT
        return ident

    def describe(self, key: str, mode: int | None, mtime_ns: int | None) -> None:
        """Set the mode and time of a directory."""
        self._db.execute("UPDATE directory SET mode=?, mtime_ns=? WHERE id=?", (mode, mtime_ns, self.find(key)))

    def conflicts(self) -> list[str]:
        """Return the keys that are also files, in the order of the tree: keys below a key directly follow it."""
        query = "SELECT directory.id FROM directory CROSS JOIN entry USING (parent, name)"  # one lookup for each
        keys = [self._key(ident) for (ident,) in self._db.execute(query).fetchall()]
        return sorted(keys, key=lambda key: key.split("/"))

    def write(self) -> None:
        """Insert the directories into `entry`, replacing files of the same name; their size counts subdirectories."""
        self._db.execute(
            "INSERT OR REPLACE INTO entry SELECT parent, name, 1, "
            "(SELECT count(*) FROM directory AS below WHERE below.parent = directory.id), "
            "mode, mtime_ns, NULL, id, NULL, NULL FROM directory ORDER BY parent, name"
        )
        self._db.execute("DROP TABLE directory")

    def _child(self, parent: int, name: str) -> int:
        done = self._db.execute("INSERT OR IGNORE INTO directory (parent, name) VALUES (?,?)", (parent, name))
        if done.rowcount:
            return done.lastrowid or 0
        query = "SELECT id FROM directory WHERE parent=? AND name=?"
        return int(self._db.execute(query, (parent, name)).fetchone()[0])

    def _key(self, ident: int) -> str:
        names: list[str] = []
        while ident != ROOT:
            ident, name = self._db.execute("SELECT parent, name FROM directory WHERE id=?", (ident,)).fetchone()
            names.append(name)
        return "/".join(reversed(names))


APPLICATION_ID = 0x7A617266  # "zarf" in a header that file(1) shows
INDEX_VERSION = 2  # part of every cache key, so that a new layout never opens an old file

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entry (
    parent INTEGER NOT NULL,   -- id of the directory; the root is 1
    name TEXT NOT NULL,
    kind INTEGER NOT NULL,     -- store.api.Kind
    size INTEGER,              -- bytes; NULL: ask the target; of a directory: how many subdirectories
    mode INTEGER,              -- permission bits, or NULL
    mtime_ns INTEGER,          -- or NULL
    place INTEGER,             -- ContentKind of a file; NULL for a directory
    ref INTEGER,               -- directory: id; INLINE, BROKEN, symlink: value; RANGE, WHOLE: target; REGIONS: owner
    start INTEGER,             -- RANGE: offset in the target
    held INTEGER,              -- bytes allocated where that is less than size
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE TABLE value (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE target (id INTEGER PRIMARY KEY, url TEXT NOT NULL);
CREATE TABLE region (
    owner INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    target INTEGER NOT NULL, offset INTEGER NOT NULL,
    PRIMARY KEY (owner, start)
) WITHOUT ROWID;
CREATE TABLE problem (entry TEXT NOT NULL, rule TEXT NOT NULL);
"""

# A row has all ten columns, or only the five in which plain ranges differ, because binding takes most of the time.
_COLUMNS = {10: "(?,?,?,?,?,?,?,?,?,?)", 5: "(?,?,0,?,NULL,NULL,1,?,?,NULL)"}
_INSERT = "INSERT OR REPLACE INTO entry VALUES "
_AT_ONCE = 50  # rows per INSERT statement
_FLUSH = 100_000  # rows, or regions, that are kept until they are written
_FLUSH_BYTES = 32 << 20  # bytes of values that are kept
_FLUSH_TARGETS = 200_000
_LONG = 4 << 20  # bytes: a larger value is written immediately, in pieces of this size


class ContentKind(enum.IntEnum):
    """The location of a file's bytes; the values are stored in indexes.

    The bytes are in the index, a range of a target, all of a target, regions of targets, or only zeros. A BROKEN file
    has none, because its entry breaks a rule: reading it fails, and its value in the index is the reason.
    """

    INLINE = 0
    RANGE = 1
    WHOLE = 2
    REGIONS = 3
    HOLE = 4
    BROKEN = 5


class Region(NamedTuple):
    """A part of a file: its `length` bytes from `start` on are those of `url` from `offset` on."""

    start: int
    length: int
    url: str
    offset: int = 0


_Full = tuple[
    int, str, int, int | None, int | None, int | None, int | None, int | None, int | None, int | None
]
_Row = _Full | tuple[int, str, int, int, int]


def open_database(path: str) -> sqlite3.Connection:
    """Open a read-only connection to an index. Raise SourceError if the file is no usable index."""
    try:
        db = sqlite3.connect(f"{file_uri(path)}?mode=ro&immutable=1", uri=True, check_same_thread=False)
        try:
            _check_database(db, path)
        except BaseException:
            db.close()
            raise
    except (sqlite3.Error, OSError) as exc:
        raise SourceError(path, f"not a usable index: {exc}") from exc
    return db


def first_target(path: str) -> str:
    """Return the URL of one target of an index; "" if it has none. Raise SourceError."""
    with contextlib.closing(open_database(path)) as db:
        return next((url for (url,) in db.execute("SELECT url FROM target LIMIT 1")), "")


def _check_database(db: sqlite3.Connection, path: str) -> None:
    """Check and configure `db`, a connection to the index at `path`. Raise SourceError, sqlite3.Error or OSError."""
    found = (
        db.execute("PRAGMA application_id").fetchone()[0],
        db.execute("PRAGMA user_version").fetchone()[0],
    )
    if found != (APPLICATION_ID, INDEX_VERSION):
        raise SourceError(path, f"not an index of version {INDEX_VERSION}")
    # no mmap: if the file is truncated, reading a mapped page ends the process (SIGBUS) instead of raising an error
    db.execute("PRAGMA mmap_size=0")
    db.execute("PRAGMA cache_size=-16384")
    size, pages = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count"))
    if os.path.getsize(path) != size * pages:
        raise SourceError(path, "not a usable index: cut short")


def read_notes(path: str) -> dict[str, str]:
    """Return the notes in an index: kind, source, warnings (JSON), perhaps base, origin, mtime_ns.

    Raise SourceError if it is no index.
    """
    try:
        with contextlib.closing(open_database(path)) as db:
            return dict(db.execute("SELECT name, value FROM meta"))
    except sqlite3.Error as exc:
        raise SourceError(path, f"not a usable index: {exc}") from exc


class IndexWriter:
    """A writer of a document's entries to the new index file `path`, which is complete after commit().

    Keys must have passed store.api.key_rule and be encodable as UTF-8. Adding a key again replaces it.
    A context manager: leaving it without commit() removes the file. `path` must not be where other processes look for
    the index: they would open an incomplete file. The caller renames it afterwards (sources.index_cache).
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._whole = False
        self._sizes_known = True
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA locking_mode=EXCLUSIVE;"
            f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={INDEX_VERSION};"
        )
        self._db.executescript(SCHEMA)
        self._db.execute("BEGIN")
        self._directories = Directories(self._db)
        self._targets: dict[str, int] = {}  # ids by URL; not yet written
        self._next_target = 1
        self._value_bytes = 0
        self._rows: list[_Row] = []
        self._values: list[tuple[int, Buffer]] = []
        self._regions: list[tuple[int, int, int, int, int]] = []
        self._next_value = 1
        self._next_owner = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()
        if not self._whole:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    # -- entries

    def inline(self, key: str, data: Buffer, mode: int | None = None, mtime_ns: int | None = None) -> None:
        """Add a file with `data`."""
        self._add(key, Kind.FILE, len(data), mode, mtime_ns, ContentKind.INLINE, self._value(data))

    def broken(self, key: str, reason: str) -> None:
        """Add a file whose entry breaks a rule: it is listed and has attributes, and reading it fails with `reason`.

        Its size is 1, because tar(1) and other programs do not open an empty file.
        """
        ref = self._value(reason.encode("utf-8", "backslashreplace"))
        self._add(key, Kind.FILE, 1, None, None, ContentKind.BROKEN, ref, held=0)

    def symlink(self, key: str, target: str, mtime_ns: int | None = None) -> None:
        """Add a symbolic link to `target`."""
        raw = target.encode("utf-8")
        self._add(key, Kind.SYMLINK, len(raw), 0o777, mtime_ns, None, self._value(raw))

    def range(self, key: str, url: str, offset: int, length: int) -> None:
        """Add a file whose bytes are [offset, offset + length) of `url`."""
        prefix, _, name = key.rpartition("/")
        parent = self._directories.known.get(prefix) or self._directories.find(prefix)
        ref = self._targets.get(url) or self.target_id(url)
        self._rows.append((parent, name, length, ref, offset))
        if len(self._rows) >= _FLUSH:
            self._flush()

    def ranges(self, rows: Sequence[tuple[int, str, int, int, int]]) -> None:
        """Add files that are ranges, each (directory_id(), name, length, target_id(), offset)."""
        self._rows += rows
        if len(self._rows) >= _FLUSH:
            self._flush()

    def whole(self, key: str, url: str) -> None:
        """Add a file whose bytes are all of `url`; its size is requested when first needed."""
        self._sizes_known = False
        self._add(key, Kind.FILE, None, None, None, ContentKind.WHOLE, self.target_id(url))

    def regions(
        self, key: str, size: int, regions: Sequence[Region], mode: int | None = None, mtime_ns: int | None = None
    ) -> None:
        """Add a file of `size` bytes with data in `regions` (sorted and disjoint), zeros elsewhere."""
        held = sum(region.length for region in regions)
        if not held:
            self._add(key, Kind.FILE, size, mode, mtime_ns, ContentKind.HOLE, None, held=0)
            return
        owner, self._next_owner = self._next_owner, self._next_owner + 1
        self._regions += [(owner, r.start, r.length, self.target_id(r.url), r.offset) for r in regions if r.length]
        if len(self._regions) >= _FLUSH:
            self._flush()
        self._add(
            key, Kind.FILE, size, mode, mtime_ns, ContentKind.REGIONS, owner, held=held if held < size else None
        )

    def directory(self, key: str, mode: int | None = None, mtime_ns: int | None = None) -> None:
        """Add a directory with its mode and mtime; the parents of keys are added automatically."""
        self._directories.describe(key, mode, mtime_ns)

    def problem(self, entry: str, rule: str) -> None:
        """Record an entry that was left out, for `zarrfs check`."""
        self._db.execute(
            "INSERT INTO problem VALUES (?,?)",
            (entry.encode("utf-8", "backslashreplace").decode(), rule.encode("utf-8", "replace").decode()),
        )

    # -- the end

    def conflicts(self) -> list[str]:
        """Return keys added both as files and as directories; the directory wins. Call before commit()."""
        self._flush()
        return self._directories.conflicts()

    def commit(self, meta: Iterable[tuple[str, str]] = ()) -> None:
        """Write everything to the file, with `meta` as its notes, and close it."""
        self._flush()
        self._directories.write()
        self._write_targets()
        notes = ((name, value.encode("utf-8", "backslashreplace").decode()) for name, value in meta)
        self._db.executemany("INSERT INTO meta VALUES (?,?)", notes)
        if self._sizes_known:
            self._db.execute("INSERT INTO meta VALUES ('sizes', 'known')")
        self._db.execute("COMMIT")
        self._db.close()
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
        self._whole = True

    # -- parts

    def _add(
        self, key: str, kind: Kind, size: int | None, mode: int | None, mtime_ns: int | None,
        place: ContentKind | None, ref: int | None, held: int | None = None,
    ) -> None:  # fmt: skip
        prefix, _, name = key.rpartition("/")
        self._rows.append((self._directories.find(prefix), name, kind, size, mode, mtime_ns, place, ref, None, held))
        if len(self._rows) >= _FLUSH:
            self._flush()

    def directory_id(self, key: str) -> int:
        """Return the id of the directory `key`; add it and its parents if they are new."""
        return self._directories.find(key)

    def target_id(self, url: str) -> int:
        """Return an id of a target; the same target may get a second id after many others were added."""
        found = self._targets.get(url)
        if found is None:
            if len(self._targets) >= _FLUSH_TARGETS:  # a set may have as many targets as entries
                self._write_targets()
            found = self._targets[url] = self._next_target
            self._next_target += 1
        return found

    def _write_targets(self) -> None:
        rows = [(ident, url) for url, ident in self._targets.items()]
        self._db.executemany("INSERT INTO target VALUES (?,?)", rows)
        self._targets.clear()

    def _value(self, data: Buffer) -> int:
        ident, self._next_value = self._next_value, self._next_value + 1
        if len(data) > _LONG:  # written in pieces, because SQLite would copy it as a whole
            self._db.execute("INSERT INTO value VALUES (?,zeroblob(?))", (ident, len(data)))
            with self._db.blobopen("value", "data", ident) as blob, memoryview(data) as view:
                for at in range(0, len(data), _LONG):
                    blob.write(view[at : at + _LONG])
            return ident
        self._values.append((ident, data))
        self._value_bytes += len(data)
        if self._value_bytes >= _FLUSH_BYTES:
            self._flush()
        return ident

    def _flush(self) -> None:
        self._insert(self._rows)
        self._db.executemany("INSERT INTO value VALUES (?,?)", self._values)
        self._db.executemany("INSERT INTO region VALUES (?,?,?,?,?)", self._regions)
        self._rows, self._values, self._regions = [], [], []
        self._value_bytes = 0

    def _insert(self, rows: list[_Row]) -> None:
        """Insert `rows` in the order of the table; the last of equal keys wins, because sorting is stable."""
        rows.sort(key=operator.itemgetter(1))
        rows.sort(key=operator.itemgetter(0))
        for width, group in itertools.groupby(rows, len):
            run = list(group)
            rest = len(run) % _AT_ONCE
            blocks = (run[at : at + _AT_ONCE] for at in range(0, len(run) - rest, _AT_ONCE))
            self._db.executemany(
                _INSERT + ",".join([_COLUMNS[width]] * _AT_ONCE),
                (tuple(itertools.chain.from_iterable(block)) for block in blocks),
            )
            self._db.executemany(_INSERT + _COLUMNS[width], run[len(run) - rest :])


def int64(value: int) -> bool:
    """Return whether SQLite can store `value`."""
    return -(2**63) <= value < 2**63
