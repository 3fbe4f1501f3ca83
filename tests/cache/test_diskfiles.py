"""The files of the disk cache, where threads meet."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zarrfs.cache.diskfiles import Handle, Layout


def test_threads_that_open_a_directory_at_once_share_one_descriptor(tmp_path: Path) -> None:
    """The second must not take the place of the first, which is closed then, under a thread that uses it."""
    both = threading.Barrier(2)

    class Meeting(Layout):
        def _open_folder(self, name: str, make: bool) -> Handle:
            found = super()._open_folder(name, make)
            both.wait(60)
            return found

    layout = Meeting(str(tmp_path))
    layout.folder("", make=True)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda name: layout.folder(name, make=True), ("ab", "ab"))
    assert first is second
