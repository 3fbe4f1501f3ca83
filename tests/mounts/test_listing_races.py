"""Reads of files whose size is known only from their targets, while other threads list the directory."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import threading
from pathlib import Path

from tests.mounts.mounting import mounted

FILES, SIZE = 300, 5000


def test_a_listing_does_not_shorten_files_being_read(tmp_path: Path) -> None:
    """A listing that was read ahead has no sizes; it must not replace those that a stat has found meanwhile."""
    (tmp_path / "data").mkdir()
    refs = {}
    for number in range(FILES):
        (tmp_path / f"data/{number}").write_bytes(bytes([number % 251]) * SIZE)
        refs[f"x/{number}"] = [f"file://{tmp_path}/data/{number}"]
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    over = threading.Event()

    def list_on(folder: Path) -> None:
        while not over.is_set():
            assert len(os.listdir(folder)) == FILES

    def read(folder: Path, seed: int) -> int:
        wrong = 0
        for number in random.Random(seed).choices(range(FILES), k=150):
            descriptor = os.open(folder / str(number), os.O_RDONLY)
            wrong += os.pread(descriptor, SIZE + 1, 0) != bytes([number % 251]) * SIZE
            os.close(descriptor)
        return wrong

    with mounted(tmp_path / "refs.json", tmp_path / "mnt") as root, concurrent.futures.ThreadPoolExecutor(8) as pool:
        listing = [pool.submit(list_on, root / "x") for _ in range(2)]
        try:
            reading = [pool.submit(read, root / "x", seed) for seed in range(6)]
            assert [one.result() for one in reading] == [0] * 6
        finally:
            over.set()
        for one in listing:
            one.result()
