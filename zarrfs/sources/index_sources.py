"""Index files outside the cache: open them as sources, and write them for `zarrfs index`."""

from __future__ import annotations

import json
import os
import shutil

from zarrfs.config.options import Options
from zarrfs.config.redaction import without_secrets
from zarrfs.documents.document import Document
from zarrfs.documents.plan import Plan
from zarrfs.errors import SourceError
from zarrfs.store.destination import is_utf8
from zarrfs.store.indexfile import add_notes, first_fault, int64, read_notes


def plan_index(path: str, options: Options, mtime_ns: int) -> Plan:
    """Plan the index file `path`. Raise SourceError if it is no index, or not of the kind that -o type= requires."""
    notes = read_notes(path)
    kind, when = notes["kind"], notes.get("mtime_ns", "")
    known = when.isascii() and when.isdigit() and len(when) < 20 and int64(int(when))
    if options.type not in (None, kind):
        raise SourceError(path, f"is an index of kind {kind} (see option type)")
    return Plan(
        path, kind, index=path, origin=notes.get("origin", ""), base=notes.get("base") or os.path.dirname(path) + "/",
        mtime_ns=int(when) if known else mtime_ns, warnings=tuple(json.loads(notes["warnings"])),
    )  # fmt: skip


def adopt(document: Document, path: str) -> dict[str, str]:
    """Copy a fetched index to the new file `path`; return its notes.

    Raise SourceError if it is no index, or contains anything that no index of a reference set has, because a file from
    the network is not trusted.
    """
    with document.open() as file, open(path, "xb") as copy:
        shutil.copyfileobj(file, copy)
    try:
        notes = read_notes(path)
    except SourceError as exc:
        raise SourceError(document.source, exc.rule) from None
    if notes["kind"] != "references":
        raise SourceError(document.source, "an index of an archive is accepted as a local file only")
    fault = first_fault(path)
    if fault is not None:
        raise SourceError(document.source, f"not a usable index: {fault[1]}", fault[0] or None)
    return notes


def copy_index(plan: Plan, path: str) -> None:
    """Copy the index of `plan` to the new file `path`, with notes about its document.

    Raise SourceError if the plan has no index or its base is not UTF-8, and OSError or sqlite3.Error if the file
    cannot be written.
    """
    if plan.index is None:
        raise SourceError(plan.source, "has no index: it is not a document")
    base = without_secrets(plan.base)
    if not is_utf8(base):
        raise SourceError(plan.source, "is in a directory whose path is not UTF-8, which no index can note")
    source = plan.source.encode("utf-8", "backslashreplace").decode()
    notes = {"source": source, "base": base, "origin": plan.origin}
    if plan.mtime_ns is not None:
        notes["mtime_ns"] = str(plan.mtime_ns)
    shutil.copyfile(plan.index, path)
    add_notes(path, notes.items())
