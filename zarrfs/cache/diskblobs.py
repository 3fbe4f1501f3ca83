"""DiskBlobs: blobs of archives in a cache directory, one file each, as any place of blobs has them.

They share the bound of the blocks there (diskspace.py) and go as those do, the one not used for longest first.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time

from zarrfs.cache.diskfiles import BLOBS, LAYOUT, TOUCH, Layout
from zarrfs.cache.diskspace import Space, cost
from zarrfs.system.buffers import Buffer

log = logging.getLogger("zarrfs.transfer")

BACK_OFF = 30.0  # seconds without writing after a failure


class DiskBlobs:
    """Keeps verified blobs in `directory`. Thread-safe but for close(); methods block, and none raises for the disk.

    Nobody is asked to believe what is there: whoever reads a blob verifies it.
    """

    def __init__(self, cache_dir: str, size: int, min_free: int) -> None:
        """Within the bounds of DiskCache. Touches nothing on the disk."""
        self._layout = Layout(cache_dir)
        self._space = Space(self._layout, size, min_free)
        self._cache_dir = cache_dir
        self.directory = os.path.normpath(os.path.join(cache_dir, LAYOUT, BLOBS))
        self._until = 0.0  # monotonic; nothing is written before
        self._told: set[str] = set()
        self._counts = dict.fromkeys(("writes", "bytes_written", "dropped", "errors"), 0)
        self._lock = threading.Lock()
        self._closed = False

    def put(self, blobref: str, data: Buffer) -> None:
        """Keep a blob, whose hash is right, if there is room; in place of what is there under its name."""
        if self._closed or time.monotonic() < self._until:
            self._count("dropped")
            return
        try:
            kept = self._put(blobref, data)
        except OSError as exc:
            self._count("errors")
            self._until = time.monotonic() + BACK_OFF
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                self._space.full()  # the next one makes room first
            else:
                self._layout.forget()  # perhaps somebody has removed the directory
                self._space.forget()
            reason = (exc.strerror or str(exc)).lower()
            if reason not in self._told:
                self._told.add(reason)
                log.warning("cache_dir=%s: %s; no blobs are kept there for now", self._cache_dir, reason)
            return
        self._count("writes" if kept else "dropped", len(data) if kept else 0)

    def touch(self, blobref: str) -> None:
        """Note that a blob is used, before it is opened: a file that changes while it is read is verified again."""
        with contextlib.suppress(OSError):
            path = os.path.join(self.directory, blobref)
            if time.time() - os.stat(path, follow_symlinks=False).st_mtime > TOUCH:
                self._layout.touch(blobref)

    def stats(self) -> dict[str, int]:
        """Counts since the start."""
        return {**self._counts, "evicted": self._space.evicted}

    def resize(self, size: int, min_free: int) -> None:
        """Other bounds from now on."""
        self._space.resize(size, min_free)

    def close(self) -> None:
        """Give back what was reserved."""
        self._closed = True
        try:
            self._space.close()
        finally:
            self._layout.forget()

    def _count(self, what: str, written: int = 0) -> None:
        with self._lock:
            self._counts[what] += 1
            self._counts["bytes_written"] += written

    def _put(self, blobref: str, data: Buffer) -> bool:
        count, taken = cost(len(data)), 0
        if not self._space.take(count):
            return False
        try:
            taken = self._layout.put(blobref, [data] if len(data) else [])
        finally:
            self._space.done(count, taken)
        return True
