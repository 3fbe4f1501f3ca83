"""Data of the benchmark: references into one file, and the keys of the large set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

PIECE = 4096  # bytes of each key of the large set
DIRECTORIES = 10
BIG = "big"


def keys(entries: int) -> Iterator[tuple[str, str]]:
    """Yield (directory, name) of each key: arrays of two-dimensional chunks, as kerchunk writes them."""
    each = -(-entries // DIRECTORIES)
    for number in range(entries):
        array, chunk = divmod(number, each)
        yield f"v{array}", f"{chunk // 100}.{chunk % 100}"


class Data:
    """The files of one run, in a directory of their own."""

    def __init__(self, directory: Path, entries: int, size: int) -> None:
        self.directory, self.entries, self.size = directory, entries, size
        self.target = directory / "data.bin"
        self.many = directory / "many.json"
        self.big = directory / "big.json"
        self.small = directory / "small.json"
        self._write_target()
        url = f"file://{self.target}"
        pieces = size // PIECE
        self._write(
            self.many,
            {f"{d}/{name}": [url, i % pieces * PIECE, PIECE] for i, (d, name) in enumerate(keys(entries))},
        )
        self._write(self.big, {BIG: [url, 0, size]})
        self._write(self.small, {".zgroup": '{"zarr_format":2}', "a/0": [url, 0, PIECE]})

    def _write_target(self) -> None:
        block = os.urandom(1 << 20)
        with open(self.target, "wb") as file:
            for _ in range(self.size >> 20):
                file.write(block)

    @staticmethod
    def _write(path: Path, refs: dict[str, object]) -> None:
        path.write_text(json.dumps({"version": 1, "refs": refs}))
