"""A merged tree: a source of any kind, changes of every kind to it that are made without a mount, and the result."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import trio

from zarrfs.config.options import Options
from zarrfs.documents.plan import Plan
from zarrfs.sources import open_plan, plan_source
from zarrfs.store.api import Kind, Store, join_key
from zarrfs.store.overlay import Overlay

SECOND = 10**9
TARGET = bytes(range(256)) * 4
TARGETS = ["d%20 e", "hh::i"]  # names of files with TARGET, which look like encoded and chained URLs
BEFORE = {  # bytes, or (start, stop) of TARGET
    "a/b": b"1", "a/c": (3, 103), "a/é x": (0, len(TARGET)), "a-": b"", "d/e": b"3", "f": b"4", "g/h": b"5" * 3000,
    "g/i/j": (7, 9), ".zgroup": b'{"zarr_format": 2}',
}  # fmt: skip
PATCHED = 300_000  # offset of a byte that is written to a/c, behind a hole
AFTER: dict[str, bytes | str | None] = {  # a file's bytes, a link's target, None for a directory
    "a": None, "a/b": b"changed", "a/c": TARGET[3:103].ljust(PATCHED, b"\0") + b"!", "a/é x": TARGET, "a-": b"",
    "f": None, "f/new": b"in a directory where a file was", "g": None, "g/h": b"5" * 3000, "g/i": None,
    "g/i/j": TARGET[7:9], ".zgroup": b'{"zarr_format": 2}', "empty": None, "link\x1b": "nowhere\n",
    "n": None, "n/日 b": b"new" * 3000,
}  # fmt: skip


class Shown(NamedTuple):
    """The entry that a store shows at a key."""

    kind: Kind
    data: bytes | str | None
    mode: int | None
    mtime_ns: int | None


def write_source(place: Path, kind: str) -> Path:
    """Write BEFORE as a source of `kind`; return its path."""
    for name in TARGETS:
        (place / name).write_bytes(TARGET)
    files = {key: value if isinstance(value, bytes) else TARGET[slice(*value)] for key, value in BEFORE.items()}
    path = place / "source"
    if kind == "zarr":
        for key, data in files.items():
            (path / key).parent.mkdir(parents=True, exist_ok=True)
            (path / key).write_bytes(data)
        return path
    document: Any = [
        {"path": key, "mode": 0o100640, "mtime": 7, "encoding": "base64", "data": base64.b64encode(data).decode()}
        for key, data in files.items()
    ]
    if kind == "references":
        document = {"version": 1, "refs": {}}
        for number, (key, value) in enumerate(BEFORE.items()):
            if isinstance(value, bytes):
                document["refs"][key] = "base64:" + base64.b64encode(value).decode()
            else:
                document["refs"][key] = [str(place / TARGETS[number % 2]), value[0], value[1] - value[0]]
    path.write_text(json.dumps(document))
    return path


def changed_source(place: Path, kind: str) -> Path:
    """Write a source of `kind`, and to `upper` the changes that make it AFTER; return the source."""
    upper = place / "upper"
    upper.mkdir()
    source = write_source(place, kind)

    async def make() -> None:
        overlay, _plan = opened(source, upper)
        overlay.upper.lock(True)  # writes the record, as a mount does
        await overlay.set("a/b", b"changed")
        await overlay.delete("d")
        await overlay.delete("f")
        await overlay.set("f/new", b"in a directory where a file was")
        await overlay.copy_up("g")
        os.chmod(upper / "g", 0o700)
        await overlay.copy_up("a/c")
        descriptor = overlay.upper.open("a/c", os.O_RDWR)
        os.pwrite(descriptor, b"!", PATCHED)
        os.close(descriptor)
        os.chmod(upper / "a/c", 0o4400)
        os.utime(upper / "a/c", ns=(0, -5 * SECOND + 5))
        await overlay.set("n/日 b", b"new" * 3000)
        os.mkdir(upper / "empty")
        os.symlink("nowhere\n", upper / "link\x1b")
        await overlay.aclose()

    trio.run(make)
    return source


def opened(path: Path, upper: Path, **options: Any) -> tuple[Overlay, Plan]:
    """Open a source with the upper directory `upper`; return the overlay and the plan of the source."""
    chosen = Options(upperdir=str(upper), **options)
    plan = plan_source(str(path), chosen, child=False)
    overlay = open_plan(plan, chosen)
    assert isinstance(overlay, Overlay)
    return overlay, plan


def changed(upper: Path, source: Path) -> None:
    """Write the record to `upper` that a mount writes."""
    overlay, _plan = opened(source, upper)
    overlay.upper.lock(True)
    trio.run(overlay.aclose)


async def shown(store: Store, prefix: str = "") -> dict[str, Shown]:
    """Return every entry below a directory, read with list_dir(), info() and get()."""
    found: dict[str, Shown] = {}
    async for listed in store.list_dir(prefix):
        key = join_key(prefix, listed.name)
        info = await store.info(key)
        data: bytes | str | None = info.target
        if info.kind is Kind.FILE:
            data = bytes(await store.get(key))
            assert info.size == len(data)
        found[key] = Shown(info.kind, data, info.mode, info.mtime_ns)
        if info.kind is Kind.DIRECTORY:
            found |= await shown(store, key)
    return found
