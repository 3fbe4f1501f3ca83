"""`check` and `info` of a store with invalid arrays: each is named, and none ends the walk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import zarr

from tests.conftest import run

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
INVALID: dict[str, dict[str, object]] = {
    "number": {"chunk_shape": 2}, "none": {"chunk_shape": None}, "zero": {"chunk_shape": [0]},
    "text": {"chunk_shape": "2"}, "part": {"chunk_shape": [3]}, "long": {"chunk_shape": [2, 2]},
    "float": {"chunk_shape": [2.0]}, "place": {"index_location": "middle"}, "index": {"index_codecs": []},
    "index2": {"index_codecs": 3}, "codecs": {"codecs": [{"configuration": {}}]}, "codecs2": {"codecs": 4},
}  # fmt: skip


def test_invalid_shards_are_named_and_other_arrays_checked(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "z", mode="w", zarr_format=3)
    for name in [*INVALID, "zz"]:
        root.create_array(name, shape=(8,), chunks=(2,), shards=(4,), dtype="i4")[:] = np.arange(8)
        path = tmp_path / "z" / name / "zarr.json"
        document = json.loads(path.read_text())
        document["codecs"][0]["configuration"] |= INVALID.get(name, {})
        path.write_text(json.dumps(document))
    (tmp_path / "z/zz/c/1").write_bytes(b"damaged")
    done = run("check", tmp_path / "z")
    assert (done.returncode, done.stderr) == (1, "")
    for name in [*INVALID, "zz"]:
        assert f"{name}/" in done.stdout or f"{name}:" in done.stdout, done.stdout
    done = run("info", tmp_path / "z")
    assert "Error" not in done.stderr
    assert all(name in done.stdout for name in INVALID)
