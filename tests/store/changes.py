"""Changes of an overlay, made as a writable mount makes them."""

from __future__ import annotations

import os
import shutil
import stat

from zarrfs.errors import IsDirectory, NotDirectory, NotFound
from zarrfs.store.api import split_key
from zarrfs.store.overlay import Now, Overlay, OverlayEntry


async def put(overlay: Overlay, key: str, value: bytes) -> None:
    """Write a file, with the directories above it. Raise IsDirectory or NotDirectory."""
    for name in key.split("/"):
        overlay.check_name(name)

    def step(now: Now) -> None:
        missing = []
        for at in _above(key):
            found = _find(now, at)
            if found is None:
                missing.append(at)
            elif not found.is_directory:
                raise NotDirectory(at)
        entry = _find(now, key)
        if entry is not None and entry.is_directory:
            raise IsDirectory(key)
        for at in (*missing, key):
            now.make_parents(at)
            with overlay.upper.at(at) as (directory, name):
                if at != key:
                    os.mkdir(name, dir_fd=directory)
                    continue
                if entry is not None and entry.status is not None:
                    os.unlink(name, dir_fd=directory)
                descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory)
                os.write(descriptor, value)
                os.close(descriptor)

    await overlay.change(step)


async def remove(overlay: Overlay, key: str) -> None:
    """Remove a file, or a directory with all that is below it. Raise NotFound."""

    def step(now: Now) -> None:
        found = now.find(key)
        now.hide_lower(key)
        if found.status is not None:
            with overlay.upper.at(key) as (directory, name):
                if stat.S_ISDIR(found.status.st_mode):
                    shutil.rmtree(name, dir_fd=directory)
                else:
                    os.unlink(name, dir_fd=directory)

    await overlay.change(step, key)


def _find(now: Now, key: str) -> OverlayEntry | None:
    try:
        return now.find(key)
    except NotFound:
        return None


def _above(key: str) -> list[str]:
    above = split_key(key)[0]
    return [*_above(above), above] if above else []
