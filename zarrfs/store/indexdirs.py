"""The directories of an index that is being written: in a temporary table, as there may be as many as entries."""

from __future__ import annotations

import sqlite3

ROOT = 1  # the id of the root; every other directory has a larger one than its parent

_REMEMBERED = 200_000  # keys kept in memory
_BELOW = (
    "WITH RECURSIVE below(id) AS "
    "(SELECT ? UNION ALL SELECT directory.id FROM directory JOIN below ON directory.parent = below.id) "
)


class Directories:
    """Ids of directories by key; made with their parents when first asked for."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute(
            "CREATE TEMP TABLE directory (id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, name TEXT NOT NULL, "
            "mode INTEGER, mtime_ns INTEGER, UNIQUE (parent, name))"
        )
        # the root is its own parent under the empty name, which no key can have
        db.execute("INSERT INTO directory VALUES (?, 0, '', NULL, NULL)", (ROOT,))
        self.known = {"": ROOT}  # some keys with their ids
        self._all_known = True
        self._next = ROOT + 1

    def find(self, key: str) -> int:
        """The id of the directory `key`."""
        ident = self.known.get(key)
        if ident is not None:
            return ident
        at = len(key)
        while at >= 0 and key[:at] not in self.known:
            at = key.rfind("/", 0, at)
        ident = self.known[key[: max(at, 0)]]
        while at < len(key):
            start = at + 1 if at > 0 else 0
            at = key.find("/", start)
            at = len(key) if at < 0 else at
            ident = self._child(ident, key[start:at])
            self.known[key[:at]] = ident
        if len(self.known) > _REMEMBERED:
            self._forget()
        return ident

    def describe(self, key: str, mode: int | None, mtime_ns: int | None) -> None:
        """Give a directory a mode and a time."""
        self._db.execute("UPDATE directory SET mode=?, mtime_ns=? WHERE id=?", (mode, mtime_ns, self.find(key)))

    def conflicts(self) -> list[str]:
        """The keys that are entries, too, sorted."""
        query = "SELECT directory.id FROM directory CROSS JOIN entry USING (parent, name)"  # looks each up
        return sorted(self._key(ident) for (ident,) in self._db.execute(query).fetchall())

    def remove(self, key: str) -> int:
        """Take back a directory and all below it; returns how many entries that were."""
        ident = self.find(key)
        self._db.execute(f"{_BELOW} DELETE FROM entry WHERE parent IN (SELECT id FROM below)", (ident,))
        (count,) = self._db.execute("SELECT changes()").fetchone()
        self._db.execute(f"{_BELOW} DELETE FROM directory WHERE id IN (SELECT id FROM below)", (ident,))
        self._forget()
        return int(count)

    def write(self) -> None:
        """Make them entries, in place of files of the same name; their size is how many subdirectories they have."""
        self._db.execute(
            "INSERT OR REPLACE INTO entry SELECT parent, name, 1, "
            "(SELECT count(*) FROM directory AS below WHERE below.parent = directory.id), "
            "mode, mtime_ns, NULL, id, NULL, NULL FROM directory ORDER BY parent, name"
        )
        self._db.execute("DROP TABLE directory")

    def _child(self, parent: int, name: str) -> int:
        if not self._all_known:
            row = self._db.execute("SELECT id FROM directory WHERE parent=? AND name=?", (parent, name)).fetchone()
            if row is not None:
                return int(row[0])
        ident, self._next = self._next, self._next + 1
        self._db.execute("INSERT INTO directory VALUES (?,?,?,NULL,NULL)", (ident, parent, name))
        return ident

    def _forget(self) -> None:
        self.known.clear()
        self.known[""] = ROOT
        self._all_known = False

    def _key(self, ident: int) -> str:
        names: list[str] = []
        while ident != ROOT:
            ident, name = self._db.execute("SELECT parent, name FROM directory WHERE id=?", (ident,)).fetchone()
            names.append(name)
        return "/".join(reversed(names))
