"""Invalidation of the kernel's dentries and attributes after a refresh.

Pages need no invalidation: files get new inodes (fuse/inodes.py, renew()), so no name leads to the pages of an old
version.

Since Linux 6.16 one message covers all dentries, also negative ones: a dentry belongs to an epoch, and the kernel
looks its name up again in the next epoch. Directories that keep their inode stay valid, so no process loses its
working directory. On older kernels each name is invalidated separately, in a thread; for this, negative entries are
recorded.

Source: FUSE_NOTIFY_INC_EPOCH, FUSE_NOTIFY_INVAL_ENTRY and FUSE_NOTIFY_INVAL_INODE of linux/fuse.h (protocol 7.44).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import struct
import time
from collections import OrderedDict

import pyfuse3
import trio
from pyfuse3 import FileNameT, InodeT

from zarrfs.errors import ZarrfsError
from zarrfs.fuse.operations import Operations
from zarrfs.store.api import Kind, split_key

log = logging.getLogger(__name__)

_INC_EPOCH = 8
_DEVICE = os.makedev(10, 229)  # /dev/fuse: Documentation/admin-guide/devices.txt
_SETTLES = 0.05  # seconds after which the kernel has processed the replies that were sent before
_BATCH = 256  # lookups in the store between checkpoints


def devices() -> set[int]:
    """Return the open descriptors of /dev/fuse in this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == _DEVICE:
                found.add(int(name))
    return found


def has_epochs(device: int) -> bool:
    """Begin the next epoch; return False if the kernel has no epochs. Does not block: it only increments a counter."""
    try:
        os.write(device, struct.pack("=IiQ", 16, _INC_EPOCH, 0))  # struct fuse_out_header
    except OSError as exc:
        log.debug("no epochs: %s", exc)
        return False
    return True


class Invalidation:
    """Invalidation of the names and attributes of a mount in the kernel's caches.

    `device` is the mount's descriptor of /dev/fuse, if known.
    """

    def __init__(self, operations: Operations, device: int | None) -> None:
        self._operations, self._device = operations, device
        if not self._next_epoch():
            operations.absent = OrderedDict()

    async def names(self, known: dict[str, int]) -> None:
        """Invalidate all names and attributes after a refresh. `known` has the inodes of the old version by key."""
        operations = self._operations
        directories = operations.inodes.directories()
        if self._next_epoch():
            await trio.to_thread.run_sync(_attributes, directories)
            return
        absent = list(operations.absent or ())
        operations.absent = OrderedDict()
        were = set(directories)
        gone = [key for key, inode in known.items() if inode not in were]
        gone += await self._lost_directories(known, were)
        entries = [(known[above], split_key(key)[1]) for key in gone if (above := split_key(key)[0]) in known]
        names = [(inode, os.fsencode(name)) for inode, name in entries]
        await trio.to_thread.run_sync(_entries, [*names, *absent])
        await trio.to_thread.run_sync(_attributes, directories)

    async def _lost_directories(self, known: dict[str, int], were: set[int]) -> list[str]:
        """Return the keys in `known` that were directories (inodes in `were`) and are none now."""
        found = []
        for number, (key, inode) in enumerate(known.items()):
            if key and inode in were:
                try:
                    info = await self._operations.store.info(key, sized=False)
                    if info.kind is not Kind.DIRECTORY:
                        found.append(key)
                except (ZarrfsError, OSError):  # one invalidation too many is harmless
                    found.append(key)
            if not number % _BATCH:
                await trio.lowlevel.checkpoint()
        return found

    def _next_epoch(self) -> bool:
        return self._device is not None and has_epochs(self._device)


def _entries(names: list[tuple[int, bytes]]) -> None:
    """Invalidate dentries. Call it in a thread, because the kernel waits for lookups in progress in a directory."""
    time.sleep(_SETTLES)
    for inode, name in names:
        with contextlib.suppress(OSError):  # the kernel has dropped it already
            pyfuse3.invalidate_entry(InodeT(inode), FileNameT(name))


def _attributes(inodes: list[int]) -> None:
    for inode in inodes:
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_inode(InodeT(inode), attr_only=True)
