"""Make a large reference set in the Parquet layout: python parquet_set.py DIRECTORY [REFERENCES].

Chunk i of each array is block i % 5000, of `size` bytes, of target file i // 5000 % 20. The 20 files are in DIRECTORY.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TARGETS, BLOCKS = 20, 5000


def make(directory: Path, references: int, arrays: int = 4, record_size: int = 100_000, size: int = 256) -> None:
    """Write a set of about `references` chunks in square grids below `directory`, and its targets."""
    side = math.isqrt(references // arrays)
    directory.mkdir(parents=True)
    for number in range(TARGETS):
        blocks = (content(number, block, size) for block in range(BLOCKS))
        (directory / f"target{number}.bin").write_bytes(b"".join(blocks))
    array = {
        "zarr_format": 2, "shape": [side, side * size], "chunks": [1, size], "dtype": "|u1", "fill_value": 0,
        "order": "C", "compressor": None, "filters": None,
    }  # fmt: skip
    metadata: dict[str, object] = {".zgroup": {"zarr_format": 2}}
    for name in (f"v{number}" for number in range(arrays)):
        metadata[f"{name}/.zarray"] = array
        (directory / name).mkdir()
        for record in range(-(-(side * side) // record_size)):
            table = rows(record * record_size, min((record + 1) * record_size, side * side), record_size, size)
            pq.write_table(
                table, directory / name / f"refs.{record}.parq", compression="zstd", use_dictionary=["path"],
                write_statistics=["offset", "size"], store_schema=False,
            )  # fmt: skip
    (directory / ".zmetadata").write_text(json.dumps({"metadata": metadata, "record_size": record_size}))


def content(target: int, block: int, size: int) -> bytes:
    """Return the bytes of a chunk."""
    return f"{target}:{block} ".encode().ljust(size, b".")


def rows(start: int, stop: int, record_size: int, size: int) -> pa.Table:
    """Return the table of the record file of chunks `start` to `stop` - 1."""
    at = np.arange(start, start + record_size)
    there = at < stop
    codes = pa.array((at // BLOCKS % TARGETS).astype(np.int32), mask=~there)
    paths = pa.DictionaryArray.from_arrays(codes, [f"target{number}.bin" for number in range(TARGETS)])
    columns = [
        paths, np.where(there, at % BLOCKS * size, 0), np.where(there, size, 0), pa.nulls(record_size, pa.binary()),
    ]  # fmt: skip
    return pa.table(columns, names=["path", "offset", "size", "raw"])


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
