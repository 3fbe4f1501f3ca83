"""Entries of a store as text and as JSON."""

from __future__ import annotations

import datetime
import stat
from typing import Any

from zarrfs.errors import printable
from zarrfs.store.api import Info, Kind

_FORMS = {
    Kind.FILE: (stat.S_IFREG, 0o444),
    Kind.DIRECTORY: (stat.S_IFDIR, 0o555),
    Kind.SYMLINK: (stat.S_IFLNK, 0o777),
}


def entry_json(key: str, info: Info) -> dict[str, Any]:
    """Return an entry as a JSON object."""
    return {
        "key": key,
        "kind": info.kind.name.lower(),
        "size": info.size,
        "mode": None if info.mode is None else f"{info.mode:04o}",
        "mtime_ns": info.mtime_ns,
        "target": info.target,
    }


def long_line(name: str, info: Info) -> str:
    """Format an entry as ls -l does. An unknown mode is shown as a mount would by default."""
    form, usual = _FORMS[info.kind]
    mode = stat.filemode(form | (usual if info.mode is None else info.mode))
    size = "?" if info.size is None else str(info.size)
    arrow = f" -> {printable(info.target or '')}" if info.kind is Kind.SYMLINK else ""
    return f"{mode} {size:>12} {when(info.mtime_ns):19} {name}{arrow}"


def when(mtime_ns: int | None) -> str:
    """Format a time in the local zone; as seconds since 1970 if it is beyond the calendar."""
    if mtime_ns is None:
        return "-"
    try:
        return datetime.datetime.fromtimestamp(mtime_ns // 10**9).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"@{mtime_ns // 10**9}"
