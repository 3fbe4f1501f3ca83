"""Index files that users name: as sources, and written for them by `zarrfs index`."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sqlite3

from zarrfs.errors import SourceError
from zarrfs.options import Options
from zarrfs.sources import Plan
from zarrfs.sources.documents import Document
from zarrfs.store.indexfile import read_notes
from zarrfs.transfer.urls import without_secrets


def plan_index(path: str, options: Options, mtime_ns: int) -> Plan:
    """Plan the index file `path`. SourceError where it is none, or not what -o type= says."""
    notes = read_notes(path)
    kind, when = notes["kind"], notes.get("mtime_ns", "")
    if options.type not in (None, kind):
        raise SourceError(path, f"is an index of kind {kind} (see option type)")
    return Plan(
        path, kind, index=path, origin=notes.get("origin", ""), base=notes.get("base") or os.path.dirname(path) + "/",
        mtime_ns=int(when) if when.isdigit() else mtime_ns, warnings=tuple(json.loads(notes["warnings"])),
    )  # fmt: skip


def adopt(document: Document, path: str) -> dict[str, str]:
    """Write an index that was fetched to the new file `path`; returns its notes. SourceError where it is none."""
    with document.open() as file, open(path, "xb") as copy:
        shutil.copyfileobj(file, copy)
    try:
        return read_notes(path)
    except SourceError as exc:
        raise SourceError(document.source, exc.rule) from None


def write_index(plan: Plan, path: str) -> None:
    """Copy the index of `plan` to `path`, with notes on where it belongs; whole or not at all.

    SourceError where the plan has no index or the file cannot be written.
    """
    if plan.index is None:
        raise SourceError(plan.source, "has no index: it is not a document")
    directory, name = os.path.split(os.path.abspath(path))
    scratch = os.path.join(directory, f".{name[:200]}.{secrets.token_hex(8)}.tmp")
    notes = {"source": plan.source, "base": without_secrets(plan.base), "origin": plan.origin}
    if plan.mtime_ns is not None:
        notes["mtime_ns"] = str(plan.mtime_ns)
    try:
        shutil.copyfile(plan.index, scratch)
        with contextlib.closing(sqlite3.connect(scratch, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=OFF")
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?,?)", notes.items())
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.rename(scratch, path)
    except (OSError, sqlite3.Error) as exc:
        raise SourceError(path, f"cannot be written: {getattr(exc, 'strerror', None) or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
