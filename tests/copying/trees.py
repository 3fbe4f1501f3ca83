"""Snapshots of directories, and an archive of many files, for tests that copy."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from typing import Any, NamedTuple

from tests.archives.compiled import file, put
from zarrfs.store.api import Kind

KINDS = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIRECTORY, stat.S_IFLNK: Kind.SYMLINK}


class FileState(NamedTuple):
    """The attributes and the content of an entry; a FIFO has no kind."""

    kind: Kind | None
    mode: int
    mtime_ns: int
    data: bytes | str | None = None


def look(path: Path | str) -> FileState:
    status = os.lstat(path)
    kind = KINDS.get(stat.S_IFMT(status.st_mode))
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


def archive_of(base: Path, files: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return an archive of many files in directories with unusual modes; write its blobs to `base`."""
    chance, entries = random.Random(seed), []
    for index in range(files):
        folder = f"d{index % 13}/e{index % 3}"
        parts, at = [], 0
        for _ in range(chance.choice((1, 1, 1, 3))):
            data = chance.randbytes(chance.choice((0, 10, 4096, 70_000)))
            parts.append([at, len(data), put(base, data)])
            at += len(data) + chance.choice((0, 0, 5000))
        entries.append({"path": f"{folder}/f{index}", "size": at, "encoding": "blobvec", "data": parts, "mtime": index,
                        "mode": 0o100000 | chance.choice((0o644, 0o400, 0o4711))})  # fmt: skip
    for index in range(13):
        mode = 0o40000 | (0o555, 0o2700, 0o711)[index % 3]
        entries.append({"path": f"d{index}", "mode": mode, "mtime": index})
        entries += [{"path": f"d{index}/e{at}", "mode": mode, "mtime": at} for at in range(3)]
    entries += [{"path": f"d{index}/l", "mode": 0o120777, "data": f"e{index}", "mtime": 5} for index in range(13)]
    large, at = [], 0
    for _ in range(5):
        data = chance.randbytes(3 << 20)
        large.append([at, len(data), put(base, data)])
        at += len(data)
    return [*entries, {"path": "d0/large", **file(large, encoding="blobvec", size=at, mtime=77)}]
