"""Documents that change, and mounts that are refreshed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from pathlib import Path

from tests.conftest import PROGRAM
from tests.mounts.mounting import mounted
from zarrfs.daemon import control_client

Files = dict[str, bytes]
NAMES = ("a", "b", "c", "d")
OLD_KERNEL = Path(__file__).parent / "old_kernel.py"


def write_set(path: Path, files: Files) -> None:
    """A reference set with inline values, put in place as a whole."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"version": 1, "refs": {key: data.decode() for key, data in files.items()}}))
    os.replace(beside, path)


def some_files(chance: random.Random, number: int, many: int = 1500) -> Files:
    """Version `number` of a tree: some names, as files here and directories there; every file says its version."""
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
    """All directories that these files lie in."""
    found = {""}
    for key in files:
        parts = key.split("/")[:-1]
        found |= {"/".join(parts[: depth + 1]) for depth in range(len(parts))}
    return found


def names_in(files: Files, directory: str) -> set[str]:
    """The names in a directory of these files."""
    prefix = directory + "/" if directory else ""
    return {key[len(prefix) :].split("/")[0] for key in files if key.startswith(prefix)}


def refresh(mountpoint: Path, force: bool = False) -> str:
    """Refresh, and tell what came of it."""
    return str(control_client.refresh(str(mountpoint), force)["result"])


def mounted_on(
    kernel: str, source: Path | str, mountpoint: Path, *options: str
) -> contextlib.AbstractContextManager[Path]:
    """As mounted(); `kernel` "old": one without epochs."""
    program = (PROGRAM,) if kernel == "new" else (sys.executable, str(OLD_KERNEL))
    return mounted(source, mountpoint, *options, program=program)
