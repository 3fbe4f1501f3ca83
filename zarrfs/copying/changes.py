"""The changes in an upper directory: convert them to JSON, or delete them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

from zarrfs.errors import SourceError, reason_of
from zarrfs.store.destination import remove_tree
from zarrfs.store.overlay import Change
from zarrfs.store.upper import RECORD, Upper

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


def discard(path: str, agreed: Callable[[int], bool]) -> bool:
    """Delete everything in the upper directory `path` if `agreed(entries)`; return whether it was deleted.

    Raise SourceError if a mount uses the directory, if it has no record of being an upper directory, or if an entry
    cannot be deleted. The record is deleted last, so that an interrupted discard can be repeated.
    """
    upper = Upper(path)
    try:
        status = upper.status(RECORD)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise SourceError(path, f"is not an upper directory of zarrfs (no {RECORD}): not deleted")
        upper.lock(True)
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_IRWXU)  # chmod in a mount can clear these bits
        names = sorted(os.listdir(path), key=lambda name: (name == RECORD, name))
        if not agreed(len(names) - 1):
            return False
        for name in names:
            remove_tree(os.path.join(path, name))
    except OSError as exc:
        raise SourceError(exc.filename or path, f"cannot be deleted: {reason_of(exc)}") from exc
    finally:
        upper.close()
    return True
