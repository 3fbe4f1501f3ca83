"""Helpers that run copy_store() and read back the directory that it wrote."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import trio

from tests.archives.compiled import opened
from zarrfs.copying.copy import copy_store
from zarrfs.copying.copy_report import CopiedEntry, CopyOptions, CopyReport
from zarrfs.store.api import Kind, Store
from zarrfs.store.directory import FileSystemStore

KINDS = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIRECTORY, stat.S_IFLNK: Kind.SYMLINK}


class FileState(NamedTuple):
    """The attributes and the content of an entry."""

    kind: Kind
    mode: int
    mtime_ns: int
    data: bytes | str | None = None


def look(path: Path | str) -> FileState:
    status = os.lstat(path)
    kind = KINDS[stat.S_IFMT(status.st_mode)]
    data: bytes | str | None = None
    if kind is Kind.SYMLINK:
        data = os.readlink(path)
    elif kind is Kind.FILE and status.st_size < 1 << 26:
        data = Path(path).read_bytes()
    return FileState(kind, stat.S_IMODE(status.st_mode), status.st_mtime_ns, data)


def snapshot(root: Path) -> dict[str, FileState]:
    """Return {relative path: state} of a directory, under "", and of every entry below it."""
    found = {"": look(root)}
    for at, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = os.path.join(at, name)
            found[os.path.relpath(path, root)] = look(path)
    return found


def write(
    store: Store, to: Path, done: Callable[[CopiedEntry], None] = lambda done: None, link: Any = None,
    report: CopyReport | None = None, **choice: Any,
) -> CopyReport:  # fmt: skip
    """Run copy_store(), close the store if it is a directory, and return the report."""
    report = report or CopyReport()

    async def body() -> None:
        try:
            await copy_store(store, str(to), CopyOptions(**choice), report, done, link)
        finally:
            if isinstance(store, FileSystemStore):
                await store.aclose()

    trio.run(body)
    return report


def extract(document: Any, to: Path, blobs: Path | None = None, **choice: Any) -> CopyReport:
    """Extract an archive into a directory with copy_store(), in this process."""
    with opened(document, type="archive", blobs=(str(blobs),) if blobs else ()) as (store, _plan):
        return write(store, to, **choice)
