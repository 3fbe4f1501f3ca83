"""The changes in an upper directory: their form in JSON."""

from __future__ import annotations

import stat
from typing import Any

from zarrfs.store.overlay import Change

LETTERS = {"added": "A", "changed": "M", "deleted": "D"}
_TYPES = {
    stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket", stat.S_IFCHR: "character device", stat.S_IFBLK: "block device",
}  # fmt: skip


def as_json(change: Change) -> dict[str, Any]:
    """Return a change, ready for JSON: kind, key, and the new entry's type, size in bytes, mode and mtime_ns."""
    status = change.status
    return {
        "kind": change.kind,
        "key": change.key,
        "type": None if status is None else _TYPES.get(stat.S_IFMT(status.st_mode)),
        "size": None if status is None else 0 if stat.S_ISDIR(status.st_mode) else status.st_size,
        "mode": None if status is None else f"{stat.S_IMODE(status.st_mode):04o}",
        "mtime_ns": None if status is None else status.st_mtime_ns,
    }
