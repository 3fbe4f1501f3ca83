"""Open files of the disk cache: shared by threads, and removed by other nodes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cache.diskblocks import flush
from zarrfs.cache.disk import DiskCache
from zarrfs.cache.diskfiles import BLOBS, LAYOUT, Handle, Layout
from zarrfs.net.versions import TargetVersion


def test_threads_that_open_a_directory_concurrently_share_one_descriptor(tmp_path: Path) -> None:
    """If the second descriptor replaced the first, the first would be closed while a thread still uses it."""
    both = threading.Barrier(2)

    class Meeting(Layout):
        def _open_blobs(self, make: bool) -> Handle:
            found = super()._open_blobs(make)
            both.wait(60)
            return found

    layout = Meeting(str(tmp_path))
    layout.folder("", make=True)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda name: layout.folder(name, make=True), (BLOBS, BLOBS))
    assert first is second


def test_blocks_are_kept_again_after_another_node_has_removed_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a file that another node has removed is stale (ESTALE), even while it is open here."""
    fstat = os.fstat

    def stale(fd: int) -> os.stat_result:
        found = fstat(fd)
        if not found.st_nlink and os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):  # not pytest's own
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return found

    monkeypatch.setattr(os, "fstat", stale)
    cache, version = DiskCache(str(tmp_path), 1 << 28, 0), TargetVersion("1", 10**6)

    def keeps(start: int) -> bool:
        cache.write("t", version, start, bytes(1000))
        flush(cache)
        return cache.read("t", version, start, start + 1000) is not None

    try:
        assert any(keeps(start) for start in range(0, 100_000, 1000)), "a disk that is busy keeps nothing"
        shutil.rmtree(tmp_path / LAYOUT)
        assert any(keeps(start) for start in range(100_000, 200_000, 1000))
        assert not cache.stats()["errors"]
    finally:
        cache.close()
