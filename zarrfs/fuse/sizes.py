"""Sizes that a listing does not know: those that the kernel has, and requests for the others ahead of a client."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pyfuse3
import trio
from pyfuse3 import InodeT

from zarrfs.concurrency.lru import LRU
from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import ZarrfsError
from zarrfs.store.api import Store

_RECENT = 60.0  # seconds after a listing in which a stat of one of its names is attributed to it
_NAMES = 8192  # listed names to remember
_AT_ONCE = 128  # sizes to request together


class Sizes(dict[int, int | None]):
    """The size that the kernel has of each inode; None: it was sent none.

    An entry without a size is sent with 0 bytes and without a lifetime, so that stat(2) sends a getattr, which finds
    the size. Three rules of the kernel matter (fuse_change_attributes() and fuse_notify_store() in Linux):

    - The size of a later entry replaces that of an earlier one. So an entry without a size repeats the size that was
      sent last; otherwise readers would find the file shorter.
    - Attributes in a reply to a request that is older than the inode's last change are dropped. The reply to open has
      no attributes. A notify_store() of zero bytes at the end of the file is such a change, and sets the size, so a
      listing in flight does not reset it.
    - A second one would drop the attributes that another client is waiting for, so there is one for an inode.
    """

    def shown(self, inode: int, size: int | None) -> int:
        """Return the size to send in an entry of `inode`, whose size is `size` or unknown."""
        if size is None:
            return self.setdefault(inode, None) or 0
        self[inode] = size
        return size

    def is_unknown(self, inode: int) -> bool:
        """Return whether the kernel was sent `inode` without a size."""
        return self.get(inode, 0) is None

    def learned(self, inode: int, size: int) -> None:
        """Note the size of a file that is being opened; tell the kernel if it has none."""
        if self.is_unknown(inode):
            self[inode] = size
            with contextlib.suppress(OSError):  # the kernel has forgotten the inode meanwhile
                pyfuse3.notify_store(InodeT(inode), size, b"")


class StatAhead:
    """The keys that were listed without a size, in pieces: the first stat of a piece requests all its sizes."""

    def __init__(self) -> None:
        self._pieces: LRU[str, tuple[float, list[str]]] = LRU(_NAMES)

    def listed(self, keys: Sequence[str]) -> None:
        """Note keys that were listed without a size."""
        for at in range(0, len(keys), _AT_ONCE):
            piece = trio.current_time(), list(keys[at : at + _AT_ONCE])
            for key in piece[1]:
                self._pieces.put(key, piece)

    def begin(self, key: str) -> list[str] | None:
        """Return the keys whose sizes to request now that a client stats `key`; None if it was not listed lately."""
        piece = self._pieces.get(key)
        if piece is None or trio.current_time() - piece[0] > _RECENT:
            return None
        found = piece[1][:]
        piece[1].clear()
        return found


async def request_sizes(store: Store, keys: Sequence[str]) -> None:
    """Make a store find the sizes of `keys`."""

    async def request(key: str) -> None:
        with contextlib.suppress(ZarrfsError):  # a client that stats the name gets the error
            await store.info(key)

    await for_each(request, keys)
