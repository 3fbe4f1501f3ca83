"""Invalidation of the kernel's dentries and attributes after a refresh.

Pages need no invalidation: files get new inodes (fuse/inodes.py, renew()), so no name leads to the pages of an old
version. Directories that exist in both versions keep their inode, so no process loses its working directory. Negative
entries expire: the kernel keeps them for NEGATIVE seconds, and a refresh ends only after that time.

Source: FUSE_NOTIFY_INVAL_ENTRY and FUSE_NOTIFY_INVAL_INODE of linux/fuse.h.
"""

from __future__ import annotations

import contextlib
import os
import time

import pyfuse3
import trio
from pyfuse3 import FileNameT, InodeT

from zarrfs.concurrency.tasks import CONTROL
from zarrfs.errors import ZarrfsError
from zarrfs.fuse.operations import NEGATIVE, Operations
from zarrfs.store.api import Kind, split_key

_SETTLES = 0.05  # seconds after which the kernel has processed the replies that were sent before
_BATCH = 256  # lookups in the store between checkpoints


async def invalidate_names(operations: Operations, known: dict[str, int]) -> None:
    """Invalidate all names and attributes after a refresh; return when no client gets an older answer.

    `known` has the inodes of the old version by key.
    """
    shown = trio.current_time()
    directories = operations.inodes.directories()
    were = set(directories)
    gone = [key for key, inode in known.items() if inode not in were]
    gone += await _lost_directories(operations, known, were)
    entries = [(known[above], split_key(key)[1]) for key in gone if (above := split_key(key)[0]) in known]
    names = [(inode, os.fsencode(name)) for inode, name in entries]
    await trio.to_thread.run_sync(_invalidate, names, directories, limiter=CONTROL)
    await trio.sleep_until(shown + _SETTLES + NEGATIVE)


async def _lost_directories(operations: Operations, known: dict[str, int], were: set[int]) -> list[str]:
    """Return the keys in `known` that were directories (inodes in `were`) and are none now."""
    found = []
    for number, (key, inode) in enumerate(known.items()):
        if key and inode in were:
            try:
                info = await operations.store.info(key, sized=False)
                if info.kind is not Kind.DIRECTORY:
                    found.append(key)
            except (ZarrfsError, OSError):  # one invalidation too many is harmless
                found.append(key)
        if not number % _BATCH:
            await trio.lowlevel.checkpoint()
    return found


def _invalidate(names: list[tuple[int, bytes]], directories: list[int]) -> None:
    """Invalidate dentries and attributes. The kernel waits for lookups in progress in a directory."""
    time.sleep(_SETTLES)
    for inode, name in names:
        with contextlib.suppress(OSError):  # the kernel has dropped it already
            pyfuse3.invalidate_entry(InodeT(inode), FileNameT(name))
    for inode in directories:
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_inode(InodeT(inode), attr_only=True)
