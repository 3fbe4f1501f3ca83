"""Helpers for tests of refreshes: documents that change, and mounts of them."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from zarrfs.daemon import control_client

Files = dict[str, bytes]
NAMES = ("a", "b", "c", "d")


def write_set(path: Path, files: Files) -> None:
    """Write a reference set with inline values, replacing the old file atomically."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"version": 1, "refs": {key: data.decode() for key, data in files.items()}}))
    os.replace(beside, path)


def some_files(chance: random.Random, number: int, many: int = 1500) -> Files:
    """Return version `number` of a tree: random names, as files or directories; every file contains `number`."""
    files = {f"keep/{name}": _said(chance, number, name) for name in NAMES if chance.random() < 0.7}
    files["keep/always"] = _said(chance, number, "always")
    for name in NAMES:
        form = chance.randrange(4)
        if form == 1:
            files[name] = _said(chance, number, name)
        elif form >= 2:
            for below in chance.sample(NAMES, form - 1):
                files[f"{name}/{below}"] = _said(chance, number, below)
    files |= {f"many/{index:05}": b"%d;" % number * (1 + number % 4) for index in range(many) if (index + number) % 5}
    return files


def _said(chance: random.Random, number: int, name: str) -> bytes:
    return f"{number}:{name};".encode() * chance.randrange(1, 40)


def directories(files: Files) -> set[str]:
    """Return the parent directories of all files, and their ancestors up to the root ("")."""
    found = {""}
    for key in files:
        parts = key.split("/")[:-1]
        found |= {"/".join(parts[: depth + 1]) for depth in range(len(parts))}
    return found


def names_in(files: Files, directory: str) -> set[str]:
    """Return the names in one directory of a tree of files."""
    prefix = directory + "/" if directory else ""
    return {key[len(prefix) :].split("/")[0] for key in files if key.startswith(prefix)}


def refresh(mountpoint: Path, force: bool = False) -> str:
    """Refresh a mount, and return the result that the daemon reports."""
    return str(control_client.refresh(str(mountpoint), force)["result"])
